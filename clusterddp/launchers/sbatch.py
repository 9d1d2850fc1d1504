"""Launch with sbatch, the default: render a `JobSpec` into its script and submit it.

The user's template directory is searched before the shipped templates, which are available as
`shipped/NAME`, so that a user's template can extend them and replace one block. Rendering is pure:
the same spec gives the same bytes.
"""

import contextlib
import functools
import importlib.util
import os
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.bccache import Bucket

from clusterddp.errors import RequestError, no_file
from clusterddp.launchers import SentJob
from clusterddp.request import sweep
from clusterddp.request.options import EXPEDITE
from clusterddp.request.resources import Resources
from clusterddp.request.spec import IN_ALLOCATION, NODE, REQUEST, JobSpec, submission_comment
from clusterddp.slurm import forms
from clusterddp.version import __version__

if TYPE_CHECKING:  # a dry run reads no run
    from clusterddp.run.run_dir import RunDir

SUBMITIT_SETUP = "_submitit.sbatch.j2"
"""Internal template: the part of the script that the submitit launcher passes as setup lines."""
_EXCLUDE = r"(?m)^#SBATCH\s+(?:--exclude(?:=|\s+)|-x\s*)(\S+)"
_NODES = f'${{{forms.NODES_VARIABLE}:+--overlap --nodelist="${forms.NODES_VARIABLE}"}}'
"""Options of srun for the nodes of a step, in a job that has some to spare."""
_PLAIN = r"[A-Za-z0-9_@%+=:,./()\[\]&|*!-]+"
_COLUMNS = 100
"""Width of the script's lines, except for longer words."""


def render(
    spec: JobSpec, template_folder: Path | None = None, *, template: str | None = None
) -> str:
    """Render the whole script. Raises RequestError with the line for an error in the template.

    template: replaces the requested one.
    """
    folders = [*([template_folder] if template_folder else []), shipped_folder()]
    environment = _jinja(folders)
    try:
        script = environment.get_template(template or spec.template).render(_context(spec))
    except jinja2.TemplateNotFound as error:
        names = {path.name for folder in folders for path in folder.glob("*.j2")}
        known = ", ".join(sorted(name for name in names if not name.startswith("_")))
        raise RequestError(
            f"template {error.name!r} not found. Available: {known}. [CD0301]"
        ) from None
    except jinja2.TemplateSyntaxError as error:
        raise RequestError(
            f"template {error.filename or error.name}, line {error.lineno}: Jinja syntax error: "
            f"{error.message}. Fix this line. [CD0302]"
        ) from None
    except OSError as error:
        raise no_file("--template", error.filename, error) from None
    except UnicodeDecodeError:
        raise RequestError(f"template {spec.template} is not UTF-8 text. [CD0301]") from None
    except Exception as error:  # an expression in a user's template can raise anything
        _blame(error, folders)
    if template_folder:
        _check_blocks(environment, spec.template)
    _check(spec, script)
    return script


prepare = render


def submit(
    spec: JobSpec,
    script: str,
    run: "RunDir",  # noqa: ARG001 -- its records are the caller's
    *,
    exclude: Sequence[str] = (),
    dependency: str = "",
    array: str = "",
) -> SentJob:
    """Submit the script. The other arguments override its lines."""
    from clusterddp.slurm import client  # not needed for a dry run

    if spec.requeue == EXPEDITE:
        client.check_expedite(os.environ)
    return SentJob(
        client.sbatch(
            script,
            os.environ,
            comment=spec.comment,
            exclude=exclude,
            dependency=dependency,
            array=array,
        )
    )


def excluded(script: str) -> list[str]:
    """Return the hosts that a script excludes. Raises RequestError for an invalid host list.

    They are read because an argument of sbatch overrides the line, which the user may have edited.
    """
    lists = [text.strip("\"'") for text in re.findall(_EXCLUDE, script)]
    return [host for text in lists for host in forms.expand_nodelist(text)]


