"""Checks, before anything is queued, that what the tasks start can start: COMMAND, interpreters.

Nothing is run, but for the interpreters that `--check-python` names. What only the nodes may have
is a warning.
"""

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path, PurePath
from typing import NoReturn

from clusterddp import log
from clusterddp.errors import OptionError, RequestError, coded
from clusterddp.formatting import setting
from clusterddp.launchers import SHIPPED
from clusterddp.request.spec import JobSpec

_BRING_FILES = ("bb", "begin", "chdir", "container")
"""Begin of sbatch's directives by which a job can find other files than there are here now."""
_INTERPRETERS = {".py": "python", ".sh": "bash"}
"""Interpreters of scripts, by how their names end."""
_SHELLS = ("bash", "sh")
_FROM_ITS_FOLDER = "Submit from the folder that it is relative to"
_OLDEST = """\
import sys
if sys.version_info < (3, 10):
    sys.exit("it is Python %d.%d; the tasks need 3.10 or later" % sys.version_info[:2])
"""
_IMPORT_SECONDS = 60.0
"""Patience with an import of torch, which takes long on a cold shared file system."""


def check_command(
    spec: JobSpec, is_own: Callable[[], bool], folder: Path | None, *, force: bool
) -> None:
    """Refuse a COMMAND whose program or script is not where the tasks look for it.

    A file of this folder that is typed as if it were a program on the PATH, or that cannot be run
    by itself, is refused too, and so are a folder and an interpreter without a script. Warns of
    what can still be on the nodes: a path that is absolute or leads through a link. Refuses nothing
    where set-up lines, a container, an earlier job, a site's own template or another folder may
    bring the file.

    is_own: tells whether a template of ours gives the script; a site's own can bring files. folder:
    the one in which it starts, by default the current one. force: warn of a program that is not on
    the PATH of this machine.
    """
    _warn_of_one_device(spec, folder or Path.cwd())
    if spec.container_image:
        check_container(spec)
        return
    is_open = spec.setup or spec.wrapper or spec.srun_args or spec.resources.dependency
    if not spec.command or is_open or spec.template not in SHIPPED:
        return
    if any(name.startswith(_BRING_FILES) for name, _ in spec.sbatch):
        return
    from clusterddp.request import nested_launcher  # not needed for a training

    folder = folder or Path.cwd()
    program, file = nested_launcher.started(spec.command)
    is_on_path = "/" not in program and shutil.which(program) is not None
    is_script = PurePath(program).suffix in _INTERPRETERS
    is_file = "/" in program or (is_script and not is_on_path and not spec.modules)
    names = [name for name in (program if is_file else "", file) if name]
    # Not Path.exists, which raises OSError for a name that is too long.
    missing = [name for name in names if not os.path.exists(folder / name)]  # noqa: PTH110
    relative = [shlex.quote(name) for name in missing if _is_below(folder, name)]
    is_ours = is_own()
    if is_ours:
        if relative:
            _refuse_missing(relative[0], folder, missing)
        _check_own(spec, folder, program, file, is_there=not missing)
    if program and not is_file and not spec.modules and not is_on_path:
        if is_ours and not force and not _has_other_path(spec):
            raise RequestError(
                f"COMMAND: there is no program {shlex.quote(program)} on the PATH, where the tasks "
                "look for it. Correct its name, say what brings it (--module, --setup), or add "
                "--force if the nodes have it. [CD0306]"
            )
        missing.append(program)
    for name in missing:
        log.warning(
            f"{shlex.quote(name)} of COMMAND is not on this machine: the tasks need it [CD0317]"
        )


def _refuse_missing(shown: str, folder: Path, missing: Sequence[str]) -> NoReturn:
    is_newer = folder != Path.cwd() and any(os.path.exists(name) for name in missing)  # noqa: PTH110
    raise RequestError(
        f"COMMAND: there is no {shown} in {folder}, where the tasks start it. "
        + ("Take the current files with --code new" if is_newer else _FROM_ITS_FOLDER)
        + ", or name a file that is there.",
        code="CD0306",
    )


def _check_own(spec: JobSpec, folder: Path, program: str, file: str, *, is_there: bool) -> None:
    """Check what the tasks find as it is here, since no template of a site's brings another."""
    from clusterddp.request import nested_launcher
    from clusterddp.submission import outside

    if not spec.modules and (
        remark := outside.src_remark(spec.command, folder, outside.pythonpath(spec))
    ):
        log.warning(coded(remark, "CD0306"))
    if program and is_there:
        _check_own_program(folder, program, may_be_on_path=bool(spec.modules))
    reads_input = nested_launcher.is_python(program) or PurePath(program).name in _SHELLS
    if reads_input and program == spec.command[-1] and not file:
        typed = shlex.quote(program)
        raise RequestError(
            f"COMMAND: {typed} is given nothing to run: a task's standard input is empty. Type it "
            f"as: {typed} FILE [CD0306]"
        )


