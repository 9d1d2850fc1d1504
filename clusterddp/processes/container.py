"""Containers around tasks: the command, variables and mounts for each runtime.

Pure: builds commands; `worker.container_parent` runs them. Sources: the help texts of apptainer 1.4
and podman 4.3. NVIDIA's pyxis is an srun plug-in that starts containers itself: its options are in
the script's template.
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
from clusterddp.processes.hardware import AMD_DEVICE, has_nvidia_driver

AUTO, PYXIS = "auto", "pyxis"
APPTAINER, PODMAN = RUNTIMES = ("apptainer", "podman")
"""Runtimes that a parent on the host starts, in the order that `auto` tries them."""
PROGRAMS = {APPTAINER: ("apptainer", "singularity"), PODMAN: ("podman",)}

_SINGULARITYS = (".sif", ".simg")
_FILES = (*_SINGULARITYS, ".sqsh", ".img")

# Variables of the host's Python, libraries and tools: not passed on, and listed in the log.
_NAMED = re.compile(
    r"PYTHON(PATH|HOME|STARTUP|USERBASE|PYCACHEPREFIX|EXECUTABLE|PLATLIBDIR)|LD_(LIBRARY_PATH|PRELOAD|AUDIT)"
    r"|VIRTUAL_ENV|(CONDA|MAMBA|PYENV|UV)_\w+|CUDA_(HOME|PATH|ROOT)"
    r"|(SSL_CERT|REQUESTS_CA|CURL_CA)_(FILE|DIR|BUNDLE)"
)
# Variables of the host's shell and session: not passed on; the container sets its own.
_SILENT = re.compile(
    r"PATH|HOME|PWD|OLDPWD|SHELL|SHLVL|_|HOSTNAME|TMPDIR|TMP|TEMP|BASH_ENV|ENV|MAIL|PS1"
    r"|PROMPT_COMMAND|LS_COLORS|MANPATH|INFOPATH|C?_?INCLUDE_PATH|LIBRARY_PATH|PKG_CONFIG_PATH"
    r"|(XDG|DBUS|SSH|SUDO|LMOD|_LMOD|__LMOD|MODULES?|APPTAINER|SINGULARITY|ENROOT|CONTAINERS?)_\w+"
    r"|(APPTAINER|SINGULARITY)ENV_\w+|DISPLAY|MODULEPATH|MODULESHOME|LOADEDMODULES|_LMFILES_"
)
_BREAKING = ("PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

MAIN = """\
trap : HUP INT TERM USR1 USR2 # the task starts with their default actions
"$@" 3<&- 4>&- &
task=$!
trap '' HUP INT TERM USR1 USR2
(read -r _ <&3; kill -KILL "$task") >/dev/null 2>&1 4>&- &
wait "$task"; code=$?
exec 2>/dev/null; kill -KILL "$!" # hides bash's "Killed" message
echo "$code" >&4
exit "$code\""""
"""First program in a container, for sh: starts the task, and kills it when descriptor 3 closes.

Only the task's parent on the host holds the other end, so a task never outlives its parent.
Signals reach the task directly. The shell ignores them, because bash may lose the exit code if a
signal interrupts `wait`. The exit code goes to descriptor 4: podman itself exits with 0 if it is
terminated before the container starts.
"""
FORWARDING = """\
for name in HUP INT TERM USR1 USR2; do trap "kill -$name -1" "$name"; done
sh -c "$0" sh "$@" &
while kill -0 "$!" 2>/dev/null; do wait "$!"; done"""
"""Wrapper of `MAIN` for signals that reach only podman, which sends them to the first process."""