def shipped_folder() -> Path:
    """Return the directory of shipped templates: in a wheel's package, or next to it in a checkout.

    Raises RequestError in a run's own file, which has none.
    """
    package = Path(__file__).resolve().parents[1]
    inside, beside = package / "templates", package.parent / "templates"
    if package.parent.is_file():
        raise RequestError(
            f"the clusterddp that a run carries, {package.parent}, renders no script; its COMMAND "
            "has it on the path for clusterddp.loop. Submit a run whose COMMAND submits others "
            "with --env CLUSTERDDP_LOOP=off. [CD0314]"
        )
    return inside if inside.is_dir() else beside


def directives(spec: JobSpec, *, agents: bool = False) -> list[str]:
    """Return the `#SBATCH` lines without that word; agents: one task per node, not per rank."""
    return [directive(name, value) for name, value in directive_values(spec, agents=agents).items()]


def directive_values(spec: JobSpec, *, agents: bool = False) -> dict[str, str | None]:
    """Return the directives by name, with unquoted values; None is a flag."""
    resources = spec.resources
    tasks_per_node = 1 if agents else resources.tasks_per_node
    wanted: dict[str, str | None] = {
        "job-name": spec.job_name or spec.run_name,
        "comment": submission_comment(spec.run_name),
        "nodes": str(resources.job_nodes),
        "ntasks": str(resources.job_nodes * tasks_per_node),
        "ntasks-per-node": str(tasks_per_node),
    }
    if spec.sweep:
        wanted["array"] = array_of(range(len(spec.sweep)), spec.sweep.max_concurrent)
    if agents and (cpus := agent_cpus(spec)):
        wanted["cpus-per-task"] = str(cpus)
    elif resources.cpus_per_task:
        wanted["cpus-per-task"] = str(resources.cpus_per_task)
    if resources.gpus_per_node:
        wanted[resources.gpu_directive] = _gpus(resources, tasks_per_node)
    for row in REQUEST:
        value = getattr(resources, row.parameter, None)
        if row.directive and isinstance(value, str) and value:
            wanted[row.directive] = value
    if resources.exclusive:
        wanted["exclusive"] = None
    if spec.requeue is not None:  # an explicit one overrides the site's own default
        mode = spec.requeue if isinstance(spec.requeue, str) else None
        wanted["requeue" if spec.requeue else "no-requeue"] = mode
    if spec.requeue:  # keeps the output of earlier starts in Slurm's log
        wanted["open-mode"] = "append"
    if spec.signal:
        wanted["signal"] = spec.signal
    if spec.export == "NONE":
        wanted["export"] = ",".join(spec.pass_environment) or "NONE"
    wanted.update(spec.sbatch)
    return {name: value for name, value in wanted.items() if name not in spec.omit_directives}


def agent_cpus(spec: JobSpec) -> int:
    """Return the CPUs of an agent, at least one per rank; 0 leaves them to the site.

    Slurm would give the agent one CPU, because it is one task. An exclusive node has all its CPUs.
    """
    resources = spec.resources
    if resources.cpus_per_task:
        return resources.cpus_per_task * resources.tasks_per_node
    is_open = not spec.sets_cpus and "cpus-per-task" not in spec.omit_directives
    return resources.tasks_per_node if is_open and resources.tasks_per_node > 1 else 0


def _shows_all_gpus(spec: JobSpec) -> bool:
    """Return whether tasks see all GPUs of their node, although each requests its own.

    Slurm would show each task only its own GPU (--gpus-per-task, srun(1)). With cgroups, NCCL then
    connects GPUs only through the host, and LOCAL_RANK is not a valid GPU number. `--gpu-bind none`
    does not help: Slurm 22.05 then names no GPUs, and tasks also see the GPUs of other jobs.
    """
    directives, resources = dict(spec.sbatch), spec.resources
    own = resources.gpus_per_node and resources.gpu_directive == "gpus-per-task"
    return bool(own) and "gpu-bind" not in directives and "tres-bind" not in directives


