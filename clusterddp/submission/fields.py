"""Construction of a `JobSpec` from options, for the command line and the Python API.

Also has the warnings about valid but suspicious requests.
"""

import dataclasses
import os
import re
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from clusterddp import log
from clusterddp.errors import OptionError, RequestError, no_file
from clusterddp.launchers import SHIPPED, full_name
from clusterddp.request.options import (
    COUNT,
    DEFAULT,
    FLAG,
    NEEDED_DIRECTIVES,
    PASSED_ON,
    REPLACED,
    Given,
    sbatch_directives,
)
from clusterddp.request.program import NO_PREFLIGHT, BuiltIn, Command, Program, where_instead
from clusterddp.request.resources import Resources
from clusterddp.request.spec import (
    ANY,
    CONDITIONS,
    DEFAULT_TEMPLATE,
    DIRECTIVES,
    IN_ALLOCATION,
    OWN_PYTHON,
    REQUEST,
    STAGE_OFF,
    JobSpec,
)
from clusterddp.request.sweep import NO_SWEEP, Sweep
from clusterddp.request.train_config import TRAINING, TrainConfig, recipe_settings
from clusterddp.slurm import forms

CONTAINER = ("container_image", "container_runtime", "container_mount", "container_workdir")
"""Parameters of the container options."""
IMAGES_PYTHON = "python3"
"""Default interpreter of the tasks in an image."""
_GPU_VALUES = {"device": "cuda", "backend": "nccl", "precision": "tf32", "cuda_graph": "on"}
"""Values of options that require GPUs."""
_NEED_QUEUE = ("spare_nodes", "test_only", "after", "dependency")
"""Parameters that an allocation cannot serve."""
_FURTHER = ("chdir", "comment", "gres", "nice")
_KNOWN_DIRECTIVES = {*DIRECTIVES, *REPLACED, *PASSED_ON.values(), *_FURTHER}
"""Full names of sbatch(1) directives that --sbatch and --omit-directive accept."""


CHANGEABLE = (
    *("resources", "train", "after", "signal", "job_name", "python", "controller_python"),
    *("requeue", "max_requeues", "retries", "max_restarts", "stage_env", "launcher", "hold"),
    *(
        "stacks",
        "hang_timeout",
        "on_hang",
        "avoid_bad_nodes_for",
        "preflight",
        "notify",
        "report_to",
    ),
    *("container_image", "container_runtime", "container_mounts", "container_workdir"),
)
"""Fields of a JobSpec that resume may change, in addition to its program's."""
_NO_CONTAINER = {"container_runtime": "auto", "container_mounts": (), "container_workdir": ""}


def generate_name(kind: str) -> str:
    """Return a unique name for a run or sweep without --run-name."""
    return f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"


def job_spec(given: Given, run_name: str, sweep: Sweep = NO_SWEEP) -> JobSpec:
    """Return the checked request, with paths resolved from the current directory.

    Raises RequestError, which names the source of a value that was not typed.
    """
    with given.naming_sources():
        _check_typed(given, sweep)
        spec = _job_spec(given, run_name, sweep)
        check_new(spec)
    return spec


def _check_typed(given: Given, sweep: Sweep) -> None:
    """Refuse typed options that conflict, and an empty one."""
    if given.command:
        if flags := given.flags(row.parameter for row in TRAINING):
            instead = where_instead(flags)
            raise OptionError(
                flags,
                f" appl{'y' if ',' in flags else 'ies'} only to the built-in training, but a "
                f"COMMAND is given.{instead} Put the command's own options after '--'. [CD0103]",
            )
    elif name := next((n for n in sweep.names if given.source(n.replace("-", "_")) == FLAG), ""):
        raise OptionError(
            f"--{name}", f" conflicts with --sweep {name}. Remove one of them. [CD0103]"
        )
    for name, value in given.typed.items():
        if value == "":
            flag = f"--{name.replace('_', '-')}"
            raise OptionError(flag, " is empty. Give a value, or omit the option. [CD0102]")