@dataclass(frozen=True)
class Mount:
    """Directory or file of the host that is mounted in a container."""

    source: str
    """Absolute path on the host."""
    target: str
    """Absolute path in the container."""
    read_only: bool = False

    @classmethod
    def parse(cls, text: str) -> "Mount":
        """Parse `SRC[:DST[:ro]]`; raises OptionError for any other form."""
        source, *more = text.split(":")
        target, *mode = more or [source]
        source = absolute_path(source) if source else ""
        target = target if more else source
        if (
            not source
            or not target.strip("/")
            or target[0] != "/"
            or mode not in ([], ["ro"], ["rw"])
        ):
            raise OptionError(
                "--container-mount",
                f": {text!r} is not a mount. Write SRC[:DST[:ro]] with an absolute DST below /, "
                "such as /scratch or /data:/data:ro. If a path contains ':', mount a link to it.",
            )
        return cls(source, target, mode == ["ro"])

    def __str__(self) -> str:
        """Return the form that `parse` reads."""
        return f"{self.source}:{self.target}{':ro' if self.read_only else ''}"

    def check(self, option: str = "--container-mount") -> None:
        """Raise OptionError for a path that no runtime can mount."""
        for path in (self.source, self.target):
            if re.search(r'[:\\"\x00-\x1f\x7f]', path):
                raise OptionError(
                    option,
                    f": {path!r} cannot be mounted in a container, because it contains a colon, a "
                    "backslash, a double quote or a control character. Use another path. [CD1003]",
                )


@dataclass(frozen=True)
class Container:
    """Container of each task: image, mounts, variables and working directory."""

    image: str
    runtime: str = AUTO
    python: str = "python3"
    """Interpreter that the task uses in it."""
    mounts: tuple[Mount, ...] = ()
    """A later mount replaces an earlier one with the same target."""
    workdir: str = ""
    own_code: bool = False
    """True if the working directory of the task's parent holds the user's code."""
    gpus: bool = False
    variables: tuple[str, ...] = ()
    """Names of variables that are always passed on."""
    ranks: int = 1
    """Ranks in it: more than one if the task is torchrun's agent."""

    def to_json(self, ranks: int = 1) -> str:
        """Return the fields that differ from the defaults as JSON, with this number of ranks."""
        values = {**vars(self), "ranks": ranks}
        fields = {
            field.name: values[field.name]
            for field in dataclasses.fields(self)
            if values[field.name] != field.default
        }
        return json.dumps(fields, default=str)  # a Mount in the form that it parses

    @classmethod
    def from_json(cls, text: str) -> "Container":
        """Parse the output of `to_json`."""
        fields = json.loads(text)
        return cls(mounts=tuple(map(Mount.parse, fields.pop("mounts", ()))), **fields)

    def for_run(self, run_dir: str, folder: str) -> "Container":
        """Add the mounts of every task: the run directory, and `folder` if the code is there."""
        here = folder if self.own_code else run_dir
        own = (Mount(here, here), Mount(run_dir, run_dir))
        return dataclasses.replace(self, mounts=(*own, *self.mounts), workdir=self.workdir or here)

    @property
    def hidden_from_pyxis(self) -> list[str]:
        """Host's variables that would break an image's Python: pyxis passes on all."""
        return [name for name in _BREAKING if name not in self.variables]

    @property
    def bound(self) -> list[Mount]:
        """One mount per target, outer ones first."""
        by_target = {mount.target.rstrip("/") or "/": mount for mount in self.mounts}
        return [by_target[target] for target in sorted(by_target)]


def absolute_path(path: str) -> str:
    """Return an absolute path, resolved against the current directory and the user's home."""
    with contextlib.suppress(RuntimeError):  # `~NAME` of an unknown user is a name, as in bash
        path = str(Path(path).expanduser())
    return os.path.abspath(path)


def is_file(image: str) -> bool:
    """Return whether an image is a path rather than a name in a registry or local storage."""
    return image.startswith(("/", "./", "../", "~")) or image.endswith(_FILES)


def runtimes(runtime: str, image: str) -> tuple[str, ...]:
    """Return the runtimes to look for on a node: the requested one, or those that `auto` tries."""
    if runtime != AUTO:
        return (runtime,)
    return (APPTAINER,) if image.endswith(_FILES) else RUNTIMES


def can_read(runtime: str, image: str) -> bool:
    """Return whether a runtime (or pyxis) can read an image with this name."""
    return not image.endswith({PODMAN: _FILES, PYXIS: _SINGULARITYS}.get(runtime, ("\0",)))


def pyxis_can_mount(path: str) -> bool:
    """Return whether pyxis can mount a path: its option has no quoting."""
    return not re.search(r"[,\s]", path)


def forwarded(environ: Mapping[str, str], wanted: Collection[str]) -> dict[str, str]:
    """Return the variables to pass to the container, without settings of the host's software.

    wanted: names that the user requested; they are always passed on.
    """
    return {
        name: value
        for name, value in environ.items()
        if name in wanted
        or (_NAME.fullmatch(name) and not _NAMED.fullmatch(name) and not _SILENT.fullmatch(name))
    }


