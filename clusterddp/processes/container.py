"""Containers around tasks: the words with which each runtime starts one, and what it is given.

Pure: words and variables in, words and variables out; `worker.container_parent` runs them.
Sources: the help texts of apptainer 1.4 and podman 4.3. NVIDIA's pyxis starts containers by itself,
as srun's plug-in: the script's template has its words.
"""

import contextlib
import dataclasses
import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterddp.errors import OptionError
from clusterddp.processes.processors import AMD_DEVICE, has_nvidia_driver

AUTO, PYXIS = "auto", "pyxis"
APPTAINER, PODMAN = RUNTIMES = ("apptainer", "podman")
"""Runtimes that a parent on the host starts, in the order in which `auto` takes them."""
PROGRAMS = {APPTAINER: ("apptainer", "singularity"), PODMAN: ("podman",)}

_SINGULARITYS = (".sif", ".simg")
_FILES = (*_SINGULARITYS, ".sqsh", ".img")

# Variables of the host's Python, libraries and tools: kept out, and named in the log.
_NAMED = re.compile(
    r"PYTHON(PATH|HOME|STARTUP|USERBASE|PYCACHEPREFIX|EXECUTABLE|PLATLIBDIR)|LD_(LIBRARY_PATH|PRELOAD|AUDIT)"
    r"|VIRTUAL_ENV|(CONDA|MAMBA|PYENV|UV)_\w+|CUDA_(HOME|PATH|ROOT)"
    r"|(SSL_CERT|REQUESTS_CA|CURL_CA)_(FILE|DIR|BUNDLE)"
)
# Variables of the host's shell and session: a container has, or lacks, its own.
_SILENT = re.compile(
    r"PATH|HOME|PWD|OLDPWD|SHELL|SHLVL|_|HOSTNAME|TMPDIR|TMP|TEMP|BASH_ENV|ENV|MAIL|PS1"
    r"|PROMPT_COMMAND|LS_COLORS|MANPATH|INFOPATH|C?_?INCLUDE_PATH|LIBRARY_PATH|PKG_CONFIG_PATH"
    r"|(XDG|DBUS|SSH|SUDO|LMOD|_LMOD|__LMOD|MODULES?|APPTAINER|SINGULARITY|ENROOT|CONTAINERS?)_\w+"
    r"|(APPTAINER|SINGULARITY)ENV_\w+|DISPLAY|MODULEPATH|MODULESHOME|LOADEDMODULES|_LMFILES_"
)
_BREAKING = ("PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

MAIN = """\
trap : HUP INT TERM USR1 USR2 # the task is born with their usual actions
"$@" 3<&- 4>&- &
task=$!
trap '' HUP INT TERM USR1 USR2
(read -r _ <&3; kill -KILL "$task") >/dev/null 2>&1 4>&- &
wait "$task"; code=$?
exec 2>/dev/null; kill -KILL "$!" # bash has a word for it
echo "$code" >&4
exit "$code\""""
"""First program in a container, for sh: starts the task, and kills it when descriptor 3 is closed.

Its other end is open in the task's parent on the host alone, so a task never outlives that one.
Signals reach the task by themselves, and not this shell: in bash a wait that one has ended may lose
the exit code. That is written to descriptor 4: podman's own is 0 where it is told to end before
the container has begun.
"""
PASSING_ON = """\
for name in HUP INT TERM USR1 USR2; do trap "kill -$name -1" "$name"; done
sh -c "$0" sh "$@" &
while kill -0 "$!" 2>/dev/null; do wait "$!"; done"""
"""Program around `MAIN` where signals reach podman alone, which hands them to the first process."""


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
        source = from_here(source) if source else ""
        target = target if more else source
        if (
            not source
            or not target.strip("/")
            or target[0] != "/"
            or mode not in ([], ["ro"], ["rw"])
        ):
            raise OptionError(
                "--container-mount",
                f": {text!r} is no mount SRC[:DST[:ro]], such as /scratch, /data:/data:ro; DST is "
                "an absolute path below /. A path with ':' cannot be mounted: name a link to it.",
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
                    "backslash, a double quote or a control character. Use another path. [CD1003]",
                )


@dataclass(frozen=True)
class Container:
    """The container of each task: its image, and what is seen and used in it."""

    image: str
    runtime: str = AUTO
    python: str = "python3"
    """Interpreter that the task needs in it."""
    mounts: tuple[Mount, ...] = ()
    """Later ones replace those before them that have the same target."""
    workdir: str = ""
    own_code: bool = False
    """True where the folder in which the task's parent starts holds the user's code."""
    gpus: bool = False
    variables: tuple[str, ...] = ()
    """Names of variables that are passed on whatever they are."""
    ranks: int = 1
    """Ranks in it: more than one where the task is torchrun's agent."""

    def to_json(self, ranks: int = 1) -> str:
        """Return the fields that are not defaults, for `from_json`; with this number of ranks."""
        values = {**vars(self), "ranks": ranks}
        fields = {
            field.name: values[field.name]
            for field in dataclasses.fields(self)
            if values[field.name] != field.default
        }
        return json.dumps(fields, default=str)  # of a mount its own form

    @classmethod
    def from_json(cls, text: str) -> "Container":
        """Read what `to_json` has made."""
        fields = json.loads(text)
        mounts = tuple(map(Mount.parse, fields.pop("mounts", ())))
        return cls(mounts=mounts, **fields)

    def for_run(self, run_dir: str, folder: str) -> "Container":
        """Add what every task of a run sees: its directory, and where the code is, the folder."""
        here = folder if self.own_code else run_dir
        own = (Mount(here, here), Mount(run_dir, run_dir))
        return dataclasses.replace(self, mounts=(*own, *self.mounts), workdir=self.workdir or here)

    @property
    def kept_from_pyxis(self) -> list[str]:
        """Return the host's variables that would break an image's Python: pyxis passes on all."""
        return [name for name in _BREAKING if name not in self.variables]

    @property
    def bound(self) -> list[Mount]:
        """Return the mounts, outer ones first, one for each target."""
        by_target = {mount.target.rstrip("/") or "/": mount for mount in self.mounts}
        return [by_target[target] for target in sorted(by_target)]


def from_here(path: str) -> str:
    """Return an absolute path: a relative one, and ~, are meant from where they are typed."""
    with contextlib.suppress(RuntimeError):  # `~NAME` of nobody is a folder's name, as in bash
        path = str(Path(path).expanduser())
    return os.path.abspath(path)


def is_file(image: str) -> bool:
    """Return whether an image is a file or folder, rather than a name in a registry or storage."""
    return image.startswith(("/", "./", "../", "~")) or image.endswith(_FILES)


def runtimes(runtime: str, image: str) -> tuple[str, ...]:
    """Return the runtimes to look for on a node: the one asked for, or `auto`'s for this image."""
    if runtime != AUTO:
        return (runtime,)
    return (APPTAINER,) if image.endswith(_FILES) else RUNTIMES


def reads(runtime: str, image: str) -> bool:
    """Return whether a runtime, pyxis among them, can read an image of this name."""
    return not image.endswith({PODMAN: _FILES, PYXIS: _SINGULARITYS}.get(runtime, ("\0",)))


def pyxis_carries(path: str) -> bool:
    """Return whether pyxis can mount a path: it knows no quotes."""
    return not re.search(r"[,\s]", path)


def passed_on(environ: Mapping[str, str], wanted: Collection[str]) -> dict[str, str]:
    """Return the variables for the container: all but those of the host's own software.

    wanted: names that a person has asked for, which are among them in any case.
    """
    return {
        name: value
        for name, value in environ.items()
        if name in wanted
        or (_NAME.fullmatch(name) and not _NAMED.fullmatch(name) and not _SILENT.fullmatch(name))
    }


def kept_out(environ: Mapping[str, str], wanted: Collection[str]) -> list[str]:
    """Return the variables that a person may miss in the container."""
    return sorted(name for name in environ if _NAMED.fullmatch(name) and name not in wanted)


@dataclass(frozen=True)
class ContainerStart:
    """All that it takes to start a task's container on this node."""

    container: Container
    runtime: str
    program: str | None
    """The runtime's; None where this node has none."""
    name: str
    """Name of podman's container; one that a killed start has left under it is replaced."""
    label: str
    """Label of podman's containers that are ours, on this node."""
    node: str
    environ: Mapping[str, str]
    pass_on: bool = False
    """True where signals reach podman alone, as in a rehearsal."""
    as_root: bool = False

    def words(self, task: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """Return the command that runs a task, and the variables that it needs itself.

        Descriptors 3 and 4 are those of `MAIN`.
        """
        main = ["sh", "-c", MAIN, "sh", *task]
        if self.pass_on:
            main[2:4] = [PASSING_ON, MAIN]
        return self._words(main, self.name, ("--preserve-fds=2",))

    def probe(self, command: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """Return what runs a command in a second container, beside the task's own."""
        return self._words(["sh", "-c", 'exec "$@"', "sh", *command], f"{self.name}-probe")

    def _words(
        self, main: Sequence[str], name: str, of_podman: Sequence[str] = ()
    ) -> tuple[list[str], dict[str, str]]:
        inner = passed_on(self.environ, self.container.variables)
        if self.runtime == APPTAINER:
            is_older = str(self.program).endswith("singularity")
            ours = "SINGULARITYENV_" if is_older else "APPTAINERENV_"
            variables = {f"{ours}{variable}": value for variable, value in inner.items()}
            return [*self._apptainer(), *main], {**self.environ, **variables}
        own = (*self._podman(name), *(f"--env={variable}" for variable in inner), *of_podman)
        image = [self.container.image]
        if is_file(image[0]):  # a folder, below a layer of the container's own
            image = ["--rootfs", f"{image[0]}:O"]
        return [*own, *image, *main], dict(self.environ)

    def _apptainer(self) -> Iterator[str]:
        container = self.container
        yield from (
            *(self.program or self.runtime, "exec"),
            "--cleanenv",  # what is passed on comes by APPTAINERENV_*
            "--no-eval",  # and is no shell's code
            "--no-mount=home,cwd",  # ~/.local holds packages of another Python
            f"--pwd={container.workdir}",
        )
        if container.gpus:
            yield "--rocm" if AMD_DEVICE.exists() and not has_nvidia_driver() else "--nv"
        for mount in container.bound:
            if "," not in f"{mount.source}{mount.target}":
                mode = "ro" if mount.read_only else "rw"
                yield from ("--bind", f"{mount.source}:{mount.target}:{mode}")
            else:
                form = f'type=bind,"source={mount.source}","destination={mount.target}"'
                yield from ("--mount", f"{form},ro" if mount.read_only else form)
        yield container.image

    def _podman(self, name: str) -> Iterator[str]:
        yield from (
            *(self.program or self.runtime, "run", "--rm", "--replace"),
            f"--name={name}",
            f"--label={self.label}",
            "--network=host",
            "--ipc=host",  # the host's /dev/shm; the usual one has 64 MB
            "--cgroups=disabled",  # it stays in the job's: its limits hold, and Slurm can end it
            "--ulimit=host",
            "--log-driver=none",
            "--security-opt=label=disable",
            "--entrypoint=",
            # Files belong to the user, whatever user the image names.
            "--user=0:0" if self.as_root else "--userns=keep-id",
            f"--workdir={self.container.workdir}",
            *(["--device=nvidia.com/gpu=all"] if self.container.gpus else []),
            *(f"--volume={mount}" for mount in self.container.bound),
        )


def find_program(runtimes: Sequence[str], path: str | None) -> tuple[str, str | None]:
    """Return the first of the runtimes that is on a PATH, with its program; None without one."""
    for runtime in runtimes:
        for name in PROGRAMS[runtime]:
            if program := shutil.which(name, path=path):
                return runtime, program
    return runtimes[0], None


def removal(program: str, *names: str) -> list[str]:
    """Return the command that removes what is left of podman's containers of these names."""
    return [program, "rm", "--force", "--ignore", "--time=0", *names]


def listing(program: str, label: str) -> list[str]:
    """Return the command that lists podman's containers with a label, an id a line."""
    return [program, "ps", "--all", "--quiet", "--no-trunc", f"--filter=label={label}"]


def monitors(program: str, containers: Sequence[str]) -> list[str]:
    """Return the command that names the process above each of podman's containers: id, number.

    The number is 0 where the container has not begun.
    """
    return [program, "inspect", "--format={{.Id}} {{.State.ConmonPid}}", *containers]