def directive(name: str, value: str | None) -> str:
    """Return one directive with Slurm's quoting, which differs from the shell's.

    Slurm's reader removes backslashes and paired quotes, and ends a value at an
    unquoted blank or `#` (`_get_argument` in its sbatch sources); inside double quotes, a
    backslash keeps the character after it.
    """
    if value is None:
        return f"--{name}"
    forms.text(f"--{name}", value)
    if len(value.encode()) > forms.MAX_DIRECTIVE_BYTES:
        raise RequestError(
            f"--{name}: the value has {len(value.encode())} bytes; Slurm's reader takes at most "
            f"{forms.MAX_DIRECTIVE_BYTES}. [CD0107]"
        )
    if re.fullmatch(_PLAIN, value):
        return f"--{name}={value}"
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'--{name}="{escaped}"'


def shell_word(value: object) -> str:
    """Quote the value as one word of bash, a comma included, which would look like a separator."""
    text = str(value)
    quoted = shlex.quote(text)
    return f"'{text}'" if quoted == text and "," in text else quoted


def command_lines(words: Iterable[str], indent: int = 2) -> str:
    """Join words of bash to a command with indented continuation lines."""
    lines = [""]
    for word in words:
        if lines[-1] and indent + len(lines[-1]) + len(word) + 3 > _COLUMNS:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return f" \\\n{' ' * indent}".join(lines)


def srun_words(spec: JobSpec, *, agents: bool = False) -> list[str]:
    """Return srun and its options as words of bash; agents: see `directives`.

    --export=ALL: a job submitted with --export=NONE would otherwise start bare tasks.
    --cpus-per-task: since Slurm 22.05, srun no longer takes it from the job.
    --kill-on-bad-exit: ranks that wait for a dead one would otherwise wait until their timeout.
    """
    resources = spec.resources
    tasks_per_node = 1 if agents else resources.tasks_per_node
    cpus = agent_cpus(spec) if agents else resources.cpus_per_task
    log, labels = "node-%t" if agents else "rank-%t", "--unbuffered"
    if spec.log_per == NODE and not agents:
        # Unbuffered, srun would label and end a line of which a rank has printed only a part.
        log, labels = "node-%n", "--label"
    if not spec.pyxis:
        srun = ["srun"]
    elif spec.container_runtime == "auto":
        srun = ['"${srun[@]}"']
    else:
        srun = pyxis_words(spec)
    return [
        *srun,
        *([_NODES] if resources.spare_nodes else []),
        *(_held_words(spec, tasks_per_node) if spec.launcher == IN_ALLOCATION else []),
        f"--nodes={resources.nodes}",
        f"--ntasks={resources.nodes * tasks_per_node}",
        f"--ntasks-per-node={tasks_per_node}",
        *([f"--cpus-per-task={cpus}"] if cpus else []),
        *("--export=ALL", "--kill-on-bad-exit=1", labels, "--open-mode=append"),
        *map(shell_word, spec.srun_args),
        f'--output="$run_dir/logs/{log}.log"',
    ]


def _held_words(spec: JobSpec, tasks_per_node: int) -> list[str]:
    """Return srun's share of an allocation, which no directive of the script asks for."""
    resources = spec.resources
    gpus = [f"--{resources.gpu_directive}={_gpus(resources, tasks_per_node)}"]
    return [
        *("--exact", f'--nodelist="${forms.NODES_VARIABLE}"'),
        *(gpus if resources.gpus_per_node else ["--gres=none"]),
        *([f"--mem={resources.mem}"] if resources.mem else []),
    ]


def pyxis_words(spec: JobSpec) -> list[str]:
    """Return the srun options that start the tasks in containers with NVIDIA's plugin pyxis."""
    container, is_own = spec.container, spec.uses_own_code
    here = '"$PWD"' if is_own else '"$run_dir"'
    bound = f",{shell_word(','.join(map(str, container.bound)))}" if container.bound else ""
    mounts = '"$run_dir:$run_dir,$PWD:$PWD"' if is_own else '"$run_dir:$run_dir"'
    workdir = spec.container_workdir
    return [
        "env",
        *(f"-u{name}" for name in container.hidden_from_pyxis),  # they are of the host
        "srun",
        f"--container-image={shell_word(spec.container_image)}",
        "--no-container-mount-home",
        "--no-container-entrypoint",
        f"--container-mounts={mounts}{bound}",
        f"--container-workdir={shell_word(workdir) if workdir else here}",
        *([f"--container-env={','.join(container.variables)}"] if container.variables else []),
    ]


