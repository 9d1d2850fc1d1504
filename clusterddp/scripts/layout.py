"""Nodes, tasks, CPUs and GPUs of an sbatch file; what its launcher starts counts as tasks."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from clusterddp.errors import RequestError
from clusterddp.request import nested_launcher
from clusterddp.request.nested_launcher import NestedLauncher
from clusterddp.scripts.sbatch_file import SbatchFile
from clusterddp.scripts.shell import is_known, said
from clusterddp.scripts.training import Training
from clusterddp.slurm import forms
from clusterddp.slurm.partitions import gpus_of

DIRECTIVES_OF_GPUS = ("gpus-per-node", "gres", "gpus-per-task", "gpus")
DIRECTIVES = frozenset({*DIRECTIVES_OF_GPUS, "nodes", "ntasks", "ntasks-per-node", "cpus-per-task"})
"""Directives that are read together."""
MPI = frozenset({"mpirun", "mpiexec", "mpiexec.hydra", "mpirun.openmpi", "orterun", "prterun"})
_ALL_GPUS = re.compile(r"SLURM_GPUS_ON_NODE|SLURM_GPUS_PER_NODE|nvidia-smi")
_OF_NODES = re.compile(r"SLURM_NNODES|SLURM_JOB_NUM_NODES")
_BARE_GPU = re.compile(r"(?:^|(?<=,))gpu(?::[A-Za-z][\w.-]*)?(?=,|$)")

Note = Callable[[int, str, str], None]
"""Takes a line of the file, what is typed there, and a remark on it."""


@dataclass(frozen=True)
class Layout:
    """Layout of a job, as `submit` is asked for it."""

    nodes: int
    tasks: int
    """Tasks of a node, which are ranks."""
    cpus: int | None = None
    """CPUs of a task."""
    gpus: int = 0
    """GPUs of a node."""
    gpu_type: str = ""
    gpu_request: str = "gpus-per-node"
    other_gres: str = ""
    """Generic resources beside the GPUs."""

    @property
    def options(self) -> list[tuple[str, str]]:
        """Return names and values of submit's options, without those that are its defaults."""
        kind = f"{self.gpu_type}:" if self.gpu_type else ""
        asked = [
            ("nodes", str(self.nodes)),
            ("gpus-per-node", f"{kind}{self.gpus}" if self.gpus else ""),
            ("gpu-request", "" if self.gpu_request == "gpus-per-node" else self.gpu_request),
            ("tasks-per-node", "" if self.tasks == (self.gpus or 1) else str(self.tasks)),
            ("cpus-per-task", str(self.cpus or "")),
            ("sbatch", f"gres={self.other_gres}" if self.other_gres else ""),
        ]
        return [(name, value) for name, value in asked if value]


def read(file: SbatchFile, training: Training, note: Note) -> Layout:
    """Read the layout from the directives, and from the step where they leave it open."""
    return _Reader(file, training, note).layout()


def options_of(launcher: NestedLauncher) -> Iterator[tuple[str, str]]:
    """Yield the options of a launcher, with dashes inside, and their values."""
    words = launcher.command[launcher.first : launcher.last]
    at = len(launcher.name.split())
    if nested_launcher.is_python(words[0]):  # and its own options
        at = words.index("-m") + 2 if "-m" in words else at + 1
    while at < len(words):
        word = words[at]
        at += 1
        if not word.startswith("-") or word == "--":
            continue
        name, equals, value = word.lstrip("-").partition("=")
        if not equals and at < len(words) and not words[at].startswith("-"):
            value = words[at]
            at += 1
        yield name.replace("_", "-"), value