def _job_spec(given: Given, run_name: str, sweep: Sweep) -> JobSpec:
    values = {name: value for name, value in given.values.items() if value is not None}
    program = _program(given)
    # Without DDP a single task drives all GPUs.
    tasks = 0 if program.options.get("strategy", "ddp") == "ddp" else 1
    resources = changed_resources(Resources(), values, tasks)
    environment, passed = environment_of(given.environment, values["env"])
    runs_dir = os.path.abspath(values["runs_dir"])
    forms.refuse_carried("--runs-dir", runs_dir, os.environ)
    fields = {
        **_fields_of(values),
        "run_name": run_name,
        "run_dir": f"{runs_dir}/{run_name}",
        "resources": resources,
        **program.fields,
        "sweep": sweep,
        "environment": environment,
        "pass_environment": passed,
        **{name: interpreter(values[name]) for name in ("python", "controller_python")},
        **container_of(given),
        "after": _after(values, program.options.get("init_from", "")),
        "template": _template(given),
        "sbatch": directives_of(sbatch_directives(given.environ), values["sbatch"], resources),
        "omit_directives": _omitted(values["omit_directive"]),
        "slurm_folder": slurm_folder(),
        "signal": "" if values.get("signal") == "none" else values.get("signal"),
    }
    if given.source("launcher") == DEFAULT and _runs_in_allocation(given, sweep):
        fields["launcher"] = IN_ALLOCATION
    staging = fields.get("stage_env", STAGE_OFF)
    if staging == STAGE_OFF or given.source("stage_env") == FLAG:
        return JobSpec(**fields)
    spec = JobSpec(**{**fields, "stage_env": STAGE_OFF})
    return dataclasses.replace(spec, stage_env=staging) if spec.can_stage else spec


def _runs_in_allocation(given: Given, sweep: Sweep) -> bool:
    """Return whether a request without a launcher starts in a hold, or in this shell of salloc."""
    if given.values.get("in_hold") or not forms.in_salloc_shell(given.environ):
        return bool(given.values.get("in_hold"))
    asked = ["sweep"] if sweep else [name for name in _NEED_QUEUE if given.values.get(name)]
    if asked:
        option = f"--{asked[0].replace('_', '-')}"
        log.info(f"{option} needs Slurm's queue, so the allocation of this shell is not used")
    return not asked


def _fields_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields for option values, given by parameter, except container options."""
    names = values.keys() - {*CONTAINER, "python"}
    own = {field.name for field in dataclasses.fields(JobSpec)}
    rows = [row for row in REQUEST if row.parameter in names and row.field in own]
    return {row.field: row.read(values[row.parameter]) for row in rows}


def changed(given: Given, before: JobSpec) -> JobSpec:
    """Return a recorded request with the typed options replacing its values.

    Raises RequestError, for example for training options if the run has a COMMAND.
    """
    typed, asked = given.typed, before.resources
    # One task per GPU before stays one task per GPU.
    tasks = 0 if asked.tasks_per_node == (asked.gpus_per_node or 1) else asked.tasks_per_node
    of_container = {*CONTAINER, "python"}
    fields = _fields_of(typed)
    fields |= container_fields({name: typed[name] for name in typed if name in of_container})
    if "max_concurrent" in typed:
        fields["sweep"] = dataclasses.replace(before.sweep, max_concurrent=typed["max_concurrent"])
    if "after" in fields:
        fields["after"] = awaited_runs(fields["after"], Path(given.values["runs_dir"]))
    if "controller_python" in fields:
        fields["controller_python"] = interpreter(fields["controller_python"])
    image = fields.get("container_image")
    if image == "":  # also drops the other container options
        fields = {**_NO_CONTAINER, **fields}
    if image is not None and bool(image) != bool(before.container_image):
        fields.setdefault("python", IMAGES_PYTHON if image else OWN_PYTHON)
    if fields.get("hold"):
        fields.setdefault("launcher", IN_ALLOCATION)
    elif "launcher" in fields:
        fields["hold"] = ""
    fields["resources"] = changed_resources(asked, typed, tasks)
    fields |= _of_command(given, before, fields["resources"])
    if fields.get("signal") == "none":
        fields["signal"] = ""
    elif "signal" not in typed and before.has_default("signal"):
        fields["signal"] = None  # the default follows the time limit
    return dataclasses.replace(before, **fields)


def _changed_program(given: Given, before: JobSpec) -> Program:
    """Return the run's program with the typed options, which override a typed recipe."""
    names = [row.parameter for row in TRAINING if row.name != "allow-config-change"]
    typed = {name: value for name, value in given.typed.items() if name in names}
    typed = {**recipe_settings(typed.get("recipe")), **typed}
    if typed.get("data_dir"):
        typed["data_dir"] = os.path.abspath(typed["data_dir"])
    return before.program.changed(before.run_name, typed, given.flags(names), given.command or ())