def container_words(spec: JobSpec, ranks: int = 1) -> list[str]:
    """Return the command that runs a task in its container without pyxis and records its end.

    ranks: per task.
    """
    words = [shell_word(spec.controller_python), '"$own"', "exec", '--run-dir="$run_dir"']
    return [*words, f"--container={shell_word(spec.container.to_json(ranks))} --"]


def _in_container(spec: JobSpec, words: Sequence[str], ranks: int = 1) -> list[str]:
    """Return the command of a task as words of bash, with that of its container, if it has one."""
    if not spec.container_image or spec.container_runtime == "pyxis":
        return [*words]
    return [*(['"${container[@]}"'] if spec.pyxis else container_words(spec, ranks)), *words]


def task_arguments(spec: JobSpec) -> list[str]:
    """Return the arguments of all ranks after `python -m clusterddp`, without swept values."""
    return [spec.program.starter, f"--run-dir={spec.run_dir}", *_options(spec), *spec.command]


def _options(spec: JobSpec) -> list[str]:
    lead, arms, report_to = spec.signal_lead, spec.stacks, spec.report_to
    return spec.program.task_options(spec.sweep.names, lead=lead, arms=arms, report_to=report_to)


def task_words(spec: JobSpec, *, agents: bool = False) -> list[str]:
    """Return the command of a rank as words of bash; agents: as the program of a torchrun agent.

    Swept values are in variables that `trials` sets. An agent needs $$ for a $ in the
    arguments of its program.
    """

    def word(text: str) -> str:
        if spec.stages and text.startswith(f"{spec.env_prefix}/bin/"):
            return _staged(spec, text)
        return shell_word(text.replace("$", "$$") if agents else text)

    def variable(name: str) -> str:
        return f'"${{{name}//\\$/\\$\\$}}"' if agents else f'"${{{name}}}"'

    program = spec.program
    is_plain = not (agents and "$" in spec.run_dir)
    own, run_dir = ('"$own"', '"$run_dir"') if is_plain else map(variable, ("own", "run_dir"))
    prefix = [] if agents else spec.wrapper
    words = [*map(shell_word, prefix), _python(spec), own, program.starter]
    words.append(f"--run-dir={run_dir}")
    if agents:
        words.append("--own-log")
    words += map(word, _options(spec))
    return words + program.words(spec.sweep.names, word, variable)


def _python(spec: JobSpec) -> str:
    """Return the interpreter of the tasks as a word of bash."""
    return _staged(spec, spec.python) if spec.stages else shell_word(spec.python)


def _staged(spec: JobSpec, path: str) -> str:
    """Return a word of bash: the path of a program of the environment in each node's copy."""
    return f'"${forms.STAGED_VARIABLE}"{shell_word(path.removeprefix(spec.env_prefix))}'


def agent_words(spec: JobSpec) -> list[str]:
    """Return the command of a torchrun agent, which starts its node's ranks, as words of bash.

    bash -c: only the task knows its node, and a signal that its ranks handle as a request to stop
    would kill an agent.
    """
    resources = spec.resources
    of_node = ['--node-rank="$SLURM_NODEID"']
    rendezvous = ['--master-addr="$MASTER_ADDR"', '--master-port="$MASTER_PORT"']
    if spec.max_restarts:
        of_node = [
            '--local-addr="$SLURMD_NODENAME"',
            '--rdzv-conf="is_host=$((SLURM_NODEID == 0)),join_timeout=120"',
        ]
        rendezvous = [
            *("--rdzv-backend=c10d", f"--max-restarts={spec.max_restarts}"),
            '--rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT"',
        ]
    starter = [*map(shell_word, spec.wrapper), _python(spec), "-m", "torch.distributed.run"]
    return [
        *("bash", "-c"),
        shell_word(f'trap "" USR1 USR2; exec {" ".join([*starter, *of_node])} "$@"'),
        *("agent", f"--nnodes={resources.nodes}", f"--nproc-per-node={resources.tasks_per_node}"),
        *("--no-python", '--rdzv-id="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"', *rendezvous),
        '--log-dir="$run_dir/attempts/$(printf %04d "$CLUSTERDDP_ATTEMPT")/torchelastic"',
        *task_words(spec, agents=True),
    ]


