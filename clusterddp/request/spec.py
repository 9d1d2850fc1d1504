"""The request for a run, `JobSpec`, and the table of all options of a submission.

A request is checked at construction, so later code can trust it. Fields have Slurm's names and
formats; a field that is an option has its row of the table as metadata.
"""

import dataclasses
import itertools
import json
import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterddp.errors import OptionError, RequestError
from clusterddp.request import options as table
from clusterddp.request.options import EXPEDITE, WHOLE, Choice, Record, option
from clusterddp.request.program import (
    END,
    NO_PREFLIGHT,
    ON_HANG,
    PREFLIGHTS,
    QUICK,
    REPORT,
    BuiltIn,
    Command,
    Program,
)
from clusterddp.request.resources import Resources
from clusterddp.request.sweep import NO_SWEEP, Sweep, Trial
from clusterddp.request.train_config import TRAINING, TrainConfig
from clusterddp.slurm import forms
from clusterddp.slurm.forms import LINE, PATH, WORDS, Form

if TYPE_CHECKING:
    from clusterddp.processes.container import Container

_FORMAT = 1
_REQUEST = "#REQUEST "
_REQUEST_COLUMNS = 280
MAX_LEAD_SECONDS = 120
DEFAULT_TEMPLATE = "ddp.sbatch.j2"
STAGE_OFF = "off"
NODE = "node"
IN_ALLOCATION = "held"
"""Launcher of runs inside an allocation that the user holds: salloc's, or a hold."""
LAUNCHERS = ("sbatch", "submitit", "local", IN_ALLOCATION)
OK, ANY, FAILED = CONDITIONS = ("ok", "any", "failed")
"""Conditions on the end of an awaited run: done, any, or failed."""
SHARED_GPUS = "NCCL_MULTI_RANK_GPU_ENABLE"
"""Variable that makes NCCL accept several ranks on one GPU."""
SHARING = f"{SHARED_GPUS}=1 with NCCL 2.30 or later"

# Bash sets these: a value exported by the script would not reach the tasks.
_BASH_OWNS = (
    "_ BASH BASHOPTS BASHPID BASH_ARGC BASH_ARGV BASH_ENV BASH_SUBSHELL DIRSTACK ENV EPOCHREALTIME "
    "EPOCHSECONDS EUID FUNCNAME GROUPS HISTCMD IFS LINENO PIPESTATUS POSIXLY_CORRECT PPID RANDOM "
    "SECONDS SHELLOPTS SHLVL SRANDOM UID"
)
_NODE_OPTIONS = (
    "--nodes -N --nodelist -w --exclude -x --relative -r --exclusive --overlap --nodefile -F"
)
"""Arguments of srun that select the nodes of a Slurm step."""
_SCRIPTS_OWN = "run_dir own hold srun container"
_CONTAINER = ("container_image", "container_runtime", "container_mounts", "container_workdir")
OWN_PYTHON = forms.unstaged(sys.executable, os.environ)
"""Python that runs clusterddp; in a task that runs from a node's copy, the original."""
_DERIVED = {*forms.RANK_VARIABLES} - {"MASTER_ADDR", "MASTER_PORT"}


