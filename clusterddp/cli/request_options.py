"""The request options of `submit`; each is also a CLUSTERDDP_* variable and a site.cfg key."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from clusterddp.cli.partition import PARTITION
from clusterddp.request.resources import GPU_REQUESTS
from clusterddp.request.spec import EXPEDITE, LAUNCHERS

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

F = TypeVar("F", bound=Callable[..., Any])


class Line(click.types.StringParamType):
    """One item of a list; in an environment variable, items stand on lines of their own."""

    name = "text"
    envvar_list_splitter = "\n"

    def split_envvar_value(self, rv: str) -> list[str]:
        return [line for line in rv.split("\n") if line]


LINE = Line()


class Template(click.types.StringParamType):
    """The name of a shipped template or a file; completes both, and those of --template-dir."""

    name = "template"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> "list[CompletionItem]":
        from click.shell_completion import CompletionItem

        from clusterddp.cli.commands.templates import SHIPPED

        folder = ctx.params.get("template_dir")
        own = sorted(path.name for path in Path(folder).glob("*.j2")) if folder else []
        names = [name for name in dict.fromkeys([*SHIPPED, *own]) if name.startswith(incomplete)]
        files = [] if names and incomplete else [CompletionItem(incomplete, type="file")]
        return [*map(CompletionItem, names), *files]


TEMPLATE = Template()

_WORDS = {
    **dict.fromkeys(("yes", "true", "on", "1", "y", "t"), True),
    **dict.fromkeys(("no", "false", "off", "0", "n", "f"), False),
}


class RequeueType(click.types.StringParamType):
    """Yes, no or `expedite`, from a flag, a variable or site.cfg."""

    name = EXPEDITE

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return True, False or `expedite`."""
        if isinstance(value, bool):
            return value
        word = str(value).strip().lower()
        if word == EXPEDITE:
            return EXPEDITE
        if word not in _WORDS:
            self.fail(f"{value!r} is neither yes, no nor {EXPEDITE}.", param, ctx)
        return _WORDS[word]