def trials(spec: JobSpec) -> list[str]:
    """Return the branches of a bash `case` that set the variables of each trial by array index."""
    lines = []
    for index in range(len(spec.sweep)):
        trial = spec.sweep.trial(index)
        settings = [f"{sweep.variable(name)}={shell_word(text)}" for name, text in trial]
        for name, words in spec.program.arrays_for(trial).items():
            settings.append(f"{name}=({' '.join(map(shell_word, words))})")
        lines.append(f"{index}) {' '.join(settings)} ;;")
    return lines


def array_of(indices: Iterable[int], max_concurrent: int = 0) -> str:
    """Give the value of --array for indices in order, `0-3,7%2`."""
    listed = forms.array_indices(indices)
    return f"{listed}%{max_concurrent}" if max_concurrent else listed


def _gpus(resources: Resources, tasks_per_node: int) -> str:
    per_task = resources.gpu_directive == "gpus-per-task"
    count = resources.gpus_per_node // (tasks_per_node if per_task else 1)
    name = "gpu:" if resources.gpu_directive == "gres" else ""
    return f"{name}{resources.gpu_type}:{count}" if resources.gpu_type else f"{name}{count}"


_SPEC_FIELDS = (
    "run_name run_dir python controller_python resources environment pass_environment modules "
    "setup teardown srun_args network_interface wrapper"
)
"""Fields of the request that a template can use by name."""


def _context(spec: JobSpec) -> dict[str, object]:
    """Return the names that a template can use; `docs/templates.md` lists them."""
    return {
        **{name: getattr(spec, name) for name in _SPEC_FIELDS.split()},
        "spec": spec,
        "version": __version__,
        "directives": directives(spec),
        "agent_directives": directives(spec, agents=True),
        "agent_cpus": agent_cpus(spec),
        "shows_all_gpus": _shows_all_gpus(spec),
        "rank_variables": forms.RANK_VARIABLES,
        "task_arguments": task_arguments(spec),
        "srun": srun_words(spec),
        "agent_srun": srun_words(spec, agents=True),
        "pyxis": pyxis_words(spec) if spec.pyxis else [],
        "container_words": functools.partial(container_words, spec),
        "task": _in_container(spec, task_words(spec)),
        "agent": _in_container(spec, agent_words(spec), spec.resources.tasks_per_node),
        "trials": trials(spec),
        "request": spec.to_script(),
    }


def _jinja(folders: list[Path]) -> jinja2.Environment:
    shipped = jinja2.PrefixLoader({"shipped": jinja2.FileSystemLoader(folders[-1])})
    compiled = importlib.util.cache_from_source(str(folders[-1] / "_.py"))
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.FileSystemLoader(folders), shipped]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
        bytecode_cache=_CompiledTemplates(str(Path(compiled).parent)),
    )
    environment.filters["sh"] = shell_word
    environment.filters["command"] = command_lines
    return environment


class _CompiledTemplates(jinja2.FileSystemBytecodeCache):
    """Cache of compiled templates in `__pycache__`, like Python's of modules.

    Compiling takes longer than rendering. Nothing is written if PYTHONDONTWRITEBYTECODE is set or
    the directory is read-only; nothing is read that another user could have written.
    """

    def load_bytecode(self, bucket: Bucket) -> None:
        try:
            kept = Path(self.directory, self.pattern % (bucket.key,))
            if all(self._is_trusted(path.stat()) for path in (kept.parent, kept)):
                super().load_bytecode(bucket)
        except Exception:  # missing, or damaged: pickle and marshal can raise anything
            bucket.reset()

    def _is_trusted(self, status: os.stat_result) -> bool:
        owners = (os.geteuid(), shipped_folder().stat().st_uid, 0)
        return status.st_uid in owners and not status.st_mode & 0o022

    def dump_bytecode(self, bucket: Bucket) -> None:
        if sys.dont_write_bytecode:
            return
        with contextlib.suppress(OSError):  # the installation of another user
            Path(self.directory).mkdir(parents=True, exist_ok=True)
            super().dump_bytecode(bucket)
            Path(self.directory, self.pattern % (bucket.key,)).chmod(0o644)


