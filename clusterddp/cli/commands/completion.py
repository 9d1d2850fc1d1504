"""`clusterddp completion`: prints the completion script of a shell."""

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")
_COMPLETE_VARIABLE = "_CLUSTERDDP_COMPLETE"


@click.command(name="completion")
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print the completion script of SHELL; it also completes run names and partitions.

    \b
    # bash, in ~/.bashrc:
    eval "$(clusterddp completion bash)"
    # zsh, in ~/.zshrc, after compinit:
    eval "$(clusterddp completion zsh)"
    # fish:
    clusterddp completion fish > ~/.config/fish/completions/clusterddp.fish

    Exit codes: 0 printed, 2 usage error.
    """
    kind = get_completion_class(shell)
    assert kind is not None, f"click knows no {shell}"
    click.echo(kind(ctx.find_root().command, {}, "clusterddp", _COMPLETE_VARIABLE).source())
