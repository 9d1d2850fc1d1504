"""Containers around tasks: the words with which each runtime starts one, and what it is given.

Pure: words and variables in, words and variables out; `worker.contain` runs them. Sources: the
help texts of apptainer 1.4 and podman 4.3, and pyxis' README (NVIDIA/pyxis, "Usage").
"""

import os
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from clusterddp.errors import OptionError, TrainingError

AUTO = "auto"
PYXIS, APPTAINER, PODMAN = RUNTIMES = ("pyxis", "apptainer", "podman")
"""Runtimes, in the order in which `auto` takes them."""
LABEL = "clusterddp"
"""Label of podman's containers that are ours."""

_PROGRAMS = {APPTAINER: ("apptainer", "singularity"), PODMAN: ("podman",)}
_FILES = (".sif", ".simg", ".sqsh", ".img")

# Of the host's own Python, libraries and tools: kept out, and said.
_SAID = re.compile(
    r"PYTHON(PATH|HOME|STARTUP|USERBASE|PYCACHEPREFIX|EXECUTABLE|PLATLIBDIR)|LD_(LIBRARY_PATH|PRELOAD|AUDIT)"
    r"|VIRTUAL_ENV|(CONDA|MAMBA|PYENV|UV)_\w+|CUDA_(HOME|PATH|ROOT)"
    r"|(SSL_CERT|REQUESTS_CA|CURL_CA)_(FILE|DIR|BUNDLE)"
)
# Of the host's shell and session: a container has, or lacks, its own.
_SILENT = re.compile(
    r"PATH|HOME|PWD|OLDPWD|SHELL|SHLVL|_|HOSTNAME|TMPDIR|TMP|TEMP|BASH_ENV|ENV|MAIL|PS1"
    r"|PROMPT_COMMAND|LS_COLORS|MANPATH|INFOPATH|C?_?INCLUDE_PATH|LIBRARY_PATH|PKG_CONFIG_PATH"
    r"|(XDG|DBUS|SSH|SUDO|LMOD|_LMOD|__LMOD|MODULES?|APPTAINER|SINGULARITY|ENROOT|CONTAINERS?)_\w+"
    r"|(APPTAINER|SINGULARITY)ENV_\w+|DISPLAY|MODULEPATH|MODULESHOME|LOADEDMODULES|_LMFILES_"
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

MAIN = """\
trap : HUP INT TERM USR1 USR2
"$@" 3<&- 4>&- &
task=$!
(trap '' HUP INT TERM USR1 USR2; read -r _ <&3; kill -KILL "$task") >/dev/null 2>&1 4>&- &
while wait "$task"; code=$?; kill -0 "$task" 2>/dev/null; do :; done
echo "$code" >&4
exit "$code\""""
"""First process in a container, for sh: starts the task, and kills it when descriptor 3 is closed.

Its other end is open in the task's parent on the host alone, so a task never outlives that one.
Signals reach the task by itself. A wait that a signal ended is taken up again. The exit code is
written to descriptor 4: podman's own is 0 where it is told to end before the container has begun.
"""
_PASSING_ON = 'for name in HUP INT TERM USR1 USR2; do trap "kill -$name -1" "$name"; done'
"""First line of `MAIN` where signals reach podman alone, which hands them to that process."""


@dataclass(frozen=True)
class Mount:
    """A folder or file of the host that a container sees."""

    source: str
    """Absolute path on the host."""
    target: str
    """Absolute path in the container."""
    read_only: bool = False

    @classmethod
    def parse(cls, text: str) -> "Mount":
        """Read `SRC[:DST[:ro]]`; raises OptionError for another form."""
        source, *more = text.split(":")
        target, *mode = more or [source]
        # A relative source, and ~, are meant from where they are typed.
        source = os.path.abspath(Path(source).expanduser()) if source else ""
        target = target if more else source
        if not source or not target.startswith("/") or mode not in ([], ["ro"], ["rw"]):
            raise OptionError(
                "--container-mount",
                f": {text!r} is no mount SRC[:DST[:ro]], such as /scratch, /data:/data:ro; DST is "
                "an absolute path. A path with ':' cannot be mounted: name a link to it.",
            )
        return cls(source, target, mode == ["ro"])

    def __str__(self) -> str:
        """Return the form that `parse` reads."""
        return f"{self.source}:{self.target}{':ro' if self.read_only else ''}"

    def check(self, option: str = "--container-mount") -> None:
        """Raise OptionError for a path that no runtime can carry."""
        for path in (self.source, self.target):
            if re.search(r'[:\\"\x00-\x1f\x7f]', path):
                raise OptionError(
                    option,
                    f": {path!r} cannot be mounted in a container, for it holds a colon, a "
                    "backslash, a double quote or a control character. Use another path.",
                )


@dataclass(frozen=True)
class Container:
    """The image of a task's container, and what is seen and used in it."""

    image: str
    mounts: tuple[Mount, ...] = ()
    """Later ones replace those before them that have the same target."""
    workdir: str = ""
    gpus: bool = False

    def for_run(self, run_dir: str, folder: str = "") -> "Container":
        """Add what every task of a run sees: the run's directory and its code.

        folder: the one that holds the user's code, and in which the task starts.
        """
        mounts = [Mount(folder or run_dir, folder or run_dir), Mount(run_dir, run_dir)]
        code = f"{run_dir}/code"
        if Path(code).is_dir():
            mounts.append(Mount(code, code, read_only=True))
        workdir = self.workdir or folder or run_dir
        return replace(self, mounts=(*mounts, *self.mounts), workdir=workdir)

    @property
    def bound(self) -> list[Mount]:
        """Return the mounts, outer ones first, one for each target."""
        by_target = {mount.target.rstrip("/") or "/": mount for mount in self.mounts}
        return [by_target[target] for target in sorted(by_target)]


def is_file(image: str) -> bool:
    """Return whether an image is a file or folder, rather than a name in a registry or storage."""
    return image.startswith(("/", "./", "../", "~")) or image.endswith(_FILES)


def program(runtime: str, path: str | None) -> str | None:
    """Find the program of a runtime on a PATH."""
    found = (shutil.which(name, path=path) for name in _PROGRAMS[runtime])
    return next(filter(None, found), None)


def choose(runtime: str, image: str, path: str | None, srun_help: str, node: str) -> str:
    """Choose the runtime: the one asked for, or for `auto` the first that is there for the image.

    srun_help: what `srun --help` prints, in which pyxis lists its options. Raises TrainingError
    where none is there.
    """
    has = {
        PYXIS: "--container-image" in srun_help,
        APPTAINER: program(APPTAINER, path) is not None,
        # Files are apptainer's and pyxis'; a folder is a root file system to podman, too.
        PODMAN: program(PODMAN, path) is not None and not image.endswith(_FILES),
    }
    wanted = RUNTIMES if runtime == AUTO else (runtime,)
    if image.endswith((".sif", ".simg")) and runtime == AUTO:
        wanted = (APPTAINER,)
    for name in wanted:
        if has[name]:
            return name
    raise none_there(wanted, image, node)


def none_there(wanted: Sequence[str], image: str, node: str) -> TrainingError:
    """Return the error of a node that has none of the runtimes that are wanted."""
    return TrainingError(
        f"{node} has no {' and no '.join(wanted)} to run the image {image}: "
        f"{_missing(wanted)}. Load its module with --module, ask for other nodes, or choose "
        "another --container-runtime."
    )


def _missing(runtimes: Sequence[str]) -> str:
    places = {
        PYXIS: "srun knows no --container-image",
        APPTAINER: "neither apptainer nor singularity is on PATH",
        PODMAN: "no podman that takes this image is on PATH",
    }
    return ", ".join(places[name] for name in runtimes)


def passed_on(environ: Mapping[str, str], wanted: Collection[str]) -> dict[str, str]:
    """Return the variables for the container: all but those of the host's own software.

    wanted: names that a person has asked for, which are among them in any case.
    """
    return {
        name: value
        for name, value in environ.items()
        if name in wanted
        or (_NAME.fullmatch(name) and not _SAID.fullmatch(name) and not _SILENT.fullmatch(name))
    }


def kept_out(environ: Mapping[str, str], wanted: Collection[str]) -> list[str]:
    """Return the variables that a person may miss in the container."""
    return sorted(name for name in environ if _SAID.fullmatch(name) and name not in wanted)


def words(
    runtime: str,
    box: Container,
    task: Sequence[str],
    environ: Mapping[str, str],
    *,
    program: str,
    name: str,
    uid: int,
    wanted: Collection[str] = (),
    lifeline: bool = True,
    pass_on: bool = False,
) -> tuple[list[str], dict[str, str]]:
    """Return the command that runs a task in a container, and the variables that it needs itself.

    program: the runtime's, on this host.
    name: of podman's container; one that a killed start has left under it is replaced.
    uid: the user's.
    wanted: as of `passed_on`.
    lifeline: whether descriptors 3 and 4 are those of `MAIN`.
    pass_on: whether signals reach podman alone, as without Slurm.
    """
    inner = passed_on(environ, wanted)
    first = f"{_PASSING_ON}\n{MAIN.partition(chr(10))[2]}" if pass_on else MAIN
    main = ["sh", "-c", first if lifeline else 'exec "$@"', "sh", *task]
    if runtime == APPTAINER:
        return _apptainer(program, box, main), _for_apptainer(program, environ, inner)
    start = _podman(program, box, inner, name, uid)
    if lifeline:
        start.append("--preserve-fds=2")
    # A folder is a root file system, below a layer of the container's own.
    image = ["--rootfs", f"{box.image}:O"] if is_file(box.image) else [box.image]
    return [*start, *image, *main], dict(environ)


def _apptainer(program: str, box: Container, main: Sequence[str]) -> list[str]:
    gpus = []
    if box.gpus:
        is_amd = Path("/dev/kfd").exists() and not Path("/dev/nvidiactl").exists()
        gpus = ["--rocm" if is_amd else "--nv"]
    return [
        program,
        "exec",
        "--cleanenv",  # what is passed on comes by APPTAINERENV_*
        "--no-eval",  # and is no shell's code
        "--no-mount=home,cwd",  # ~/.local holds packages of another Python
        f"--pwd={box.workdir}",
        *gpus,
        *(word for mount in box.bound for word in _apptainer_mount(mount)),
        box.image,
        *main,
    ]


def _apptainer_mount(mount: Mount) -> list[str]:
    if "," not in f"{mount.source}{mount.target}":
        return ["--bind", f"{mount.source}:{mount.target}:{'ro' if mount.read_only else 'rw'}"]
    form = f'type=bind,"source={mount.source}","destination={mount.target}"'
    return ["--mount", f"{form},ro" if mount.read_only else form]


def _for_apptainer(
    program: str, environ: Mapping[str, str], inner: Mapping[str, str]
) -> dict[str, str]:
    prefix = "SINGULARITYENV_" if Path(program).name == "singularity" else "APPTAINERENV_"
    return {**environ, **{f"{prefix}{name}": value for name, value in inner.items()}}


def _podman(
    program: str, box: Container, inner: Mapping[str, str], name: str, uid: int
) -> list[str]:
    return [
        program,
        "run",
        "--rm",
        "--replace",
        f"--name={name}",
        f"--label={LABEL}",
        "--network=host",
        "--ipc=host",  # the host's /dev/shm; the usual one has 64 MB
        "--cgroups=disabled",  # it stays in the job's: its limits hold, and Slurm can end it
        "--ulimit=host",
        "--log-driver=none",
        "--security-opt=label=disable",
        "--entrypoint=",
        # Files belong to the user, whatever user the image names.
        "--userns=keep-id" if uid else "--user=0:0",
        f"--workdir={box.workdir}",
        *(["--device=nvidia.com/gpu=all"] if box.gpus else []),
        *(f"--volume={mount}" for mount in box.bound),
        *(f"--env={variable}" for variable in inner),
    ]


def pyxis_arguments(box: Container) -> list[str]:
    """Return the arguments of srun by which pyxis starts the tasks in containers.

    Raises OptionError for a path that --container-mounts cannot carry.
    """
    for mount in box.bound:
        if re.search(r"[,\s]", f"{mount.source}{mount.target}"):
            raise OptionError(
                "--container-mount",
                f" {mount}: pyxis cannot carry a path with a comma or a blank. Use another path, "
                "or another --container-runtime.",
            )
    mounts = ",".join(map(str, box.bound))
    return [
        f"--container-image={box.image}",
        f"--container-mounts={mounts}",
        f"--container-workdir={box.workdir}",
        "--no-container-mount-home",
        "--no-container-entrypoint",
    ]


def removal(program: str, name: str) -> list[str]:
    """Return the command that removes what is left of podman's container of this name."""
    return [program, "rm", "--force", "--ignore", "--time=0", name]


def without_variables(names: Sequence[str]) -> list[str]:
    """Return the words before a task, in its container, that take variables of the host away."""
    return ["env", *(f"-u{name}" for name in names)] if names else []