def _has_other_path(spec: JobSpec) -> bool:
    """Return whether the tasks may look for a COMMAND's program elsewhere than on our PATH."""
    from clusterddp.request import nested_launcher

    before = spec.command[: nested_launcher.program_index(spec.command)]
    brings = any(PurePath(word).name in nested_launcher.BRING_PROGRAMS for word in before)
    sets = any(word.startswith("PATH=") for word in before) or "PATH" in dict(spec.environment)
    return brings or sets or spec.export == "NONE" or "get-user-env" in dict(spec.sbatch)


def _warn_of_one_device(spec: JobSpec, folder: Path) -> None:
    """Warn of a training script that knows of no other rank, where several tasks start it."""
    if spec.world_size == 1:
        return
    from clusterddp.request import nested_launcher

    program, file = nested_launcher.started(spec.command)
    name = file or program
    if not name:
        return
    from clusterddp.scripts import check

    if PurePath(program).name == "litgpt":
        _warn_of_litgpt(spec)
    remark = check.one_device_remark(shlex.quote(name), folder / name, tasks=spec.world_size)
    if remark:
        log.warning(coded(remark, "CD1226"))


def _warn_of_litgpt(spec: JobSpec) -> None:
    """Warn of litgpt without its counts: Lightning takes the tasks as its ranks by them."""
    counts = {"--devices": spec.resources.tasks_per_node, "--num_nodes": spec.resources.nodes}
    given = {word.partition("=")[0] for word in spec.command}
    missing = [f"{name} {count}" for name, count in counts.items() if count > 1]
    if "--config" in given or all(each.split()[0] in given for each in missing):
        return
    log.warning(
        f"litgpt without {' '.join(missing)}: each of the {spec.world_size} tasks trains the whole "
        "by itself. With it the tasks are its ranks [CD1226]"
    )


def _check_own_program(folder: Path, program: str, *, may_be_on_path: bool) -> None:
    """Refuse a program that is a file of this folder and cannot be started as it is typed.

    may_be_on_path: modules may bring a program of that name.
    """
    typed = shlex.quote(program)
    path, is_script = folder / program, PurePath(program).suffix in _INTERPRETERS
    if "/" in program and path.is_dir():
        raise RequestError(
            f"COMMAND: {typed} is a folder, which cannot be run. Name a program. [CD0306]"
        )
    if not path.is_file() or not _is_below(folder, program):
        return
    by = f"{_INTERPRETERS.get(path.suffix, 'INTERPRETER')} {typed}"
    why = "" if os.access(path, os.X_OK) else "it has no execute permission"
    if not why and is_script and _lacks_interpreter(path):
        why = "it names no interpreter in its first line (#!…)"
    if "/" in program and why:
        raise RequestError(
            f"COMMAND: {typed} cannot be run by itself: {why}. Type it as: {by}, or mend "
            "that. [CD0306]"
        )
    if "/" in program or shutil.which(program) or (may_be_on_path and not is_script):
        return
    ways = [by] if is_script or why else []
    ways += [] if why else [f"./{typed}"]
    raise RequestError(
        f"COMMAND: {typed} is a file in {folder}, and no program on the PATH, where the tasks "
        f"look for it. Type it as: {', or '.join(ways)}. [CD0306]"
    )


def _is_below(folder: Path, name: str) -> bool:
    """Return whether a name is meant from the folder, and leads from there through no link."""
    place = Path(os.path.realpath(folder), name)
    return not name.startswith("/") and os.path.realpath(place) == os.path.abspath(place)