def _of_command(given: Given, before: JobSpec, resources: Resources) -> dict[str, object]:
    """Return the fields that determine what runs; typed values replace recorded ones."""
    typed = given.typed
    fields = _changed_program(given, before).fields
    if "env" in typed:
        former = {**dict(before.environment), **dict.fromkeys(before.pass_environment)}
        fields["environment"], fields["pass_environment"] = environment_of(
            *_merge(former, typed["env"])
        )
    if "sbatch" in typed:
        fields["sbatch"] = directives_of(*_merge(dict(before.sbatch), typed["sbatch"]), resources)
    for option, field in (("module", "modules"), ("setup", "setup")):
        if option in typed:
            fields[field] = tuple(line for line in typed[option] if line)
    return fields


def _merge(
    former: Mapping[str, str | None], items: Sequence[str]
) -> tuple[Mapping[str, str | None], list[str]]:
    """Return the recorded values, unless an empty item drops them, and the nonempty items."""
    return ({} if "" in items else former), [item for item in items if item]


def _program(given: Given) -> Program:
    """Return the COMMAND, or the training with paths resolved from the current directory."""
    if given.command:
        return Command(given.command)
    data_dir, source = given.values["data_dir"], given.values["init_from"]
    paths = {"data_dir": os.path.abspath(data_dir) if data_dir else ""}
    if source:
        paths["init_from"] = source_path(source, given.values["runs_dir"])
    return BuiltIn(TrainConfig.of(given, **paths))


def container_of(given: Given) -> dict[str, Any]:
    """Return the container fields; without an image only those that were typed.

    A site's container settings apply only to runs with an image. The tasks' Python is the image's.
    """
    fields = {name: given.values[name] for name in CONTAINER if given.values[name]}
    if "container_image" in fields:
        source = given.source("python")
        # With --on it is the cluster's, which an image lacks.
        is_far = source == "CLUSTERDDP_PYTHON" and forms.carried_top(str(Path.cwd()), os.environ)
        is_named = source != DEFAULT and not is_far
        fields["python"] = given.values["python"] if is_named else IMAGES_PYTHON
    else:
        fields = {name: value for name, value in fields.items() if given.source(name) == FLAG}
    return container_fields(fields)


def template_folder(given: Given) -> Path | None:
    """Return the directory of the user's templates: --template-dir, or that of a --template file.

    Raises OptionError if it does not exist.
    """
    template, folder = given.values["template"], given.values["template_dir"]
    path = Path(template)
    if "/" in template and not path.is_file():
        raise no_file("--template", template)
    if "/" in template or (path.is_file() and path.name not in SHIPPED):
        return path.parent
    return existing_templates(folder)


def existing_templates(folder: str | None) -> Path | None:
    """Return the path of --template-dir. Raises OptionError if it does not exist."""
    if folder is not None and not Path(folder).is_dir():
        raise OptionError("--template-dir", f": there is no directory {str(folder)!r}.")
    return None if folder is None else Path(folder)