def withheld(environ: Mapping[str, str], wanted: Collection[str]) -> list[str]:
    """Return the names of withheld variables that the user may miss in the container."""
    return sorted(name for name in environ if _NAMED.fullmatch(name) and name not in wanted)


@dataclass(frozen=True)
class ContainerStart:
    """Parameters to start a task's container on this node."""

    container: Container
    runtime: str
    program: str | None
    """Program of the runtime; None if this node has none."""
    name: str
    """Name of podman's container. One of this name, left by a killed start, is replaced."""
    label: str
    """Label of clusterddp's podman containers on this node."""
    node: str
    environ: Mapping[str, str]
    signals_podman: bool = False
    """True if signals reach only podman, as in a rehearsal."""
    as_root: bool = False

    def command(self, task: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """Return the command that runs a task, and the command's own environment.

        `MAIN` expects descriptors 3 and 4 to be open.
        """
        main = ["sh", "-c", MAIN, "sh", *task]
        if self.signals_podman:
            main[2:4] = [FORWARDING, MAIN]
        return self._command(main, self.name, ("--preserve-fds=2",))

    def probe(self, command: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """Return the command (and environment) that runs `command` in a second container."""
        return self._command(["sh", "-c", 'exec "$@"', "sh", *command], f"{self.name}-probe")

    def _command(
        self, main: Sequence[str], name: str, of_podman: Sequence[str] = ()
    ) -> tuple[list[str], dict[str, str]]:
        inner = forwarded(self.environ, self.container.variables)
        if self.runtime == APPTAINER:
            is_older = str(self.program).endswith("singularity")
            ours = "SINGULARITYENV_" if is_older else "APPTAINERENV_"
            variables = {f"{ours}{variable}": value for variable, value in inner.items()}
            return [*self._apptainer(), *main], {**self.environ, **variables}
        own = (*self._podman(name), *(f"--env={variable}" for variable in inner), *of_podman)
        image = [self.container.image]
        if is_file(image[0]):  # a directory, under an overlay for the container's writes
            image = ["--rootfs", f"{image[0]}:O"]
        return [*own, *image, *main], dict(self.environ)

    def _apptainer(self) -> Iterator[str]:
        container = self.container
        yield from (
            *(self.program or self.runtime, "exec"),
            "--cleanenv",  # variables are passed on as APPTAINERENV_*
            "--no-eval",  # and are not evaluated as shell code
            "--no-mount=home,cwd",  # ~/.local holds packages for another Python
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
            "--ipc=host",  # the host's /dev/shm; podman's default has 64 MB
            "--cgroups=disabled",  # it stays in the job's cgroup: limits apply, Slurm can end it
            "--ulimit=host",
            "--log-driver=none",
            "--security-opt=label=disable",
            "--entrypoint=",
            # Files belong to the user, regardless of the image's user.
            "--user=0:0" if self.as_root else "--userns=keep-id",
            f"--workdir={self.container.workdir}",
            *(["--device=nvidia.com/gpu=all"] if self.container.gpus else []),
            *(f"--volume={mount}" for mount in self.container.bound),
        )


def find_program(runtimes: Sequence[str], path: str | None) -> tuple[str, str | None]:
    """Return the first runtime found on a PATH and its program; the program is None if none is."""
    for runtime in runtimes:
        for name in PROGRAMS[runtime]:
            if program := shutil.which(name, path=path):
                return runtime, program
    return runtimes[0], None


def remove_command(program: str, *names: str) -> list[str]:
    """Return the command that removes podman's containers with these names."""
    return [program, "rm", "--force", "--ignore", "--time=0", *names]


def list_command(program: str, label: str) -> list[str]:
    """Return the command that lists podman's containers with a label, one id per line."""
    return [program, "ps", "--all", "--quiet", "--no-trunc", f"--filter=label={label}"]


def monitor_command(program: str, containers: Sequence[str]) -> list[str]:
    """Return the command that prints id and monitor PID (conmon) of podman's containers.

    The PID is 0 if the container has not started.
    """
    return [program, "inspect", "--format={{.Id}} {{.State.ConmonPid}}", *containers]
