"""The `clusterddp` command: lazily loaded subcommands, startup and exit.

A short command skips two things. Garbage collection, which `__main__` disables: startup creates
modules, classes and functions that all stay. Python's teardown: the system reclaims the memory.
This saves 7 and 17 of 89 ms of `submit --dry-run`.
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

# Each command is `command` in the module of that name in clusterddp.cli.commands. Commands without
# a help line are for batch scripts and not listed.
COMMANDS = {
    "submit": "Render, check and submit a run to Slurm.",
    "debug": "Train on this machine, in one process or in --procs N.",
    "train": "Train as one rank, in a job, by hand or under torchrun.",
    "compare": "Train on one device and on several; print a table.",
    "runs": "List runs.",
    "status": "Show the state and progress of a run.",
    "logs": "Show or follow the logs of a run.",
    "stacks": "Show where each rank of a running job is.",
    "checkpoints": "List and verify the checkpoints of a run.",
    "report": "Show results of runs, also as an HTML page.",
    "tensorboard": "Show the metrics of a run in TensorBoard.",
    "fetch": "Copy the results of a run from a cluster.",
    "hold": "Hold nodes, in which runs start at once.",
    "release": "End a hold.",
    "resume": "Resume a run from its last checkpoint.",
    "stop": "Ask a run to checkpoint and exit.",
    "cancel": "Cancel a run.",
    "clean": "Free disk space used by old runs.",
    "rm": "Remove runs.",
    "check": "Check your scripts for mistakes.",
    "import": "Convert an sbatch script into a submit line.",
    "exec": "Set the rank variables and run COMMAND.",
    "env": "Show this task's rank variables and their sources.",
    "doctor": "Check the account, Slurm, directories and Python.",
    "site": "Show the settings in force and their sources.",
    "templates": "List, show or copy the sbatch templates.",
    "bad-nodes": "List or clear the nodes marked bad.",
    "data": "Fetch, check, import or generate the dataset.",
    "explain": "Explain the code at the end of a message.",
    "completion": "Print the completion script of a shell.",
    "batch": "",
    "held": "",
    "probe": "",
    "stage": "",
    "notify": "",
}
_GROUPS = {
    "Run": "submit debug train compare hold release",
    "Watch": "runs status logs stacks checkpoints report tensorboard fetch",
    "Resume and clean up": "resume stop cancel clean rm",
    "Your scripts": "check import exec env",
    "This site": "doctor site templates bad-nodes data explain completion",
}
"""Groups of commands in --help."""
MODULES = {"import": "import_script"}
"""Modules of commands whose names are Python keywords."""
_exit_code = EXIT_FAILED
"""Exit code: Python's own after a traceback, until `end` sets another."""
HELP_SETTINGS = {"help_option_names": ["-h", "--help"]}
"""Settings of click's context, also for `submit`, whose options other commands parse."""
QUICK = {
    "submit", "check", "import", "runs", "status", "report", "templates", "site", "explain",
    "completion",
}  # fmt: skip
"""Commands that read, print and exit; `submit` calls `enable_gc` itself if it does more."""


_AT_BOTH_ENDS = {"fetch": "--pack", "tensorboard": "--serve"}
"""Commands that run here, too, with --on; and the flag of the cluster's part."""
_FORWARDED, ON = "clusterddp.forwarded", "clusterddp.on"


