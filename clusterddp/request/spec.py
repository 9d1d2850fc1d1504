"""What is asked for: `JobSpec`, one run.

It is checked when it is built, so that the code after it can trust it. Fields carry Slurm's names
and forms. It goes to and from JSON.
"""

import dataclasses
import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterddp.errors import RequestError
from clusterddp.request.options import (
    ASKED,
    CODE,
    GROUPS,
    INTERRUPTED,
    KEPT,
    START,
    WHOLE,
    Choice,
    Option,
    check_fields,
    option,
    options_of,
)
from clusterddp.request.resources import Resources
from clusterddp.request.train_config import TRAINING, TrainConfig
from clusterddp.slurm import forms
from clusterddp.slurm.forms import DIRECTIVE, LINE, MODULE, NETWORK_INTERFACE, SIGNAL

SPEC_FORMAT = 1
EXPEDITE = "expedite"
"""Word of sbatch's --requeue that puts a job back at the top of the queue (Slurm 25.11)."""
MOST_LEAD_SECONDS = 120
DEFAULT_TEMPLATE = "ddp.sbatch.j2"
LAUNCHERS = ("sbatch", "submitit", "local")

# Written into the script by bash itself, or derived per task: an exported value would not arrive.
_BASH_OWNS = {
    "_", "BASH", "BASHOPTS", "BASHPID", "BASH_ARGC", "BASH_ARGV", "BASH_ENV", "BASH_SUBSHELL",
    "DIRSTACK", "ENV", "EPOCHREALTIME", "EPOCHSECONDS", "EUID", "FUNCNAME", "GROUPS", "HISTCMD",
    "IFS", "LINENO", "PIPESTATUS", "POSIXLY_CORRECT", "PPID", "RANDOM", "SECONDS", "SHELLOPTS",
    "SHLVL", "SRANDOM", "UID",
}  # fmt: skip