def _template(given: Given) -> str:
    """Return the name of a template's file. Raises OptionError if it is ambiguous."""
    value, folder = given.values["template"], given.values["template_dir"]
    if Path(value).name.startswith("_"):
        raise OptionError("--template", f" {value}: this file is only a part of other templates.")
    template_folder(given)
    if "/" in value:
        return Path(value).name
    is_own = folder and (Path(folder) / value).is_file()
    is_named = given.source("template") != DEFAULT
    if is_named and value in SHIPPED and not is_own and Path(value).is_file():
        raise OptionError(
            "--template",
            f" {value} is ambiguous: both a file here and a shipped template. Use ./{value} for "
            f"the file or {value.removesuffix('.sbatch.j2')} for the shipped template.",
        )
    return full_name(value, Path(folder) if folder else None)


def check_new(spec: JobSpec) -> None:
    """Make the checks that recorded requests skip. Raises RequestError."""
    refuse_launcher(spec)
    spec.check_trials()


def refuse_launcher(spec: JobSpec) -> None:
    """Raise RequestError, with the line to type, if each task would start a launcher.

    Only new requests are checked, not the records of queued runs.
    """
    nested = None if spec.allow_launcher else spec.program.launcher()
    if nested is None:
        return
    from clusterddp.request.nested_launcher import AGENTS

    ours = spec.launcher != "submitit" and spec.template == DEFAULT_TEMPLATE
    with_agents = (ours and nested.name in AGENTS) or "torchrun" in spec.template
    line = f"clusterddp submit {'--template torchrun ' * with_agents}-- "
    line += shlex.join(nested.instead or ("python", "train.py"))
    note = ""
    if nested.adds_local_rank:
        note = f" {nested.name} also adds --local-rank: read LOCAL_RANK instead."
    raise RequestError(
        f"COMMAND starts {nested.name}, but {already_ranks(spec)}. Use: {line} (with your "
        f"other options).{note} To start {nested.name} in each task anyway, add "
        "--allow-launcher. [CD0307]"
    )


def already_ranks(spec: JobSpec) -> str:
    """Return a clause that says what starts the ranks, which a launcher would start again."""
    by = "torchrun" if "torchrun" in spec.template else "clusterddp"
    return f"{by} already starts one task per rank ({spec.layout})"


def remarks(spec: JobSpec) -> tuple[str, ...]:
    """Return warnings about a valid request, to log before it waits in the queue."""
    gpus, tasks = spec.resources.gpus_per_node, spec.resources.tasks_per_node
    program = spec.program
    found = [
        f"{word} in the COMMAND is not replaced, because --sweep has no such name"
        for word in program.unused_placeholders(spec.sweep.names)
    ]
    found += [
        f"{word} comes after '--', so it is passed to the COMMAND: clusterddp ignores it"
        for word in spec.command[1:]
        if word in ("--dry-run", "--test-only")
    ]
    if gpus and program.options.get("device") == "cpu":
        found.append(f"--device cpu leaves the {gpus} GPUs of each node idle")
    elif gpus > tasks and program.options.get("strategy") == "ddp":
        found.append(
            f"{gpus - tasks} of the {gpus} GPUs of each node stay idle, because a rank uses one: "
            f"remove --tasks-per-node {tasks}, or request fewer GPUs"
        )
    elif 0 < gpus < tasks:
        found.append(f"{tasks // gpus} ranks share each GPU, its time and its memory")
    if spec.launcher == IN_ALLOCATION and spec.requeue:
        found.append(
            "requeue is off inside an allocation: resume the run yourself if it must continue"
        )
    if spec.launcher == "local":
        if spec.preflight not in (None, NO_PREFLIGHT):
            found.append(f"--preflight {spec.preflight} has no effect with --launcher local")
        return tuple(f"{each}." for each in found)
    if spec.preflight and spec.preflight not in program.preflights:
        found.append(
            f"--preflight {spec.preflight} is the same as quick for a COMMAND: its further checks "
            "need the built-in training"
        )
    if gpus and not (spec.sets_cpus or "cpus-per-task" in spec.omit_directives):
        gets = f"each {program.rank} gets one CPU unless the partition sets DefCpuPerGPU"
        if "torchrun" in spec.template:  # its agents request the CPUs of their ranks
            gets = "each rank gets one CPU, whatever the partition's DefCpuPerGPU"
        found.append(
            f"{gets}. That is too few for a GPU's steps, NCCL, data loading and checkpoints: add "
            "for example --cpus-per-task 4, or set cpus-per-task in site.cfg"
        )
    wanted = [name for name, value in _GPU_VALUES.items() if program.options.get(name) == value]
    if wanted and not gpus:
        found.append(
            f"--{wanted[0].replace('_', '-')} {_GPU_VALUES[wanted[0]]} needs GPUs, but none are "
            "requested: add --gpus-per-node N unless the partition provides them anyway"
        )
    return tuple(f"{each}." for each in found)