def _blame(error: Exception, folders: list[Path]) -> NoReturn:
    """Raise RequestError with the template's file and line, which Jinja puts into tracebacks."""
    import traceback

    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if any(Path(frame.filename).is_relative_to(folder) for folder in folders)
    ]
    if not frames and not isinstance(error, jinja2.TemplateError):
        raise error
    where = f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else "?"
    kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
    hint = "docs/templates.md lists the values" * isinstance(error, jinja2.UndefinedError)
    raise RequestError(
        f"template {where}: {kind}{error}. {hint or 'Fix this line'}. [CD0302]"
    ) from None


def _check_blocks(environment: jinja2.Environment, name: str) -> None:
    """Reject a block of a user's template that overrides no block of the template it extends.

    Jinja would silently drop it. A block inside another one may be new.
    """
    chain = [_parsed(environment, name)]
    while (parent := _extended(chain[0][0])) is not None:
        chain.insert(0, _parsed(environment, parent))
    known: list[str] = []
    for tree, path in chain:  # the shipped one first
        for block in tree.body:
            if isinstance(block, nodes.Block) and known and block.name not in known:
                import difflib

                near = difflib.get_close_matches(block.name, known, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise RequestError(
                    f"template {path}, line {block.lineno}: there is no block {block.name!r} to "
                    f"replace. Available: {', '.join(known)}.{hint} [CD0302]"
                )
        known += [block.name for block in tree.find_all(nodes.Block) if block.name not in known]


def _parsed(environment: jinja2.Environment, name: str) -> tuple[nodes.Template, str]:
    assert environment.loader is not None
    source, path, _ = environment.loader.get_source(environment, name)
    return environment.parse(source, name, path), path or name


def _extended(tree: nodes.Template) -> str | None:
    """Return the template that this one extends; None without one, or for an expression."""
    extends = tree.find(nodes.Extends)
    named = extends.template if extends else None
    return named.value if isinstance(named, nodes.Const) else None


def _check(spec: JobSpec, script: str) -> None:
    """Reject what sbatch would reject or silently ignore, with the template's name."""
    if not script.startswith("#!"):
        raise RequestError(
            f"template {spec.template} does not start with '#!/bin/bash'. Make that its first "
            "line. [CD0303]"
        )
    if "\r" in script or "\0" in script:
        raise RequestError(
            f"template {spec.template} has CRLF line endings or NULs, which sbatch rejects. "
            "Save it with LF line endings. [CD0303]"
        )
    if spec.max_restarts and "--max-restarts=" not in script:
        raise RequestError(
            f"--max-restarts {spec.max_restarts} needs torchrun's agents, which template "
            f"{spec.template} does not start. Submit with --template torchrun. [CD0303]"
        )
    if spec.resources.spare_nodes and forms.NODES_VARIABLE not in script:
        raise RequestError(
            f"--spare-nodes: template {spec.template} does not tell srun its nodes. Begin its line "
            f"with: srun {_NODES} [CD0303]"
        )
    if spec.stages and forms.STAGED_VARIABLE not in script:
        raise RequestError(
            f"--stage-env: template {spec.template} does not start the tasks from the copy. Use "
            "its value `task`, or --stage-env off. [CD0303]"
        )
    if spec.log_per == NODE and "--label" not in script:
        raise RequestError(
            f"--log-per node: template {spec.template} does not let srun label the lines of the "
            "ranks. Use its value `srun`, or --log-per rank. [CD0303]"
        )
    if spec.sweep and not sweep.is_array(script):
        raise RequestError(
            f"--sweep: the script of template {spec.template} has no line '#SBATCH --array=', "
            "which starts the trials. Keep its directives, and leave array out of "
            "--omit-directive. [CD0303]"
        )
    body = False
    for number, line in enumerate(script.split("\n"), 1):
        if line.startswith("#SBATCH") and body:
            raise RequestError(
                f"template {spec.template}: rendered line {number}, {line!r}, comes after the "
                "first command, where Slurm ignores directives. Move it up. [CD0303]"
            )
        body = body or bool(line.strip() and not line.startswith("#"))