class _Reader:
    def __init__(self, file: SbatchFile, training: Training, note: Note) -> None:
        self.file, self.training, self.note = file, training, note
        self.where = training.command.line

    def layout(self) -> Layout:
        nodes, tasks = self.nodes_and_tasks()
        kind, gpus, request = self.gpus(nodes, tasks)
        cpus, launcher = _number(self.asked("cpus-per-task")), self.training.launcher
        ranks = tasks
        if launcher:
            ranks = self.ranks(launcher, nodes, gpus) or gpus or tasks
            self.note_ranks(launcher, tasks, ranks, cpus)
        elif self.training.step is None and nodes * tasks > 1:
            why = f"it ran once, on the first node; here each of the {nodes * tasks} tasks runs it"
            self.note(self.where, said(self.training.command), why)
        if cpus and ranks != tasks:
            cpus = max(cpus * tasks // ranks, 1)
        others = ",".join(
            each for each in (self.file.value("gres") or "").split(",") if each[:3] != "gpu"
        )
        if others and gpus and request == "gres":
            why = f"--gpu-request gres takes the GPUs alone; {others} is left out"
            self.note(self.place("gres"), f"--gres={self.file.value('gres')}", why)
            others = ""
        return Layout(nodes, ranks, cpus, gpus, kind, request if gpus else "gpus-per-node", others)

    def asked(self, *names: str) -> str | None:
        """Return what the directives say, or else the step that trains."""
        value = self.file.value(*names)
        if value is None and self.training.step:
            value = self.training.step.value(*names)
            value = value if value and is_known(value) else None
        return value

    def of_step(self, name: str) -> int | None:
        return _number(self.training.step.value(name)) if self.training.step else None

    def place(self, name: str) -> int:
        directive = self.file.directive(name)
        return directive.line if directive else self.where

    def nodes_and_tasks(self) -> tuple[int, int]:
        """Return the number of nodes, and of the tasks on each of them."""
        typed = self.asked("nodes")
        nodes = _number(typed)
        if typed and nodes is None:
            nodes = _number(typed.split("-")[0]) or 1
            self.note(self.place("nodes"), f"--nodes={typed}", f"a run has a fixed number: {nodes}")
        per_node = self.of_step("ntasks-per-node") or _number(self.asked("ntasks-per-node"))
        total = _number(self.asked("ntasks"))
        own = None if self.training.is_of_each_node else self.of_step("ntasks")
        if own:
            total, per_node = own, None if own % (per_node or 1) else per_node
        if nodes is None:
            nodes = total // per_node if per_node and total and total % per_node == 0 else 1
            if not per_node and total and total > 1:
                why = "how many nodes that is was Slurm's choice; here it is one"
                self.note(self.place("ntasks"), f"--ntasks={total}", why)
        if per_node is None and total:
            per_node = max(total // nodes, 1)
            self.note_uneven("ntasks", total, nodes)
        return nodes, per_node or 1

    def note_uneven(self, name: str, total: int, nodes: int) -> None:
        if total % nodes:
            why = f"not the same number on each of {nodes} nodes; here it is {total // nodes}"
            self.note(self.place(name), f"--{name}={total}", why)

    def gpus(self, nodes: int, tasks: int) -> tuple[str, int, str]:
        """Return type and number of a node's GPUs, and the directive that asks for them."""
        for name in DIRECTIVES_OF_GPUS:
            value = self.asked(name)
            if value is None:
                continue
            each = self.file.directive("gpus-per-task")
            if each and name != each.name:
                why = f"not carried over beside --{name}: a task sees all GPUs of its node"
                self.note(each.line, each.source, why)
            if name == "gres":
                found = gpus_of(_BARE_GPU.sub(r"\g<0>:1", value.replace("gres:", "")))
                if found:
                    return next((kind for kind in found if kind), ""), found[""], name
                if re.search(r"(?:^|[,:])gpu\b", value):
                    why = "not carried over: how many GPUs that is is not known"
                    self.note(self.place(name), f"--gres={value[:80]}", why)
                continue
            try:
                kind, count = forms.gpu_count(f"--{name}", value)
            except RequestError as error:
                self.note(self.place(name), f"--{name}={value}", f"not carried over: {error}")
                continue
            if name == "gpus":
                self.note_uneven(name, count, nodes)
                return kind, count // nodes, "gpus-per-node"
            return kind, count * (tasks if name == "gpus-per-task" else 1), name
        return "", 0, ""

    def ranks(self, launcher: NestedLauncher, nodes: int, gpus: int) -> int | None:
        """Return how many ranks the launcher starts on each node; None where that is not known."""
        of_all = launcher.name in MPI or launcher.name.startswith(("accelerate", "horovod"))
        keys = ("num-processes", "np", "n", "c") if of_all else ("nproc-per-node", "num-gpus")
        options = dict(options_of(launcher))
        typed = next((options[key] for key in keys if key in options), None)
        if typed is None:
            return 1 if launcher.name in nested_launcher.AGENTS else None
        count = _number(typed)
        if count is not None:
            return max(count // nodes, 1) if of_all else count
        sources = " ".join(each.source for each in self.file.script.expanded(typed))
        if gpus and (typed in ("gpu", "auto") or _ALL_GPUS.search(sources)):
            return gpus
        if gpus and of_all and _OF_NODES.search(sources):  # so many a node
            return gpus
        why = f"how many ranks that is is not known; here it is {gpus or 1} on each node"
        self.note(self.where, self.file.script.shown(typed), why)
        return None

    def note_ranks(
        self, launcher: NestedLauncher, tasks: int, ranks: int, cpus: int | None
    ) -> None:
        if tasks > 1 and launcher.name not in MPI:
            why = f"{tasks} tasks of a node would each have started it; here are its {ranks} ranks"
            self.note(self.where, launcher.name, why)
        elif ranks != tasks:
            why = f"its ranks are Slurm's tasks now, {ranks} on each node"
            if cpus:
                why += f", of {max(cpus * tasks // ranks, 1)} CPUs each"
            self.note(self.where, launcher.name, why)


def _number(text: str | None) -> int | None:
    return int(text) if text and re.fullmatch(r"[1-9][0-9]{0,5}", text) else None
