"""The `clusterddp` command: its subcommands, each loaded when it is used, its start and its end.

A command that ends within moments does without two habits of Python. Collecting garbage, which
`__main__` switches off: a start creates modules, classes and functions, which stay. Taking
everything apart at the end: the memory goes back to the system in any case. Measured on
`submit --dry-run`: 7 and 17 of 89 ms.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import sys
import threading
from typing import TYPE_CHECKING, NoReturn

import click

from clusterddp.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_WRONG_REQUEST,
    ClusterDDPError,
    coded,
    is_debuggers_quit,
)
from clusterddp.version import __version__

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

# A command is the module of its name in clusterddp.cli.commands, which holds `command`; its line
# stands in the overview. Those without one are called by batch scripts.
COMMANDS = {
    "submit": "Render, check and submit a run to Slurm.",
    "check": "Say what will go wrong in scripts of your own.",
    "import": "Print the submit line that does what an sbatch script does.",
    "doctor": "Check this account, Slurm, folders and Python for runs.",
    "debug": "Train in this very process, or in --procs N of them.",
    "compare": "Train on one device and on several: a table, and a picture.",
    "train": "Train as one rank: in a task of a run, by hand or under torchrun.",
    "exec": "Derive the distributed environment and become COMMAND.",
    "env": "Show who this task is, and where each value came from.",
    "runs": "List the runs.",
    "status": "Show how a run is doing.",
    "logs": "Show or follow the logs of a run.",
    "stacks": "Show where each rank of a running job is now.",
    "checkpoints": "List and verify the checkpoints of a run.",
    "report": "Show what runs achieved, also as a page of HTML.",
    "stop": "Ask a run to save and leave.",
    "cancel": "Cancel a run.",
    "resume": "Resume a run from its last checkpoint.",
    "clean": "Remove what can be spared of old runs.",
    "rm": "Remove whole runs.",
    "bad-nodes": "List the nodes that runs leave out as bad, or clear them.",
    "data": "Fetch, check, import or generate the dataset.",
    "templates": "List, show or copy the sbatch templates.",
    "site": "Show each setting in force and its source; take those for a public cluster.",
    "explain": "Explain the code that ends a message, and what to do.",
    "completion": "Print the completion script of a shell.",
    "batch": "",
    "probe": "",
    "notify": "",
}
MODULES = {"import": "import_script"}
"""Modules of commands whose names Python keeps for itself."""
_exit_code = EXIT_FAILED
"""Python's own code after a traceback, until `end` sets another."""
OF_HELP = {"help_option_names": ["-h", "--help"]}
"""Settings of click's context. `submit` has them as well, whose options other commands parse."""
QUICK = {
    "submit", "check", "import", "runs", "status", "report", "templates", "site", "explain",
    "completion",
}  # fmt: skip
"""Commands that read, print and leave; `submit` calls `go_on` itself when it does more."""


class LazyGroup(click.Group):
    """A group that knows its subcommands by name, and imports one only to run it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name, line in COMMANDS.items() if line]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        name = MODULES.get(cmd_name, cmd_name.replace("-", "_"))
        module = importlib.import_module(f"clusterddp.cli.commands.{name}")
        if cmd_name not in QUICK:
            go_on()
        command: click.Command = module.command
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Offer the commands' names without importing them, and options as click does."""
        from click.shell_completion import CompletionItem

        if incomplete.startswith("-"):
            return click.Command.shell_complete(self, ctx, incomplete)
        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        return [CompletionItem(name, help=COMMANDS[name]) for name in names]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            import difflib

            near = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
            hint = f" Did you mean {near[0]!r}?" if near else " See 'clusterddp --help'."
            ctx.fail(f"No such command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name]) for name in self.list_commands(ctx)])


@click.group(
    cls=LazyGroup,
    context_settings=OF_HELP,
    epilog="Exit codes: 0 done, 1 the run failed, 2 a wrong request, 75 stopped and "
    "can resume, 130 interrupted.",
)
@click.version_option(__version__, message="%(prog)s %(version)s")
def cli() -> None:
    """Take a PyTorch distributed training run onto a Slurm cluster.

    \b
    clusterddp submit --nodes 2 --gpus-per-node 4                    trains MNIST on 8 ranks
    clusterddp submit --nodes 2 --gpus-per-node 4 -- python train.py  your own script
    clusterddp submit --nodes 2 --gpus-per-node 4 --dry-run          prints the sbatch script
    """


def main() -> NoReturn:
    """Run the command and exit with its code."""
    try:
        _run()
    except SystemExit as leaving:
        end(leaving)


def go_on() -> None:
    """Continue as a program like any other, which can run for hours and start threads."""
    if not gc.isenabled():
        gc.freeze()  # nothing of what was imported will ever be garbage
        gc.enable()
        # Before anything else registers a handler, so that it is the last of them to run.
        atexit.register(_leave_threads_behind)


def done() -> None:
    """Let `end` leave at once after all: everything is flushed and closed."""
    gc.disable()


def end(leaving: SystemExit) -> NoReturn:
    """Exit with the given code: at once without `go_on`, or after `done`, and untraced.

    Leaving at once skips the handlers of `atexit`: none of those that register one (logging,
    multiprocessing, torch) is part of a command that never went on.
    """
    global _exit_code  # noqa: PLW0603 -- an exit handler takes no arguments
    _exit_code = leaving.code if isinstance(leaving.code, int) else int(bool(leaving.code))
    if gc.isenabled() or sys.gettrace() or sys.getprofile():
        raise leaving
    _exit_at_once(_exit_code)


def _run() -> NoReturn:
    """Turn expected errors, wrong usage and Ctrl-C into their exit codes."""
    try:
        code = cli.main(prog_name="clusterddp", standalone_mode=False)
    except click.exceptions.Abort:
        click.echo("interrupted", err=True)
        sys.exit(EXIT_INTERRUPTED)
    except click.ClickException as error:
        message = coded(error.format_message(), "CD0101")
        vars(error)["format_message"] = lambda: message
        error.show()
        sys.exit(error.exit_code)
    except ClusterDDPError as error:
        click.echo(f"clusterddp: {coded(error)}", err=True)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader of our output has gone (`| head`); point stdout elsewhere so that the
        # interpreter's own flush at exit does not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_FAILED)
    except Exception as error:
        if is_debuggers_quit(error):
            sys.exit(EXIT_INTERRUPTED)
        if isinstance(error, FileNotFoundError) and _folder_is_gone():
            words = "the current folder was removed. Change to one that is there: cd [CD0512]"
            click.echo(f"clusterddp: {words}", err=True)
            sys.exit(EXIT_WRONG_REQUEST)
        raise
    sys.exit(code if isinstance(code, int) else 0)


def _folder_is_gone() -> bool:
    try:
        os.getcwd()  # noqa: PTH109 -- light
    except FileNotFoundError:
        return True
    return False


def _leave_threads_behind() -> None:
    """Exit at once, as the last exit handler, while a thread may be inside torch.

    A checkpoint that a disk holds up, a rank that does not answer: such a thread is left behind. Up
    to Python 3.13 one that comes back from C++ after the interpreter has gone is ended there by
    pthread_exit, and C++ answers with std::terminate: a crash in place of the exit code (seen with
    torch.save; CPython's gh-87135).
    """
    if threading.active_count() > 1:
        _exit_at_once(_exit_code)


def _exit_at_once(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        if stream:  # None where it was closed before the start
            stream.flush()
    os._exit(code)