class RequeueOption(click.Option):
    """`--requeue`, `--requeue=expedite` and `--no-requeue`, as sbatch has them."""

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        """Register all forms for one value."""
        super().add_to_parser(parser, ctx)
        parser.add_option(
            obj=self, opts=["--no-requeue"], dest=self.name, action="store_const", const="no"
        )
        parse = parser.parse_args
        parser.parse_args = lambda args: parse(_with_value(args))

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the two columns of --help."""
        record = super().get_help_record(ctx)
        return record and (f"--requeue[={EXPEDITE}] / --no-requeue", record[1])


def _with_value(args: list[str]) -> list[str]:
    """Spell a bare `--requeue` out: click would take the word after it as its value."""
    cut = args.index("--") if "--" in args else len(args)
    return [f"{arg}=yes" if arg == "--requeue" else arg for arg in args[:cut]] + args[cut:]


# (name, keyword arguments of click.option), by the group under which --help shows them.
REQUEST: dict[str, dict[str, dict[str, Any]]] = {
    "What Slurm is asked for": {
        "nodes": {"type": int, "default": 1, "help": "Number of nodes."},
        "gpus-per-node": {
            "metavar": "[TYPE:]N", "default": "0", "help": "GPUs on each node.",
        },
        "tasks-per-node": {
            "type": int, "show_default": "one per GPU, or one", "help": "Ranks on each node.",
        },
        "cpus-per-task": {"type": int, "show_default": "the site's", "help": "CPUs for each rank."},
        "mem": {"metavar": "SIZE", "help": "Memory of each node, such as 64G; 0 is all of it."},
        "time": {"metavar": "LIMIT", "help": "Wall-clock limit, such as 90, 02:30:00 or 1-12."},
        "partition": {"type": PARTITION, "help": "Partition, or several with commas."},
        "account": {"metavar": "NAME", "help": "Account to charge."},
        "qos": {"metavar": "NAME", "help": "Quality of service."},
        "constraint": {"metavar": "FEATURES", "help": "Features that nodes must have."},
        "reservation": {"metavar": "NAME", "help": "Reservation to use."},
        "nodelist": {"metavar": "HOSTS", "help": "Hosts that must be in the job: gpu[01-03]."},
        "exclude": {"metavar": "HOSTS", "help": "Hosts that must not be in the job."},
        "dependency": {"metavar": "LIST", "help": "Jobs to wait for, such as afterok:1234."},
        "exclusive": {"is_flag": True, "default": False, "help": "Share no node with other jobs."},
        "mail-type": {"metavar": "EVENTS", "help": "Events to mail about, such as END,FAIL."},
        "mail-user": {"metavar": "ADDRESS", "help": "Whom to mail."},
        "sbatch": {
            "metavar": "KEY=VALUE", "multiple": True, "type": LINE,
            "help": "Any other directive; repeatable.",
        },
        "omit-directive": {
            "metavar": "KEY", "multiple": True, "type": LINE,
            "help": "Leave a directive out that the site rejects, such as mem; repeatable.",
        },
        "gpu-request": {
            "type": click.Choice(GPU_REQUESTS), "default": "gpus-per-node",
            "help": "Directive that asks for the GPUs; sites differ.",
        },
        "check": {
            "flag": "check/--no-check", "default": False,
            "help": "Ask Slurm before the submission when it would start (sbatch --test-only), and "
            "warn when it finds no nodes for it.",
        },
    },
    "How the tasks start": {
        "launcher": {
            "type": click.Choice(LAUNCHERS), "default": "sbatch",
            "help": "What starts the tasks; local rehearses the run on this workstation.",
        },
        "template": {
            "metavar": "NAME|FILE", "type": TEMPLATE, "default": "ddp.sbatch.j2",
            "help": "Script template; see 'clusterddp templates list'.",
        },
        "template-dir": {"metavar": "DIR", "help": "Folder of your own templates."},
        "python": {
            "metavar": "FILE", "default": sys.executable, "show_default": "this one",
            "help": "Interpreter of the tasks; it needs clusterddp installed.",
        },
        "module": {
            "metavar": "NAME", "multiple": True, "type": LINE,
            "help": "Environment module to load; repeatable.",
        },
        "setup": {
            "metavar": "LINE", "multiple": True, "type": LINE,
            "help": "Shell line to run before the tasks, on the first node; repeatable.",
        },
        "teardown": {
            "metavar": "LINE", "multiple": True, "type": LINE,
            "help": "Shell line to run after them, however they end; repeatable.",
        },
        "env": {
            "metavar": "NAME[=VALUE]", "multiple": True, "type": LINE,
            "help": "NAME=VALUE is written into the script (not for secrets); NAME passes the "
            "variable that is set where you submit; repeatable.",
        },
        "export": {
            "type": click.Choice(["ALL", "NONE"]), "default": "ALL",
            "help": "Your shell's other variables: all reach the job, or none.",
        },
        "network-interface": {
            "metavar": "NAME", "help": "Sets NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME.",
        },
        "srun-args": {
            "metavar": "WORDS", "multiple": True, "type": LINE,
            "help": "Further arguments for srun, quoted as in a shell; repeatable.",
        },
        "launch-prefix": {
            "metavar": "WORDS", "help": "Put before each task: 'apptainer exec --nv IMG'.",
        },
        "allow-launcher": {
            "is_flag": True, "default": False,
            "help": "Take a COMMAND that is a launcher itself (torchrun, accelerate launch, "
            "mpirun, srun …): every task starts it.",
        },
    },
    "When it is interrupted": {
        "requeue": {
            "cls": RequeueOption, "type": RequeueType(), "default": None,
            "show_default": "on for the training, the site's for a COMMAND",
            "help": "Go on after the time limit, preemption or a lost node. expedite (Slurm 25.11 "
            "and later): after a hardware failure, ahead of all other jobs.",
        },
        "max-requeues": {
            "type": int, "default": 20, "help": "Most starts after the first, whatever the cause.",
        },
        "restart-on-failure": {
            "type": int, "default": 0, "help": "Most starts that may follow a crash.",
        },
        "restart-in-job": {
            "type": int, "default": 0,
            "help": "How often a failed rank restarts inside the job, with all others, before "
            "the job ends; with --template torchrun.sbatch.j2.",
        },
        "signal": {
            "metavar": "SIGNAL@SECONDS", "show_default": "B:USR1@120, or less for a short --time",
            "help": "Slurm's signal ahead of the time limit, on which the ranks save and leave, "
            "or none. B: is to the batch script, which asks the ranks to stop.",
        },
    },
    "What runs": {
        "snapshot": {
            "flag": "snapshot/--no-snapshot", "default": None,
            "show_default": "on for code of your own, if it is not too large",
            "help": "Copy this folder's files, but those that git ignores, into the run: every "
            "start uses the copy, whatever is edited meanwhile.",
        },
        "snapshot-limit": {
            "type": float, "default": 50.0, "metavar": "MB",
            "help": "Most megabytes that such a copy may have.",
        },
    },
    "Where it is kept": {
        "job-name": {
            "metavar": "NAME", "show_default": "the run's name", "help": "Slurm's job name.",
        },
        "output-root": {
            "metavar": "DIR", "default": "jobs", "help": "Folder in which runs are kept.",
        },
    },
}  # fmt: skip

# sbatch's own forms of the same, which are taken too.
_SBATCH_FORMS = {
    "nodes": "-N",
    "tasks-per-node": "--ntasks-per-node",
    "cpus-per-task": "-c",
    "time": "-t",
    "partition": "-p",
    "account": "-A",
    "qos": "-q",
    "constraint": "-C",
    "nodelist": "-w",
    "exclude": "-x",
    "dependency": "-d",
    "job-name": "-J",
}

# What sbatch has and means otherwise or that a run has no use for, and what is typed instead.
IN_PLACE_OF = {
    **dict.fromkeys(("-n", "--ntasks"), "--nodes N --tasks-per-node N, ranks on each of the nodes"),
    **dict.fromkeys(("-G", "--gpus"), "--gpus-per-node [TYPE:]N, GPUs on each of the nodes"),
    "--gres": "--gpus-per-node [TYPE:]N, and --gpu-request gres where the site wants it so",
    "--gpus-per-task": "--gpus-per-node [TYPE:]N with --gpu-request gpus-per-task",
    **dict.fromkeys(("-a", "--array"), "--sbatch array=LIST"),
    "--wrap": "the COMMAND behind '--'",
    "--chdir": "the folder in which you type it",
    **dict.fromkeys(
        ("-o", "--output", "-e", "--error"), "--output-root DIR: logs lie in the run's folder"
    ),
}


def request_options(function: F) -> F:
    """Add every request option to a command."""
    for options in reversed(REQUEST.values()):
        for name, settings in reversed(options.items()):
            add = click.option(
                *names(name, settings),
                envvar=f"CLUSTERDDP_{name.replace('-', '_').upper()}",
                **{"show_default": True, **{k: v for k, v in settings.items() if k != "flag"}},
            )
            function = add(function)
    return function


def names(name: str, settings: dict[str, Any]) -> list[str]:
    """First arguments of click.option: an option's forms, and the parameter's name."""
    ours, sbatchs = f"--{settings.get('flag', name)}", _SBATCH_FORMS.get(name)
    return [ours, *([sbatchs] if sbatchs else []), name.replace("-", "_")]


def groups() -> dict[str, list[str]]:
    """The sections of --help with the parameter names in each."""
    return {title: [n.replace("-", "_") for n in options] for title, options in REQUEST.items()}