def slurm_folder() -> str:
    """Return the directory of Slurm's commands, or empty if it is on every PATH."""
    found = next((each for each in os.get_exec_path() if os.access(f"{each}/sbatch", os.X_OK)), "")
    return "" if found in ("/usr/bin", "/bin", "/usr/local/bin") else found


def interpreter(name: str) -> str:
    """Return a path as absolute; a bare name is looked up on the job's PATH."""
    return os.path.abspath(name) if "/" in name else name


def container_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JobSpec fields of container options, with paths made absolute."""
    fields = {**given}
    mounts = fields.pop("container_mount", None)
    if "python" in fields:
        fields["python"] = interpreter(fields["python"])
    if image := fields.get("container_image"):
        from clusterddp.processes.container import absolute_path, is_file

        if is_file(image):
            fields["container_image"] = absolute_path(image)
    if mounts is not None:
        from clusterddp.processes.container import Mount

        texts = (forms.text("--container-mount", text) for text in mounts if text)
        fields["container_mounts"] = tuple(str(Mount.parse(text)) for text in texts)
    return fields


def changed_resources(
    before: Resources, given: Mapping[str, object], tasks_per_node: int
) -> Resources:
    """Return the resources with the given option values.

    tasks_per_node: default if not given; 0 means one per GPU, or one without GPUs.
    """
    names = {field.name for field in dataclasses.fields(Resources)}
    fields: dict[str, Any] = {name: value for name, value in given.items() if name in names}
    if "gpus_per_node" in given:
        gpus = forms.gpu_count("--gpus-per-node", fields["gpus_per_node"])
        fields["gpu_type"], fields["gpus_per_node"] = gpus
    COUNT.check("--tasks-per-node", fields.get("tasks_per_node", 1))
    return dataclasses.replace(before, **{"tasks_per_node": tasks_per_node, **fields})


def source_path(value: str, runs_dir: str) -> str:
    """Return the path of a checkpoint file or run directory, possibly below `runs_dir`."""
    for path in (Path(value), Path(runs_dir) / value):
        if path.exists():
            return os.path.abspath(path)
    raise OptionError(
        "--init-from",
        f": {value!r} is not a checkpoint, a run's directory or the name of a run in {runs_dir}.",
    )


def _after(values: Mapping[str, Any], source: str) -> tuple[tuple[str, str], ...]:
    """Return the runs to wait for: those in --after, and that of --init-from if still active."""
    after = awaited_runs(values["after"], Path(values["runs_dir"]))
    if not source or not (Path(source) / "spec.json").is_file() or source in dict(after):
        return after
    from clusterddp.run.run_dir import RunDir
    from clusterddp.status.status import statuses

    [status] = statuses([RunDir(Path(source))])
    is_active = status.state in ("queued", "running") and status.launcher in ("sbatch", "submitit")
    return (*after, (source, ANY)) if is_active else after


def awaited_runs(texts: Iterable[str], runs_dir: Path) -> tuple[tuple[str, str], ...]:
    """Return the directory of each run in --after and the state that it must reach.

    An empty text names none. Raises OptionError if there is no such run.
    """
    found: dict[str, str] = {}
    for text in filter(None, texts):
        from clusterddp.status import chain  # rarely needed

        try:
            found |= [chain.find(runs_dir, text)]
        except RequestError as error:
            _, colon, end = text.rpartition(":")
            is_wrong = colon and "/" not in end and end not in CONDITIONS
            why = f"{end!r} is not one of {', '.join(CONDITIONS)}." if is_wrong else error
            raise OptionError("--after", f" {text}: {why}" if is_wrong else f": {why}") from None
    return tuple(found.items())


def environment_of(
    before: Mapping[str, str | None], items: Iterable[str]
) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """Return the variables that the script sets, and the names of those it passes on.

    before: values that --env items override; None for a variable passed by name.
    """
    values: dict[str, str | None] = dict(before)
    for item in items:
        name, equals, value = item.partition("=")
        if not equals and re.fullmatch(forms.VARIABLE, name) and name not in os.environ:
            raise OptionError(
                "--env", f" {name}: not set in this shell. Set it, or use --env {name}=VALUE."
            )
        values.pop(name, None)
        values[name] = _as_utf8(value) if equals else None
    environment = tuple((name, value) for name, value in values.items() if value is not None)
    passed = tuple(name for name, value in values.items() if value is None)
    if passed:
        from clusterddp.slurm.client import submission_environment

        arriving = submission_environment(os.environ)
        for name in passed:
            if name in os.environ and name not in arriving:
                raise OptionError(
                    "--env",
                    f" {name} cannot be passed by name: it belongs to the surrounding job and is "
                    f"removed from submissions. Use --env {name}=VALUE.",
                )
    return environment, passed


def _as_utf8(value: str) -> str:
    """Return a typed text decoded as UTF-8, whatever the locale's encoding."""
    try:
        return os.fsencode(value).decode()
    except UnicodeError:
        return value  # refused later, unless it comes from a file


