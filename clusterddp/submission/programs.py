"""Checks before submission that the tasks' programs can start: COMMAND and interpreters.

Nothing is run except, with `--check-python`, the interpreters. A program that may exist only on the
nodes gives a warning.
"""

import itertools
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path, PurePath
from typing import NoReturn

from clusterddp import log
from clusterddp.errors import OptionError, RequestError, coded
from clusterddp.formatting import in_prose, setting
from clusterddp.launchers import SHIPPED
from clusterddp.request.spec import JobSpec

_BRING_FILES = ("bb", "begin", "chdir", "container")
"""Prefixes of sbatch directives that can give the job other files than exist here now."""
_INTERPRETERS = {".py": "python", ".sh": "bash"}
"""Interpreters of scripts by file extension."""
_SHELLS = ("bash", "sh")
_SHELL_SYNTAX = frozenset("&|;<>$()`")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_FROM_ITS_FOLDER = "Submit from the directory that it is relative to"
_OLDEST = """\
import sys
if sys.version_info < (3, 10):
    sys.exit("it is Python %d.%d; the tasks need 3.10 or later" % sys.version_info[:2])
"""
_IMPORT_SECONDS = 60.0
"""Timeout of importing torch, which is slow on a cold shared file system."""


def check_command(
    spec: JobSpec, is_own: Callable[[], bool], folder: Path | None, *, force: bool
) -> None:
    """Raise RequestError if the tasks cannot start the COMMAND's program or script.

    Refused: a missing file, a file here that is named as if it were on the PATH or is not
    executable, a directory, and an interpreter without a script. Only a warning: an absolute path,
    or one through a link, may exist on the nodes. Nothing is refused if setup lines, a container,
    an earlier job, a site's own template or another directory may provide the file.

    is_own: returns whether a shipped template gives the script; a site's own can create files.
    folder: directory in which it starts, by default the current one.
    force: warn, rather than refuse, if a program is not on this machine's PATH.
    """
    folder = folder or Path.cwd()
    _warn_of_one_device(spec, folder)
    if not spec.wrapper:
        _refuse_no_program(spec.command, folder)
    if spec.container_image:
        check_container(spec)
        return
    is_open = spec.setup or spec.wrapper or spec.srun_args or spec.resources.dependency
    if not spec.command or is_open or spec.template not in SHIPPED:
        return
    if any(name.startswith(_BRING_FILES) for name, _ in spec.sbatch):
        return
    from clusterddp.request import nested_launcher  # not needed for a training

    program, file = nested_launcher.started(spec.command)
    is_on_path = "/" not in program and shutil.which(program) is not None
    is_script = PurePath(program).suffix in _INTERPRETERS
    is_file = "/" in program or (is_script and not is_on_path and not spec.modules)
    names = [name for name in (program if is_file else "", file) if name]
    # Path.exists raises OSError if a name is too long.
    missing = [name for name in names if not os.path.exists(folder / name)]  # noqa: PTH110
    relative = [in_prose(name) for name in missing if _is_below(folder, name)]
    is_ours = is_own()
    shown = in_prose(program)
    if is_ours:
        if relative:
            _refuse_missing(relative[0], folder, missing)
        _check_own(spec, folder, program, file, is_there=not missing)
    if program and not is_file and not spec.modules and not is_on_path:
        if is_ours and not force and not _has_other_path(spec):
            raise RequestError(
                f"COMMAND: there is no program {shown} on the PATH. Correct its name or "
                "load it with --module or --setup; if the nodes have it, add --force. [CD0306]"
            )
        missing.append(program)
    for name in missing:
        log.warning(
            f"{in_prose(name)} of COMMAND is not on this machine. Check that it exists on the "
            "nodes. [CD0317]"
        )