def _lacks_interpreter(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(2) != b"#!"
    except OSError:
        return False


def check_pythons(spec: JobSpec, *, imports: bool = False) -> None:
    """Refuse an interpreter that cannot run, --python or --controller-python, as its file shows.

    One that is not on this machine may be on the nodes, and is a warning, unless its place is in
    this folder. imports: start those of the tasks, and refuse one that cannot import torch.
    """
    given = {"--python": spec.python, "--controller-python": spec.controller_python}
    if spec.container_image or spec.wrapper:
        given.pop("--python")  # the image's
    for option, python in given.items():
        if python != sys.executable:
            _check_interpreter(option, python, spec)
    if spec.export == "NONE":
        _try_without_environment(spec.controller_python)
    if not imports:
        return
    if "--python" not in given:
        log.warning(
            "--check-python: the tasks' Python is their image's, which is not started here [CD0310]"
        )
        return
    from clusterddp.request import nested_launcher

    _try_imports("--python", spec.python, spec.program.packages, spec)
    program, _ = nested_launcher.started(spec.command)
    if nested_launcher.is_python(program):
        _try_imports("COMMAND", program, "torch", spec)


def check_notified(spec: JobSpec) -> None:
    """Warn of a program of --notify that is not here; it starts in the current folder."""
    if not spec.notify:
        return
    if shutil.which(spec.notify[0], path=dict(spec.environment).get("PATH")) is None:
        typed = shlex.quote(spec.notify[0])
        where = f"in {Path.cwd()}, where it starts" if "/" in typed else "on the PATH"
        log.warning(
            f"--notify {typed}: there is no such program {where}, on this machine: the nodes need "
            "it, or nobody is told [CD1108]"
        )


def _check_interpreter(option: str, python: str, spec: JobSpec) -> None:
    typed, here = shlex.quote(python), os.path.exists(python)  # noqa: PTH110 -- as above
    if "/" not in python:
        here = shutil.which(python) is not None
        brought = option == "--python" and (spec.modules or spec.setup)
        if not here and not brought:
            log.warning(
                f"{option} {typed} is not on the PATH of this machine: the nodes need it [CD0317]"
            )
        return
    if here and (Path(python).is_dir() or not os.access(python, os.X_OK)):
        what = "is a folder" if Path(python).is_dir() else "has no execute permission"
        raise OptionError(option, f" {typed} cannot run: it {what}. Name an interpreter. [CD0310]")
    if not here and Path(python).is_relative_to(Path.cwd()) and os.path.realpath(python) == python:
        raise OptionError(
            option, f" {typed} cannot run: there is no such file. Name one that is. [CD0310]"
        )
    if not here:
        log.warning(f"{option} {typed} is not on this machine: the nodes need it [CD0317]")


def _try_without_environment(python: str) -> None:
    """Refuse an interpreter of the batch script that starts only with variables of this shell.

    It runs ahead of the modules and the set-up lines.
    """
    import subprocess

    try:
        answer = subprocess.run(
            [python, "-c", ""], env={}, stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
    except OSError:
        return  # it may be on the nodes
    if answer.returncode:
        last = answer.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise OptionError(
            "--controller-python",
            f" {shlex.quote(python)} does not start without your shell's variables, which "
            f"--export NONE leaves out: {last}. Name one that does, of Python 3.10 or later, such "
            "as /usr/bin/python3. [CD0310]",
        )


def _try_imports(option: str, python: str, packages: str, spec: JobSpec) -> None:
    """Start an interpreter; refuse one that does not run, or lacks a package.

    Refuse too one that is to run our own task and is too old for it.
    """
    import subprocess

    code = f"{_OLDEST if option == '--python' else ''}import {packages}"
    asked = "--check-python: " + (python if option == "COMMAND" else f"{option} {python}")
    try:
        answer = subprocess.run(
            [python, "-c", code],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_IMPORT_SECONDS,
            check=False,
        )
    except OSError as error:
        raise RequestError(f"{asked} cannot run: {error.strerror}. [CD0310]") from None
    except subprocess.TimeoutExpired:
        log.warning(
            f"{asked} had not imported its packages within {setting(_IMPORT_SECONDS)} [CD0310]"
        )
        return
    if answer.returncode == 0:
        return
    last = (answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"])[-1]
    if spec.modules or spec.setup:
        log.warning(
            f"{asked} fails here: {last}. The job's modules and set-up lines may mend that [CD0310]"
        )
        return
    raise RequestError(
        f"{asked} fails: {last}. Activate the environment that has it, name its interpreter, or "
        "install it there. [CD0310]"
    )


def check_container(spec: JobSpec) -> None:
    """Warn of an image or a mount that is not here: nodes can have what this machine has not.

    An image that is a name in a registry is left to the nodes.
    """
    from clusterddp.processes.container import Mount, is_file

    sources = [("the image", spec.container_image)] if is_file(spec.container_image) else []
    sources += [("the mount", Mount.parse(text).source) for text in spec.container_mounts]
    for what, path in sources:
        if not os.path.exists(path):  # noqa: PTH110 -- which raises for a name that is too long
            log.warning(
                f"{what} {shlex.quote(path)} is not on this machine: the nodes need it [CD0317]"
            )