@dataclass(frozen=True)
class JobSpec:
    """One run as it was asked for: where, with what, and what each task runs.

    Exactly one of `train` and `command` is set.
    """

    run_name: str
    run_dir: str
    """Absolute path of the run's directory."""
    resources: Resources
    python: str = option(
        sys.executable,
        "Interpreter of the tasks; it needs clusterddp installed.",
        LINE,
        "FILE",
        shown="this one",
    )
    train: TrainConfig | None = None
    command: tuple[str, ...] = ()
    allow_launcher: bool = option(
        False,
        "Take a COMMAND that is a launcher itself (torchrun, accelerate launch, mpirun, srun "
        "…): every task starts it.",
    )
    job_name: str = option(
        "",
        "Slurm's job name.",
        LINE,
        "--job-name -J SBATCH_JOB_NAME NAME",
        shown="the run's name",
        group=KEPT,
    )
    launcher: str = option(
        "sbatch",
        "Launcher that starts the tasks; local rehearses the run on this workstation.",
        Choice(LAUNCHERS),
    )
    template: str = option(
        DEFAULT_TEMPLATE, "Script template; see 'clusterddp templates list'.", names="NAME|FILE"
    )
    sbatch: tuple[tuple[str, str | None], ...] = option(
        (), "Any other directive; repeatable.", names="KEY=VALUE", group=ASKED
    )
    omit_directives: tuple[str, ...] = option(
        (),
        "Leave a directive out that the site rejects, such as mem; repeatable.",
        DIRECTIVE,
        "KEY",
        name="omit-directive",
        group=ASKED,
    )
    srun_args: tuple[str, ...] = option(
        (), "Further arguments for srun, quoted as in a shell; repeatable.", LINE, "WORDS"
    )
    environment: tuple[tuple[str, str], ...] = ()
    """Variables written into the script."""
    pass_environment: tuple[str, ...] = ()
    """Variables carried by name from the submitting shell."""
    export: str = option(
        "ALL",
        "Your shell's other variables: all reach the job, or none.",
        Choice(("ALL", "NONE")),
        "--export SBATCH_EXPORT",
    )
    setup: tuple[str, ...] = option(
        (), "Shell line to run before the tasks, on the first node; repeatable.", LINE, "LINE"
    )
    teardown: tuple[str, ...] = option(
        (), "Shell line to run after them, however they end; repeatable.", LINE, "LINE"
    )
    modules: tuple[str, ...] = option(
        (), "Environment module to load; repeatable.", MODULE, "NAME", name="module"
    )
    network_interface: str = option(
        "", "Sets NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME.", NETWORK_INTERFACE, "NAME"
    )
    launch_prefix: tuple[str, ...] = option(
        (), "Words put before each task: 'apptainer exec --nv IMG'.", LINE, "WORDS", type=str
    )
    requeue: bool | str | None = option(
        None,
        "Resume after the time limit, preemption or a lost node. expedite (Slurm 25.11 and "
        "later): after a hardware failure, ahead of all other jobs.",
        names="--requeue SBATCH_REQUEUE",
        shown="on for the training, the site's for a COMMAND",
        group=INTERRUPTED,
    )
    max_requeues: int = option(
        20, "Most attempts after the first, whatever the cause.", WHOLE, group=INTERRUPTED
    )
    restart_on_failure: int = option(
        0, "Most attempts that may follow a crash.", WHOLE, group=INTERRUPTED
    )
    restart_in_job: int = option(
        0,
        "Most restarts of a failed rank inside the job, with all others, before the job ends; "
        "with --template torchrun.sbatch.j2.",
        WHOLE,
        group=INTERRUPTED,
    )
    snapshot: bool | None = option(
        None,
        "Copy this folder's files, except those that git ignores, into the run: every attempt "
        "uses the copy, whatever is edited meanwhile.",
        negatable=True,
        shown="on for code of your own, if it is not too large",
        group=CODE,
    )
    signal: str | None = option(
        None,
        "Slurm's signal ahead of the time limit, on which the ranks save and leave, or none. B: "
        "is to the batch script, which asks the ranks to stop.",
        SIGNAL,
        "--signal SBATCH_SIGNAL SIGNAL@SECONDS",
        shown="B:USR1@120, or less for a short --time",
        group=INTERRUPTED,
    )

    def __post_init__(self) -> None:
        forms.run_name("--run-name", self.run_name)
        if self.requeue not in (None, True, False, EXPEDITE):
            raise RequestError(
                f"--requeue: {self.requeue!r} is neither yes, no nor {EXPEDITE}.",
                option="--requeue",
            )
        if bool(self.command) == bool(self.train):
            raise RequestError(
                "a run either trains (train) or runs a command (command): give one of them."
            )
        check_fields(self)
        if self.requeue is False and self.restart_on_failure:
            raise RequestError(
                f"--no-requeue against --restart-on-failure {self.restart_on_failure}: the first "
                "forbids what the second asks for. Leave one of them out.",
                option="--restart-on-failure",
            )
        if self.requeue is None and (self.train or self.restart_on_failure):
            object.__setattr__(self, "requeue", True)
        if self.signal is None:
            object.__setattr__(self, "signal", self._default_signal() if self.train else "")
        if self.signal:
            limit = forms.limit_seconds(self.resources.time)
            if limit is not None and self.signal_lead >= limit:
                raise RequestError(
                    f"--signal {self.signal} against --time {self.resources.time}: it would come "
                    f"at once, for the limit is {limit} s. Use a lead that is shorter.",
                    option="--signal",
                )
        if not Path(self.run_dir).is_absolute() or "%" in forms.text("--output-root", self.run_dir):
            raise RequestError(
                f"--output-root: the run directory {self.run_dir!r} must be an absolute path "
                "without '%' (Slurm replaces it in log paths).",
                option="--output-root",
            )
        if self.run_dir != self.run_dir.strip() or "\\" in self.run_dir:
            raise RequestError(
                f"--output-root: {self.run_dir!r} has a backslash or outer blanks, which Slurm "
                "takes out of log paths. Choose another folder.",
                option="--output-root",
            )
        self._check_lines()
        self._check_environment()
        if self.train:
            self._check_ranks(self.train)

    def _check_ranks(self, train: TrainConfig) -> None:
        """Check that the ranks which are asked for are what the training can use."""
        if train.strategy != "ddp" and self.world_size > 1:
            asked = f"--nodes {self.resources.nodes}"
            if self.resources.nodes == 1:
                asked = f"--tasks-per-node {self.resources.tasks_per_node}"
            raise RequestError(
                f"--strategy {train.strategy} trains in one process on one node, against {asked}. "
                "Use --strategy ddp, or a single task.",
                option="--strategy",
            )
        if train.strategy == "single" and self.resources.gpus_per_node > 1:
            raise RequestError(
                f"--strategy single uses one GPU, against --gpus-per-node "
                f"{self.resources.gpus_per_node}: the others would lie idle. Ask for one, or use "
                "--strategy ddp.",
                option="--strategy",
            )
        if train.profile and int(train.profile) >= self.world_size:
            raise RequestError(
                f"--profile {train.profile}: there is no such rank; {self.layout}, from 0.",
                option="--profile",
            )

    def _default_signal(self) -> str:
        """Two minutes ahead, or a fifth of a short limit: Slurm looks at limits twice a minute."""
        limit = forms.limit_seconds(self.resources.time)
        lead = MOST_LEAD_SECONDS if limit is None else min(MOST_LEAD_SECONDS, limit // 5)
        return f"B:USR1@{max(lead, 1)}"

    def _check_lines(self) -> None:
        if not self.python:
            raise RequestError(
                "--python is empty; name the interpreter that the tasks use.", option="--python"
            )
        for word in self.command:
            forms.text("COMMAND", word)
        if self.command and not self.command[0]:
            raise RequestError("COMMAND is empty; give a program to run after '--'.")

    def _check_environment(self) -> None:
        for name in (*(name for name, _ in self.environment), *self.pass_environment):
            if not forms.VARIABLE.fullmatch(forms.text("--env", name)):
                raise RequestError(
                    f"--env: {name!r} is no name of a variable; valid is NAME=VALUE, or NAME "
                    "to pass the variable that is set where you submit.",
                    option="--env",
                )
            if name in _BASH_OWNS:
                raise RequestError(
                    f"--env: {name} is set by bash itself, so a value would not reach the tasks.",
                    option="--env",
                )
            preset = name in ("MASTER_ADDR", "MASTER_PORT")
            if (name in forms.RANK_VARIABLES and not preset) or name.startswith(
                ("SLURM_", "TORCHELASTIC_")
            ):
                raise RequestError(
                    f"--env: {name} is derived for each task; it cannot be preset.", option="--env"
                )
        for name, value in self.environment:
            forms.text(f"--env {name}", value)

    def refuse_launcher(self) -> None:
        """Refuse a launcher in every task: its ranks would know only those of their own task.

        A check of the request alone: the record of a run that is queued is read without it. Raises
        RequestError with the line to type.
        """
        if not self.command or self.allow_launcher:
            return
        from clusterddp.request import nested_launcher  # not needed for a training

        found = nested_launcher.find(self.command)
        if found is None:
            return
        agents = found.agents and self.launcher != "submitit" and self.template == DEFAULT_TEMPLATE
        line = f"clusterddp submit {'--template torchrun ' if agents else ''}-- "
        line += shlex.join(found.instead or ("python", "train.py"))
        note = ""
        if found.adds_local_rank:
            note = f" {found.name} also adds --local-rank: read LOCAL_RANK instead."
        raise RequestError(
            f"COMMAND starts {found.name}, which starts ranks of its own. The tasks are ranks "
            f"already ({self.layout}), so each would train a copy by itself. With your other "
            f"options, type: {line}{'' if found.instead else ' (your program and its arguments)'}."
            f"{note} If each task is to start it all the same, add --allow-launcher."
        )

    @property
    def world_size(self) -> int:
        return self.resources.num_tasks

    @property
    def uses_own_code(self) -> bool:
        """True where the tasks run a person's own code: a command, a model or a dataset."""
        return bool(self.command or (self.train and self.train.own_functions))

    @property
    def requeues(self) -> bool:
        """True where the script puts the job back into the queue by itself."""
        return bool(self.requeue)

    @property
    def signal_lead(self) -> int:
        """Seconds between Slurm's signal and the time limit; 0 without a signal."""
        return int((self.signal or "").rpartition("@")[2] or 0)

    @property
    def layout(self) -> str:
        """`2 nodes x 4 tasks = 8 ranks`."""
        counts = (
            (self.resources.nodes, "node"),
            (self.resources.tasks_per_node, "task"),
            (self.world_size, "rank"),
        )
        nodes, tasks, ranks = (f"{n} {word}{'s' if n != 1 else ''}" for n, word in counts)
        return f"{nodes} x {tasks} = {ranks}"

    def to_json(self) -> str:
        """The record that a run keeps of its request; holds no value passed by name."""
        fields = {"format": SPEC_FORMAT, **dataclasses.asdict(self)}
        if not self.allow_launcher:  # 0.1.0, as in a container, reads no record that names it
            del fields["allow_launcher"]
        lines = (f"{json.dumps(name)}: {json.dumps(value)}" for name, value in fields.items())
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @classmethod
    def from_json(cls, content: str) -> "JobSpec":
        """Read a record back; raises RequestError when it is no record of this format."""
        try:
            fields: dict[str, Any] = json.loads(content)
            if fields.pop("format") != SPEC_FORMAT:
                raise RequestError("spec.json was written by a newer clusterddp; update this one.")
            resources = Resources(**fields.pop("resources"))
            train = fields.pop("train")
            for name, value in fields.items():
                if isinstance(value, list):
                    fields[name] = tuple(tuple(v) if isinstance(v, list) else v for v in value)
            return cls(resources=resources, train=TrainConfig(**train) if train else None, **fields)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise RequestError(f"spec.json is no record of a run: {error}.") from None


def submission_comment(run_name: str) -> str:
    """The job comment by which a submission whose answer was lost can be found again."""
    return f"clusterddp:{run_name}"


REQUEST = tuple(
    sorted(
        (
            *options_of(Resources, ASKED),
            *options_of(JobSpec, START),
            Option(
                "Ask Slurm before the submission when it would start (sbatch --test-only), and "
                "warn when it finds no nodes for it.",
                name="check",
                type=bool,
                default=False,
                negatable=True,
            ),
            Option("Folder of your own templates.", names="DIR", name="template-dir", group=START),
            Option(
                "NAME=VALUE is written into the script (not for secrets); NAME passes the variable "
                "that is set where you submit; repeatable.",
                names="NAME[=VALUE]",
                name="env",
                type=tuple,
                group=START,
            ),
            Option(
                "Most megabytes that such a copy may have.",
                names="MB",
                name="snapshot-limit",
                type=float,
                default=50.0,
                group=CODE,
            ),
            Option(
                "Folder in which runs are kept.",
                names="DIR",
                name="output-root",
                default="jobs",
                group=KEPT,
            ),
        ),
        key=lambda option: GROUPS.index(option.group),
    )
)
"""Options of what is asked for, in the order of --help."""
OPTIONS = {option.name: option for option in (*REQUEST, *TRAINING)}
"""Every option by its name, which is also its key in site.cfg."""
DIRECTIVES = {option.directive: option for option in REQUEST if option.directive}
"""Options that stand for a directive of sbatch, by its name."""