def _refuse_no_program(command: Sequence[str], folder: Path) -> None:
    """Raise RequestError for a COMMAND that starts with a quoted line, an option or a variable."""
    word = next(iter(command), "")
    typed = shlex.quote(word)
    variables = [*itertools.takewhile(_ASSIGNMENT.match, command)]
    # Path.exists raises OSError if a name is too long.
    if len(command) == 1 and len(word.split()) > 1 and not os.path.exists(folder / word):  # noqa: PTH110
        problem = f": the quotes make {typed} one word, and there is no such program. Remove the "
        problem += f"quotes: -- {word}"
        if variables or _SHELL_SYNTAX.intersection(word):
            problem = f": {typed} is shell syntax, not a program. Use: -- bash -c {typed}"
    elif word.startswith("-"):
        problem = f" starts with the option {word}. Put options before '--': submit [OPTIONS] -- "
        problem += "COMMAND."
    elif variables:
        env = " ".join(f"--env {shlex.quote(each)}" for each in variables)
        program = shlex.join(command[len(variables) :]) or "python train.py"
        problem = f": {typed} is a variable, not a program. Use: {env} -- {program}"
    else:
        return
    raise RequestError(f"COMMAND{problem} [CD0306]")


def _refuse_missing(shown: str, folder: Path, missing: Sequence[str]) -> NoReturn:
    is_newer = folder != Path.cwd() and any(os.path.exists(name) for name in missing)  # noqa: PTH110
    raise RequestError(
        f"COMMAND: there is no {shown} in {folder}, where the tasks start it. "
        + ("Use the current files with --refresh-code" if is_newer else _FROM_ITS_FOLDER)
        + ", or name an existing file.",
        code="CD0306",
    )


def _check_own(spec: JobSpec, folder: Path, program: str, file: str, *, is_there: bool) -> None:
    """Check the files here: a shipped template does not bring others."""
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
            f"COMMAND: {in_prose(program)} has nothing to run, because a task's standard input is "
            f"empty. Use: {typed} FILE [CD0306]"
        )


def _has_other_path(spec: JobSpec) -> bool:
    """Return whether the tasks may have another PATH than this process."""
    from clusterddp.request import nested_launcher

    before = spec.command[: nested_launcher.program_index(spec.command)]
    brings = any(PurePath(word).name in nested_launcher.BRING_PROGRAMS for word in before)
    sets = any(word.startswith("PATH=") for word in before) or "PATH" in dict(spec.environment)
    return brings or sets or spec.export == "NONE" or "get-user-env" in dict(spec.sbatch)


def _warn_of_one_device(spec: JobSpec, folder: Path) -> None:
    """Warn of a single-device training script that several tasks start."""
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
    """Warn of litgpt without device and node counts, from which Lightning derives its ranks."""
    counts = {"--devices": spec.resources.tasks_per_node, "--num_nodes": spec.resources.nodes}
    given = {word.partition("=")[0] for word in spec.command}
    missing = [f"{name} {count}" for name, count in counts.items() if count > 1]
    if "--config" in given or all(each.split()[0] in given for each in missing):
        return
    log.warning(
        f"litgpt without {' '.join(missing)}: each of the {spec.world_size} tasks trains a "
        "separate copy. Add these options to make the tasks its ranks. [CD1226]"
    )


def _check_own_program(folder: Path, program: str, *, may_be_on_path: bool) -> None:
    """Raise RequestError for a program that is a file here but cannot be started by that name.

    may_be_on_path: environment modules may provide a program of that name.
    """
    typed, shown = shlex.quote(program), in_prose(program)
    path, is_script = folder / program, PurePath(program).suffix in _INTERPRETERS
    if "/" in program and path.is_dir():
        raise RequestError(
            f"COMMAND: {shown} is a directory and cannot be run. Name a program. [CD0306]"
        )
    if not path.is_file() or not _is_below(folder, program):
        return
    by = f"{_INTERPRETERS.get(path.suffix, 'INTERPRETER')} {typed}"
    why = "" if os.access(path, os.X_OK) else "it has no execute permission"
    if not why and is_script and _lacks_interpreter(path):
        why = "its first line names no interpreter (#!…)"
    if "/" in program and why:
        raise RequestError(
            f"COMMAND: {shown} cannot be run directly: {why}. Use: {by}, or fix the file. [CD0306]"
        )
    if "/" in program or shutil.which(program) or (may_be_on_path and not is_script):
        return
    ways = [by] if is_script or why else []
    ways += [] if why else [f"./{typed}"]
    raise RequestError(
        f"COMMAND: {shown} is a file in {folder}, not a program on the PATH. "
        f"Use: {', or '.join(ways)}. [CD0306]"
    )


def _is_below(folder: Path, name: str) -> bool:
    """Return whether a name is relative to the directory and passes through no link."""
    place = Path(os.path.realpath(folder), name)
    return not name.startswith("/") and os.path.realpath(place) == os.path.abspath(place)