def directives_of(
    before: Mapping[str, str | None], items: Iterable[str], resources: Resources
) -> tuple[tuple[str, str | None], ...]:
    """Return the directives in --sbatch and `before`, without those that an option overrides."""
    mem, cpus = resources.mem, resources.cpus_per_task
    instead_of = {"mem-per-cpu": mem, "mem-per-gpu": mem, "cpus-per-gpu": cpus}
    directives = {name: value for name, value in before.items() if not instead_of.get(name)}
    for item in items:
        key, equals, value = item.partition("=")
        name = key.removeprefix("--")
        forms.DIRECTIVE.check("--sbatch", name)
        # --output is accepted: it takes what is printed before the job log is opened.
        instead = _instead(name) if name != "output" else ""
        if name == "gres" and "gpu" in value:
            instead = "--gpus-per-node with --gpu-directive gres"
        if instead:
            raise OptionError("--sbatch", f" {item} is not accepted. Use {instead}.")
        directives[name] = forms.text(f"--sbatch {name}", value) if equals else None
    return tuple(directives.items())


def _instead(name: str) -> str:
    """Return the option that replaces a directive or its abbreviation, which sbatch accepts too."""
    if name not in _KNOWN_DIRECTIVES:
        name = next((full for full in (*DIRECTIVES, *REPLACED) if full.startswith(name)), name)
    return DIRECTIVES[name].flag if name in DIRECTIVES else REPLACED.get(name, "")


def _omitted(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        forms.DIRECTIVE.check("--omit-directive", name)
        if name in NEEDED_DIRECTIVES:
            raise OptionError("--omit-directive", f" {name}: the run requires it. Keep it.")
        if name not in _KNOWN_DIRECTIVES:
            import difflib

            near = difflib.get_close_matches(name, _KNOWN_DIRECTIVES, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else "Name one that --dry-run prints."
            raise OptionError("--omit-directive", f" {name}: there is no such directive. {hint}")
    return names