class LazyGroup(click.Group):
    """A group that imports a subcommand only to run it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name, line in COMMANDS.items() if line]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        name = MODULES.get(cmd_name, cmd_name.replace("-", "_"))
        module = importlib.import_module(f"clusterddp.cli.commands.{name}")
        if cmd_name not in QUICK:
            enable_gc()
        command: click.Command = module.command
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Also take --on after the command's name; keep the command's words for it."""
        if args[1:2] and args[1].partition("=")[0] == "--on":
            words = 1 if "=" in args[1] else 2
            args = [*args[1 : 1 + words], args[0], *args[1 + words :]]
        typed = [*args]
        rest = super().parse_args(ctx, args)
        if ctx.params.get("on") is not None:
            ctx.meta[_FORWARDED] = self.make_parser(ctx).parse_args(typed)[1]
        return rest

    def invoke(self, ctx: click.Context) -> object:
        """Run a command here, or with --on there."""
        name = ctx.params.pop("on", None)
        if name is not None:
            enable_gc()
            words = ctx.meta[_FORWARDED]
            clusters_part = _AT_BOTH_ENDS.get(next(iter(words), ""))
            if clusters_part is None or clusters_part in words:
                from clusterddp.remote.fleet import run

                return run(name, words)
            ctx.meta[ON] = name
        return super().invoke(ctx)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete command names without importing the commands, and options as click does."""
        from click.shell_completion import CompletionItem

        if incomplete.startswith("-"):
            return click.Command.shell_complete(self, ctx, incomplete)
        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        return [CompletionItem(name, help=COMMANDS[name]) for name in names]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            from clusterddp.cli.usage_errors import no_such_command

            ctx.fail(no_such_command(args[0], self.list_commands(ctx)))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for title, names in _GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:<{width}}", COMMANDS[name]) for name in names.split()])


@click.group(
    cls=LazyGroup,
    context_settings=HELP_SETTINGS,
    epilog="Exit codes: 0 done; 1 the run failed; 2 usage error, or refused; 75 stopped after a "
    "checkpoint, can resume; 130 interrupted.",
)
@click.option(
    "--on",
    metavar="NAME",
    help="Run the command on a cluster, by ssh: a host or a [cluster:NAME]; all; any.",
)
@click.version_option(__version__, message="%(prog)s %(version)s")
def cli() -> None:
    """Run PyTorch distributed training on a Slurm cluster.

    \b
    clusterddp submit --nodes 2 --gpus-per-node 4 -- python train.py
    clusterddp submit --nodes 2 --gpus-per-node 4            # MNIST on 8 ranks
    clusterddp submit --nodes 2 --gpus-per-node 4 --dry-run  # prints the script
    """


def main() -> NoReturn:
    """Run the command and exit with its code."""
    try:
        _run()
    except SystemExit as leaving:
        end(leaving)


def enable_gc() -> None:
    """Enable garbage collection and a normal exit, for long commands and those with threads."""
    if not gc.isenabled():
        gc.freeze()  # imported objects are never garbage
        gc.enable()
        # Registered first, so that it runs last.
        atexit.register(_skip_python_exit)


def allow_fast_exit() -> None:
    """Let `end` skip Python's teardown again: everything is flushed and closed."""
    gc.disable()


def end(leaving: SystemExit) -> NoReturn:
    """Exit with the given code; without garbage collection and tracing, skip Python's teardown.

    That also skips `atexit` handlers: a command that never called `enable_gc` imports nothing that
    registers one (logging, multiprocessing, torch).
    """
    global _exit_code  # noqa: PLW0603 -- an exit handler takes no arguments
    _exit_code = leaving.code if isinstance(leaving.code, int) else int(bool(leaving.code))
    if gc.isenabled() or sys.gettrace() or sys.getprofile():
        raise leaving
    _exit_at_once(_exit_code)


def _run() -> NoReturn:
    """Run the command; turn expected errors, usage errors and Ctrl-C into exit codes."""
    try:
        code = cli.main(prog_name="clusterddp", standalone_mode=False)
    except click.exceptions.Abort:
        click.echo("interrupted", err=True)
        sys.exit(EXIT_INTERRUPTED)
    except click.ClickException as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # from click 8.2
            click.echo(error.format_message(), err=True)
        else:
            from clusterddp.cli.usage_errors import usage_message

            click.echo(f"clusterddp: {usage_message(error)}", err=True)
        sys.exit(error.exit_code)
    except ClusterDDPError as error:
        click.echo(f"clusterddp: {coded(error)}", err=True)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader of our output has exited (`| head`). Redirect stdout so that Python's own flush
        # at exit does not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_FAILED)
    except Exception as error:
        if is_debuggers_quit(error):
            sys.exit(EXIT_INTERRUPTED)
        if isinstance(error, FileNotFoundError) and _cwd_is_gone():
            words = "the current directory was removed. Change to an existing one: cd [CD0512]"
            click.echo(f"clusterddp: {words}", err=True)
            sys.exit(EXIT_WRONG_REQUEST)
        raise
    sys.exit(code if isinstance(code, int) else 0)


def _cwd_is_gone() -> bool:
    try:
        os.getcwd()  # noqa: PTH109 -- light
    except FileNotFoundError:
        return True
    return False


def _skip_python_exit() -> None:
    """Skip Python's teardown, as the last exit handler, if it could change the exit code.

    Up to Python 3.13, a thread that returns from C++ after the interpreter has exited (a slow
    torch.save, for example) is ended by pthread_exit, which C++ turns into std::terminate: a crash
    (CPython's gh-87135). After a Ctrl-C inside exec() of a string, as in the import of a dataclass,
    `python -m` kills itself by SIGINT even if it was handled (CPython's
    unhandled_keyboard_interrupt).
    """
    if threading.active_count() > 1 or _exit_code == EXIT_INTERRUPTED:
        _exit_at_once(_exit_code)


def _exit_at_once(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        if stream:  # None if it was closed before the start
            stream.flush()
    os._exit(code)