def _lacks_interpreter(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(2) != b"#!"
    except OSError:
        return False


def check_pythons(spec: JobSpec, *, imports: bool = False) -> None:
    """Raise OptionError if the file of --python or --controller-python cannot be run.

    An interpreter that is missing here may exist on the nodes: only a warning, unless its path is
    in this directory.
    imports: start the tasks' interpreters and refuse one that cannot import torch.
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
            "--check-python: not checked, because the tasks use their image's Python. [CD0310]"
        )
        return
    from clusterddp.request import nested_launcher

    _try_imports("--python", spec.python, spec.program.packages, spec)
    program, _ = nested_launcher.started(spec.command)
    if nested_launcher.is_python(program):
        _try_imports("COMMAND", program, "torch", spec)


def check_notified(spec: JobSpec) -> None:
    """Warn if the program of --notify, which starts in the current directory, is not found."""
    if not spec.notify:
        return
    if shutil.which(spec.notify[0], path=dict(spec.environment).get("PATH")) is None:
        typed = shlex.quote(spec.notify[0])
        where = f"in {Path.cwd()}" if "/" in typed else "on the PATH"
        log.warning(
            f"--notify {typed}: no such program {where} on this machine. Without it on the nodes, "
            "no notification is sent. [CD1108]"
        )


def _check_interpreter(option: str, python: str, spec: JobSpec) -> None:
    typed, here = shlex.quote(python), os.path.exists(python)  # noqa: PTH110 -- as above
    if "/" not in python:
        here = shutil.which(python) is not None
        brought = option == "--python" and (spec.modules or spec.setup)
        if not here and not brought:
            log.warning(
                f"{option} {typed} is not on the PATH here. Check that the nodes have it. [CD0317]"
            )
        return
    if here and (Path(python).is_dir() or not os.access(python, os.X_OK)):
        what = "is a directory" if Path(python).is_dir() else "has no execute permission"
        raise OptionError(option, f" {typed} cannot run: it {what}. Name an interpreter. [CD0310]")
    if not here and Path(python).is_relative_to(Path.cwd()) and os.path.realpath(python) == python:
        raise OptionError(option, f": there is no file {python!r}. Name an interpreter. [CD0310]")
    if not here:
        log.warning(
            f"{option} {typed} is not on this machine. Check that it exists on the nodes. [CD0317]"
        )


def _try_without_environment(python: str) -> None:
    """Raise OptionError if the batch script's interpreter needs variables of this shell.

    It runs before the environment modules and the setup lines.
    """
    import subprocess

    try:
        answer = subprocess.run(
            [python, "-c", ""], env={}, stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
    except OSError:
        return  # the nodes may have it
    if answer.returncode:
        last = answer.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise OptionError(
            "--controller-python",
            f" {shlex.quote(python)} does not start without your shell's variables, which "
            f"--export NONE removes: {last}. Use another Python (3.10 or later), for example "
            "/usr/bin/python3. [CD0310]",
        )


def _try_imports(option: str, python: str, packages: str, spec: JobSpec) -> None:
    """Start an interpreter; raise RequestError if it fails or lacks a package.

    Also raise it if the interpreter is to run our own task and is too old.
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
            f"{asked} did not import its packages within {setting(_IMPORT_SECONDS)} [CD0310]"
        )
        return
    if answer.returncode == 0:
        return
    last = (answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"])[-1]
    if spec.modules or spec.setup:
        log.warning(
            f"{asked} fails here: {last}. The job's modules and setup lines may fix it. [CD0310]"
        )
        return
    raise RequestError(
        f"{asked} fails: {last}. Activate the environment that has the package, name its "
        "interpreter, or install the package. [CD0310]"
    )


def check_container(spec: JobSpec) -> None:
    """Warn of an image or a mount that does not exist here; the nodes may have it.

    The name of an image in a registry is not checked.
    """
    from clusterddp.processes.container import Mount, is_file

    sources = [("the image", spec.container_image)] if is_file(spec.container_image) else []
    sources += [("the mount", Mount.parse(text).source) for text in spec.container_mounts]
    for what, path in sources:
        if not os.path.exists(path):  # noqa: PTH110 -- Path.exists raises if a name is too long
            log.warning(
                f"{what} {in_prose(path)} is not on this machine. Check that it exists on the "
                "nodes. [CD0317]"
            )