@dataclass(frozen=True, eq=False, repr=False)
class JobSpec(Record):
    """Request for one run: its resources, its script, and the program of each task.

    Exactly one of `train` and `command` is set; `program` returns it.
    """

    run_name: str
    run_dir: str
    """Absolute path of the run's directory."""
    resources: Resources
    python: str = option(
        OWN_PYTHON,
        "Python of the tasks.",
        PATH,
        "FILE",
        shown="the Python that runs clusterddp, or the image's python3",
    )
    controller_python: str = option(
        OWN_PYTHON,
        "Python of the batch script, 3.10+.",
        PATH,
        "FILE",
        shown="the Python that runs clusterddp",
    )
    train: TrainConfig | None = None
    command: tuple[str, ...] = ()
    resumable: bool | None = None
    """True if an attempt is known to resume from the previous one's checkpoint: always true
    of the training. None for a COMMAND until it starts a Loop. Other defaults depend on it."""
    allow_launcher: bool = option(False, "Allow COMMAND to be a launcher (torchrun, srun …).")
    job_name: str = option(
        "",
        "Slurm job name.",
        LINE,
        "--job-name -J SBATCH_JOB_NAME NAME",
        shown="the run's name",
        group=table.OUTPUT,
    )
    launcher: str = option(
        "sbatch",
        "Launcher; local runs it here, held inside the allocation of this shell of salloc.",
        Choice(LAUNCHERS),
        shown="sbatch, or held in a shell of salloc",
    )
    hold: str = option(
        "", "Run it at once in this hold, see 'clusterddp hold'.", LINE, "HOLD --in", name="in-hold"
    )
    template: str = option(
        DEFAULT_TEMPLATE, "Script template; see 'clusterddp templates'.", names="NAME|FILE"
    )
    after: tuple[tuple[str, str], ...] = option(
        (),
        "Wait until a run or sweep succeeds (ok), fails or ends (any), requeues included; "
        "repeatable.",
        names="RUN[:ok|any|failed]",
        group=table.RESOURCES,
    )
    """Directories of the runs to wait for, each with the required end."""
    sbatch: tuple[tuple[str, str | None], ...] = option(
        (), "Any other sbatch directive; repeatable.", names="KEY[=VALUE]", group=table.RESOURCES
    )
    omit_directives: tuple[str, ...] = option(
        (),
        "Drop a directive the site rejects; repeatable.",
        forms.DIRECTIVE,
        "KEY",
        name="omit-directive",
        group=table.RESOURCES,
    )
    srun_args: tuple[str, ...] = option(
        (), "srun arguments, shell-quoted; repeatable.", WORDS, "ARGS"
    )
    environment: tuple[tuple[str, str], ...] = ()
    """Variables written into the script."""
    pass_environment: tuple[str, ...] = ()
    """Names of variables to pass from the submitting shell."""
    export: str = option(
        "ALL",
        "Pass your shell's variables to the job.",
        Choice(("ALL", "NONE")),
        "--export SBATCH_EXPORT",
    )
    slurm_folder: str = ""
    """Directory of Slurm's commands at submission, unless it is on every default PATH."""
    setup: tuple[str, ...] = option(
        (), "Shell line run before the tasks; repeatable.", LINE, "LINE"
    )
    teardown: tuple[str, ...] = option(
        (), "Shell line run after the tasks; repeatable.", LINE, "LINE"
    )
    modules: tuple[str, ...] = option(
        (), "Environment module to load; repeatable.", forms.MODULE, "NAME", name="module"
    )
    network_interface: str = option(
        "",
        "Interface for NCCL and Gloo; ^NAME excludes it (NCCL).",
        forms.NETWORK_INTERFACE,
        "NAME",
    )
    stage_env: str = option(
        STAGE_OFF,
        "Copy the environment of --python once to each node's own disk, and run the tasks from "
        "it; auto finds a directory.",
        Form(
            r"off|auto|/[A-Za-z0-9_@+=.,/-]*",
            "directory",
            "off, auto or an absolute path of plain characters, for example /local/scratch",
        ),
        "off|auto|DIR",
    )
    log_per: str = option(
        "rank",
        "Output files: one per rank, or one per node with each line labelled by its rank.",
        Choice(("rank", NODE)),
    )
    wrapper: tuple[str, ...] = option(
        (), "Command prefix: 'apptainer exec --nv IMG'.", WORDS, "ARGS", type=str
    )
    container_image: str = option(
        "",
        "Container image: file, directory or registry name.",
        Form(
            r"[^-\s].*",
            "image",
            "for example torch.sif, docker://pytorch/pytorch or localhost/torch:2.9",
        ),
        names="IMAGE",
    )
    container_runtime: str = option(
        "auto", "auto is pyxis if srun has it.", Choice(("auto", "pyxis", "apptainer", "podman"))
    )
    container_mounts: tuple[str, ...] = option(
        (), "Extra bind mount; repeatable.", LINE, "SRC[:DST[:ro]]", name="container-mount"
    )
    container_workdir: str = option(
        "",
        "Working directory.",
        Form(r"/.*", "absolute path", "for example /workspace"),
        "DIR",
        shown="the code's directory",
    )
    requeue: bool | str | None = option(
        None,
        "Requeue and resume after the time limit, preemption or node failure; expedite: at top "
        "priority after a hardware failure (Slurm 25.11+).",
        names="--requeue SBATCH_REQUEUE",
        also=EXPEDITE,
        shown="on if the program can resume",
        group=table.FAULT_TOLERANCE,
    )
    max_requeues: int = option(
        20,
        "Requeue at most N times, for any reason. The fourth requeue within ten minutes and later "
        "ones wait.",
        WHOLE,
        group=table.FAULT_TOLERANCE,
    )
    retries: int = option(
        0,
        "Retry a crashed program at most N times. Failures of nodes and hardware do not count.",
        WHOLE,
        group=table.FAULT_TOLERANCE,
    )
    max_restarts: int = option(
        0,
        "Restart all ranks within a job at most N times; needs --template torchrun.",
        WHOLE,
        group=table.FAULT_TOLERANCE,
    )
    avoid_bad_nodes_for: float = option(
        86400,
        "Time to avoid a node that was marked bad.",
        table.DURATION,
        group=table.FAULT_TOLERANCE,
    )
    snapshot: bool | None = option(
        None,
        "Run from a copy of this directory, without git-ignored files.",
        negatable=True,
        shown="on for your own code, up to --snapshot-limit",
        group=table.CODE,
    )
    signal: str | None = option(
        None,
        "Slurm's signal before the time limit, on which ranks checkpoint and exit; B: sends it "
        "to the batch script; or none.",
        forms.SIGNAL,
        "--signal SBATCH_SIGNAL SIGNAL@SECONDS",
        shown="B:USR1@120, or a fifth of a --time below 10 minutes, none for a COMMAND",
        group=table.FAULT_TOLERANCE,
    )

    stacks: bool = option(
        True,
        "Let 'clusterddp stacks' read each Python process of COMMAND (uses SIGURG).",
        group=table.FAULT_TOLERANCE,
        negatable=True,
    )
    hang_timeout: float | None = option(
        None,
        "Time without a training step or output until the run counts as hung and its stacks are "
        "logged; 0: never.",
        table.DURATION_OR_NEVER,
        shown="60s for the built-in training, 5m for a Loop, 30m otherwise",
        group=table.FAULT_TOLERANCE,
    )
    on_hang: str = option(
        REPORT,
        "After a hang: only report it, or end the job as failed.",
        Choice(ON_HANG),
        group=table.FAULT_TOLERANCE,
    )
    notify: tuple[str, ...] = option(
        (),
        "Command run once at the end; JSON result on stdin.",
        WORDS,
        "COMMAND",
        type=str,
        group=table.OUTPUT,
    )
    report_to: str = option(
        "",
        "Keep one tracker run over all attempts of COMMAND: wandb, mlflow or both.",
        Form(
            r"(?:wandb|mlflow)(?:,(?:wandb|mlflow))*",
            "list of trackers",
            "wandb, mlflow or wandb,mlflow",
        ),
        "LIST",
        group=table.OUTPUT,
    )
    preflight: str | None = option(
        None,
        "Test the nodes before training and exclude bad ones; full also times matrix products "
        "and all-reduces.",
        Choice(PREFLIGHTS),
        shown="quick for more than one node",
        group=table.FAULT_TOLERANCE,
    )
    sweep: Sweep = NO_SWEEP
    """Requested sweep; empty for a single run."""
    trial: Trial = ()
    """This run's trial in its sweep, set by `trial_spec`; empty outside a sweep."""

    def __post_init__(self) -> None:
        forms.run_name("--run-name", self.run_name)
        if self.requeue not in (None, True, False, EXPEDITE):
            raise OptionError(
                "--requeue", f": {self.requeue!r} is not valid. Use yes, no or {EXPEDITE}."
            )
        if bool(self.command) == bool(self.train):
            raise RequestError(
                "a run needs exactly one program: set either train (the built-in training) or "
                "command. [CD0103]"
            )
        table.check_fields(self)
        if self.requeue is False and self.retries:
            raise OptionError(
                f"--retries {self.retries}",
                " conflicts with --no-requeue: a retry is a requeue. Remove one of them. [CD0103]",
            )
        self._check_program()
        for name, value in self.program.fields_at(self.hang_timeout).items():
            object.__setattr__(self, name, value)
        for name, value in self._defaults().items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        self._check_signal()
        self._check_paths()
        if self.after:
            self._check_after()
        if self.resources.spare_nodes:
            self._check_spares()
        self._check_environment()
        self._check_container()
        if self.log_per == NODE and self.launcher not in ("sbatch", IN_ALLOCATION):
            raise OptionError(
                "--log-per node",
                f" conflicts with --launcher {self.launcher}: srun labels the lines. Remove one "
                "of them.",
                code="CD0305",
            )
        if self.stages:
            self._check_staging()
        gpus, tasks = self.resources.gpus_per_node, self.resources.tasks_per_node
        if 0 < gpus < tasks and not self.shares_gpus:
            raise OptionError(
                f"--tasks-per-node {tasks}",
                f" conflicts with --gpus-per-node {gpus}: there are more tasks than GPUs. Use one "
                f"task per GPU (the default). To let ranks share a GPU: {self.sharing_options}.",
            )
        self._check_notify()
        if self.hold and self.launcher != IN_ALLOCATION:
            raise OptionError(
                f"--in {self.hold}",
                f" conflicts with --launcher {self.launcher}. Remove one of them. [CD0103]",
            )
        if self.sweep:
            self._check_sweep()

    @property
    def launched_by(self) -> str:
        """The option that decides how it starts."""
        return f"--in {self.hold}" if self.hold else f"--launcher {self.launcher}"

    def _defaults(self) -> dict[str, object]:
        """Return the defaults that depend on other fields, by field."""
        resumable = self.program.resumable if self.resumable is None else self.resumable
        limit = forms.limit_seconds(self.resources.time)  # Slurm looks at limits twice a minute
        lead = min(MAX_LEAD_SECONDS, limit // 5) if limit else MAX_LEAD_SECONDS
        return {
            "resumable": self.program.resumable,
            "requeue": True if resumable or self.retries else None,
            "signal": f"B:USR1@{max(lead, 1)}" if resumable else "",
            "hang_timeout": self.program.hang_timeout(resumable),
        }

    def _check_program(self) -> None:
        """Raise RequestError for a program that cannot start, or an option it does not use."""
        if self.on_hang == END and self.hang_timeout == 0 and not self.has_default("hang_timeout"):
            raise OptionError(
                "--on-hang end",
                " conflicts with --hang-timeout 0, which reports no hang. Remove one of them. "
                "[CD0103]",
            )
        for name, why in self.program.refused.items():
            if getattr(self, name):
                raise OptionError(
                    f"--{name.replace('_', '-')}", f" applies only to a COMMAND: {why}. [CD0103]"
                )
        self.program.check(self.resources)

    def _check_signal(self) -> None:
        limit = forms.limit_seconds(self.resources.time)
        if limit and self.signal_lead >= limit:
            raise OptionError(
                f"--signal {self.signal}",
                f" conflicts with --time {self.resources.time}: the signal would be sent at once, "
                f"because the limit is {limit} s. Use a shorter lead after '@'. [CD0103]",
            )

    def _check_paths(self) -> None:
        """Raise OptionError for a directory that Slurm would rewrite in log paths."""
        run_dir = forms.text("--runs-dir", self.run_dir)
        rewritten = "%" in run_dir or "\\" in run_dir or run_dir != run_dir.strip()
        if rewritten or not Path(run_dir).is_absolute():
            raise OptionError(
                "--runs-dir",
                f": {run_dir!r} is not a valid run directory: Slurm rewrites '%', backslashes and "
                "outer blanks in log paths. Use an absolute path without them.",
            )

    def _check_notify(self) -> None:
        if self.notify and not self.notify[0]:
            raise OptionError("--notify", ": the first word is empty. Give a program to run.")
        if self.notify and self.launcher == "submitit":
            raise OptionError(
                "--notify",
                " conflicts with --launcher submitit: clusterddp does not control how that job "
                "ends. Use --launcher sbatch. [CD0305]",
            )

    def _check_sweep(self) -> None:
        """Raise OptionError for names that cannot be swept, or a launcher that cannot sweep."""
        if self.launcher == "submitit":
            raise OptionError(
                "--sweep",
                " conflicts with --launcher submitit, which numbers array tasks and requeues them "
                "in its own way. Use --launcher sbatch. [CD0305]",
            )
        if self.launcher == IN_ALLOCATION:
            raise OptionError(
                "--sweep",
                " needs a job array, which an allocation cannot start. Use --launcher sbatch, or "
                "submit the runs one by one. [CD0305]",
            )
        self.program.refuse_names(self.sweep.names, {row.name for row in REQUEST})

    def check_trials(self) -> None:
        """Check the request of each trial of a sweep; raises RequestError.

        Only new requests need this: a recorded sweep is read often, and was checked before.
        """
        if self.sweep.max_concurrent and self.launcher == "local":
            raise OptionError(
                "--max-concurrent",
                f" {self.sweep.max_concurrent} conflicts with --launcher local, which runs the "
                "trials one after another. Remove one of them. [CD0103]",
            )
        self.sweep.reject_duplicates(self.program.parse_values)
        for index in range(len(self.sweep)):
            self.trial_spec(index)

    def trial_spec(self, index: int) -> "JobSpec":
        """Return the request of one trial, a separate run. Raises IndexError.

        It has no `notify`, which is for the whole sweep.
        """
        trial = self.sweep.trial(index)
        return dataclasses.replace(
            self,
            run_name=f"{self.run_name}-{index}",
            run_dir=f"{self.run_dir}-{index}",
            notify=(),
            sweep=NO_SWEEP,
            trial=trial,
            **self.program.for_trial(trial).fields,
        )

    @property
    def program(self) -> Program:
        """Program of every task."""
        return BuiltIn(self.train) if self.train else Command(self.command)

    @property
    def trainings(self) -> list[TrainConfig]:
        """Trainings that read different files: one, none, or several of a sweep."""
        return self.program.trainings(self.sweep)

    @property
    def shared_dir(self) -> str:
        """Sweep's directory, which its trials read; empty outside a sweep."""
        if self.sweep:
            return self.run_dir
        return self.run_dir.removesuffix(f"-{self.index}") if self.trial else ""

    @property
    def sweep_name(self) -> str:
        """Name of this run's sweep; empty outside a sweep."""
        return self.run_name.rpartition("-")[0] if self.trial else ""

    @property
    def index(self) -> int:
        """This run's index in its sweep and job array. Requires a trial."""
        return int(self.run_name.rpartition("-")[2])

    def _check_after(self) -> None:
        """Raise OptionError for awaited runs that an attempt cannot check or Slurm cannot await."""
        for path, condition in self.after:
            forms.text("--after", path)
            if not Path(path).is_absolute():
                raise OptionError("--after", f": {path!r} is not an absolute path to a run.")
            Choice(CONDITIONS).check("--after", condition)
        own = {self.run_dir, *(f"{self.run_dir}-{index}" for index in range(len(self.sweep)))}
        if own & {path for path, _ in self.after}:
            raise OptionError("--after", f": {self.run_name} cannot wait for itself.")
        if self.trial and self.shared_dir in dict(self.after):
            raise OptionError(
                "--after",
                f": {self.run_name} is a trial of {self.sweep_name} and cannot wait for it.",
            )
        if self.launcher == "submitit":
            raise OptionError(
                "--after",
                " conflicts with --launcher submitit, whose job does not check other runs. Use "
                "--launcher sbatch, or --dependency with a job id. [CD0305]",
            )
        if "?" in self.resources.dependency:
            raise OptionError(
                "--after",
                f" conflicts with --dependency {self.resources.dependency}: Slurm cannot combine "
                "'?' (any of them) with ',' (all), which --after needs. Use ',' or remove one of "
                "the options. [CD0103]",
            )

    def _check_spares(self) -> None:
        """Raise OptionError for spares if the batch controller does not choose the step's nodes."""
        asked = f"--spare-nodes {self.resources.spare_nodes}"
        if self.launcher != "sbatch":
            raise OptionError(
                asked,
                f" conflicts with {self.launched_by}, which cannot choose the nodes of a step. Use "
                "--launcher sbatch, or no spares. [CD0103]",
            )
        if self.max_restarts:
            raise OptionError(
                asked,
                f" conflicts with --max-restarts {self.max_restarts}: torchrun's agents restart "
                "ranks on the same nodes. Remove one of them. [CD0103]",
            )
        words = [  # `-N4` is `-N 4`
            word.partition("=")[0] if word.startswith("--") else word[:2]
            for text in self.srun_args
            for word in shlex.split(text)
        ]
        taken = next((word for word in words if word in _NODE_OPTIONS.split()), "")
        if taken:
            raise OptionError(
                asked,
                f" conflicts with --srun-args {taken}: the job chooses the nodes of each step. "
                "Remove one of them. [CD0103]",
            )
        if dict(self.sbatch).get("no-kill", "off") != "off":
            raise OptionError(
                asked,
                " conflicts with --sbatch no-kill: a job that loses the node of its script would "
                "stay until its time limit. Remove no-kill: spares do not need it. [CD0103]",
            )

    def _check_staging(self) -> None:
        """Raise OptionError if the batch controller cannot copy the tasks' environment."""
        asked, off = f"--stage-env {self.stage_env}", "Remove one of them, or use --stage-env off."
        if self.launcher not in ("sbatch", IN_ALLOCATION):
            raise OptionError(
                asked,
                f" conflicts with --launcher {self.launcher}, whose tasks are not started by the "
                f"batch controller's script. {off}",
                code="CD0305",
            )
        if self.container_image or self.wrapper:
            other = "--container-image" if self.container_image else "--wrapper"
            problem = f" conflicts with {other}: the image has the tasks' environment. {off}"
            raise OptionError(asked, problem, code="CD0103")
        own = self.env_prefix in ("/usr", "/usr/local")  # each node has these itself
        if own or not re.fullmatch(r"/.*[^/]/bin/[^/]+", self.python):
            raise OptionError(
                asked,
                f" needs --python with the Python of a venv or a conda environment, "
                f"ENVIRONMENT/bin/python, and not {self.python!r}.",
            )

    def _check_container(self) -> None:
        if not self.container_image:
            for field in dataclasses.fields(self):
                if field.name in _CONTAINER and getattr(self, field.name) != field.default:
                    name = field.metadata["option"].get("name", field.name.replace("_", "-"))
                    raise OptionError(f"--{name}", " needs --container-image IMAGE.", code="CD1004")
            return
        asked = f"--container-image {self.container_image}"
        if self.wrapper:
            raise OptionError(
                asked,
                " conflicts with --wrapper: both determine how a task is started. Remove one of "
                "them.",
            )
        if "container" in dict(self.sbatch):
            raise OptionError(
                asked,
                " conflicts with Slurm's directive for OCI bundles (--sbatch container=… or "
                "SBATCH_CONTAINER). Remove one of them.",
            )
        from clusterddp.processes.container import PYXIS, can_read, pyxis_can_mount

        runtime, mounts = self.container_runtime, self.container.mounts
        if not can_read(runtime, self.container_image):
            raise OptionError(
                "--container-runtime",
                f" {runtime} cannot run {self.container_image}. Such a file needs "
                "--container-runtime apptainer.",
            )
        for path in (self.run_dir, *map(str, mounts)):
            if runtime == PYXIS and not pyxis_can_mount(path):
                raise OptionError(
                    "--container-runtime",
                    f" pyxis cannot mount {path!r}, because it contains a comma or a blank. Use "
                    "another path, or another runtime.",
                )

    @property
    def container(self) -> "Container":
        """Container of the tasks, without what `Container.for_run` adds on a node.

        Raises OptionError for a path that cannot be mounted.
        """
        from clusterddp.processes.container import Container, Mount  # most runs have none

        Mount(self.run_dir, self.run_dir).check("--runs-dir")
        mounts = []
        for name in ("data_dir", "init_from"):
            if path := self.program.options.get(name):
                mounts.append(Mount(path, path, read_only=True))
                mounts[-1].check(f"--{name.replace('_', '-')}")
        if self.shared_dir:
            mounts.append(Mount(self.shared_dir, self.shared_dir))
        for text in self.container_mounts:
            mounts.append(Mount.parse(text))
            mounts[-1].check()
        return Container(
            self.container_image,
            self.container_runtime,
            self.python,
            tuple(mounts),
            self.container_workdir,
            self.uses_own_code,
            bool(self.resources.gpus_per_node),
            tuple(sorted({*dict(self.environment), *self.pass_environment})),
        )

    @property
    def pyxis(self) -> bool:
        """True if srun may start the tasks' containers, by NVIDIA's plug-in pyxis."""
        if not self.container_image or self.container_runtime not in ("auto", "pyxis"):
            return False
        from clusterddp.processes.container import PYXIS, can_read, pyxis_can_mount

        paths = (self.run_dir, *map(str, self.container.mounts))
        return can_read(PYXIS, self.container_image) and all(map(pyxis_can_mount, paths))

    def _check_environment(self) -> None:
        for name in (*dict(self.environment), *self.pass_environment):
            if not re.fullmatch(forms.VARIABLE, forms.text("--env", name)):
                raise OptionError(
                    "--env",
                    f": {name!r} is not a valid variable name. Use NAME=VALUE, or NAME to pass "
                    "the variable from your shell.",
                )
            if name in _SCRIPTS_OWN.split():
                problem = "is a name that the batch script uses. Choose another one."
                raise OptionError("--env", f": {name} {problem}")
            if name in _BASH_OWNS.split():
                problem = "is set by bash, so your value would not reach the tasks. Remove it."
                raise OptionError("--env", f": {name} {problem}")
            if name in _DERIVED or name.startswith(("SLURM_", "TORCHELASTIC_")):
                raise OptionError(
                    "--env", f": {name} is set for each task and cannot be preset. Remove it."
                )
            if name == "CUDA_VISIBLE_DEVICES" and self.resources.gpus_per_node:
                problem = "is set by Slurm to the GPUs of each task. Remove it."
                raise OptionError("--env", f": {name} {problem}")
        for name, value in self.environment:
            forms.text(f"--env {name}", value)

    def refuse_pyxis(self) -> None:
        """Raise RequestError for pyxis if Slurm's srun does not start the tasks."""
        if self.container_image and self.container_runtime == "pyxis":
            raise RequestError(
                "--container-runtime pyxis needs Slurm's srun, which does not start the tasks "
                "here. Use auto, apptainer or podman. [CD1004]"
            )

    @property
    def stages(self) -> bool:
        """True if the tasks run from a copy of their environment on each node."""
        return self.stage_env != STAGE_OFF

    @property
    def can_stage(self) -> bool:
        """True if the batch controller can copy the tasks' environment."""
        try:
            self._check_staging()
        except OptionError:
            return False
        return True

    @property
    def env_prefix(self) -> str:
        """Directory of the environment of the tasks' Python."""
        return self.python.rsplit("/", 2)[0]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.resources.num_tasks

    @property
    def shares_gpus(self) -> bool:
        """True if the request lets several ranks share a GPU."""
        by_nccl = dict(self.environment).get(SHARED_GPUS, "0") not in ("", "0")
        by_gloo = self.program.options.get("backend") == "gloo"
        return by_gloo or by_nccl or SHARED_GPUS in self.pass_environment

    @property
    def sharing_options(self) -> str:
        """Options that let several ranks share a GPU."""
        by_gloo = "--backend gloo, or " if "backend" in self.program.options else ""
        return f"{by_gloo}--env {SHARING}"

    @property
    def layout(self) -> str:
        """Layout as text, `2 nodes x 4 tasks = 8 ranks, and 1 spare node`."""
        return self.resources.layout

    @property
    def sets_cpus(self) -> bool:
        """True if the request sets the CPUs of a rank: a number, or the whole node.

        With --exclusive a step has all CPUs of its nodes, and Slurm binds its tasks to all of them
        (22.05 with task/affinity). Not with exclusive=user: the job then has a CPU per task.
        """
        more = dict(self.sbatch)
        by_option = bool(self.resources.cpus_per_task) or self.resources.exclusive
        whole = "exclusive" in more and not more["exclusive"]
        return by_option or whole or not {"cpus-per-task", "cpus-per-gpu"}.isdisjoint(more)

    @property
    def comment(self) -> str:
        """Comment of its jobs, to find a submission that got no answer; empty for none."""
        if "comment" in self.omit_directives:
            return ""
        return dict(self.sbatch).get("comment") or submission_comment(self.run_name)

    @property
    def uses_own_code(self) -> bool:
        """True if the tasks run the user's code: a command, a model or a dataset."""
        return self.program.has_own_code(self.sweep)

    @property
    def starts_own_files(self) -> bool:
        """True if the job starts the user's code, `notify` program or interpreter."""
        own_python = {self.python, self.controller_python} != {sys.executable}
        return self.uses_own_code or bool(self.notify) or own_python

    @property
    def node_checks(self) -> str:
        """Node checks to run, one of `PREFLIGHTS`.

        A local run has none: it uses one node. For a COMMAND, full means quick.
        """
        if self.launcher == "local":
            return NO_PREFLIGHT
        is_usual = self.launcher == "sbatch" and self.resources.nodes > 1
        asked = self.preflight or (QUICK if is_usual else NO_PREFLIGHT)
        return asked if asked in self.program.preflights else self.program.preflights[-1]

    @property
    def signal_lead(self) -> int:
        """Seconds between Slurm's signal and the time limit; 0 without a signal."""
        return int((self.signal or "").rpartition("@")[2] or 0)

    def has_default(self, name: str) -> bool:
        """Return whether a field has its default, for a default that depends on other fields."""
        return bool(getattr(self, name) == self._defaults()[name])

    def to_json(self) -> str:
        """Return the run's record of its request, without values of variables passed by name."""
        return "\n".join(_lines(self._asked())) + "\n"

    def to_script(self) -> list[str]:
        """Return the comment lines that record the request in a script.

        They omit the run's directory, which the script passes to `clusterddp batch`.
        """
        asked = self._asked()
        del asked["run_dir"]
        return [f"{_REQUEST}{line}" for line in _lines(asked)]

    def _asked(self) -> dict[str, object]:
        """Return the fields that are not defaults, and always the Python of the tasks."""
        asked = {
            **_not_defaults(self),
            "python": self.python,
            "controller_python": self.controller_python,
        }
        if isinstance(asked.get("train"), dict):  # the request's own field has it
            asked["train"].pop("hang_timeout", None)
        unsaid = [name for name, usual in self._defaults().items() if getattr(self, name) == usual]
        if self.controller_python == self.python and not (self.wrapper or self.container_image):
            unsaid.append("controller_python")
        return {name: value for name, value in asked.items() if name not in unsaid}

    @classmethod
    def from_script(cls, script: str, run_dir: str) -> "JobSpec":
        """Read the lines of `to_script`; raises RequestError as `from_json` does."""
        return cls.from_json(_of_script(script), "the script's #REQUEST", run_dir)

    @classmethod
    def from_json(
        cls, content: str, name: str = "spec.json", run_dir: str | None = None
    ) -> "JobSpec":
        """Read a record; raises RequestError if it is not valid in this format.

        name: of the record, for messages. run_dir: the run's directory if the record has none.
        """
        try:
            fields = _fields(content, name)
            fields.setdefault("controller_python", fields["python"])
            if run_dir is not None:
                fields.setdefault("run_dir", run_dir)
            for part, kind in _PARTS.items():
                if fields.get(part) is not None:
                    fields[part] = kind(**fields[part])
            return cls(**fields)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise RequestError(
                f"{name} is not a valid record of a run: {error}. [CD0505]"
            ) from None


_PARTS = {"resources": Resources, "train": TrainConfig, "sweep": Sweep}


def submission_comment(run_name: str) -> str:
    """Return the job comment that identifies a submission whose answer was lost."""
    return f"clusterddp:{run_name}"


@dataclass(frozen=True, eq=False, repr=False)
class SubmitOptions:
    """Options of a submission that are not part of its request."""

    force: bool = option(
        False,
        "Submit even if no partition fits, or a program is not on the PATH here.",
        group=table.RESOURCES,
        negatable=True,
    )
    check_python: bool = option(
        False,
        "Check that Python imports torch before submitting.",
        group=table.CODE,
        negatable=True,
    )
    template_dir: str = option("", "Directory of your templates.", names="DIR")
    env: tuple[str, ...] = option(
        (),
        "Set a variable in the script, or pass yours by NAME (for secrets); repeatable.",
        names="NAME[=VALUE]",
    )
    snapshot_limit: float = option(50.0, "Maximum size of the copy.", names="MB", group=table.CODE)
    runs_dir: str = option("jobs", "Directory for runs.", names="DIR", group=table.GENERAL)


_RECORDS = ((Resources, table.RESOURCES), (JobSpec, table.LAUNCH), (SubmitOptions, table.LAUNCH))
_ROWS = (row for record, group in _RECORDS for row in table.options_of(record, group))
REQUEST = tuple(sorted(_ROWS, key=lambda option: table.GROUPS.index(option.group)))
"""Options of the request, in the order of --help."""
OPTIONS = {option.name: option for option in (*REQUEST, *TRAINING)}
"""Every option by name, which is also its key in site.cfg."""
DIRECTIVES = {option.directive: option for option in REQUEST if option.directive}
"""Options that set an sbatch directive, by directive."""


def _not_defaults(record: object) -> dict[str, Any]:
    """Return the fields of a record that are not defaults, recursively."""
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(record):  # type: ignore[arg-type]
        value = getattr(record, field.name)
        if value != field.default:
            fields[field.name] = _not_defaults(value) if dataclasses.is_dataclass(value) else value
    return fields


def _lines(fields: dict[str, Any]) -> list[str]:
    """Write fields as JSON in lines of limited length; a value is never split."""
    written = [""]
    for part in json.JSONEncoder().iterencode({"format": _FORMAT, **fields}):
        if part.startswith(", ") and len(written[-1]) > _REQUEST_COLUMNS - len(_REQUEST):
            written[-1] += ","
            written.append(part[2:])
        else:
            written[-1] += part
    return written


def _of_script(script: str) -> str:
    """Return the JSON that `JobSpec.to_script` wrote into a script."""
    rest = itertools.dropwhile(lambda line: not line.startswith(_REQUEST), script.split("\n"))
    comments = itertools.takewhile(lambda line: line.startswith(_REQUEST), rest)
    return " ".join(line.removeprefix(_REQUEST) for line in comments)


def _fields(text: str, name: str) -> dict[str, Any]:
    """Read fields, with tuples for lists. Raises RequestError if a newer version wrote them.

    Raises ValueError, KeyError, AttributeError or RecursionError for a malformed record.
    """
    fields: dict[str, Any] = json.loads(text)
    if fields.pop("format") != _FORMAT:
        raise RequestError(f"{name} was written by a newer clusterddp. Update this one. [CD0506]")
    return {name: _frozen(value) for name, value in fields.items()}


def _frozen(value: object) -> object:
    if isinstance(value, dict):
        return {name: _frozen(item) for name, item in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
