"""Agreements of the ranks: before they train, on what the request left open; then on stops.

Rank 0 checks all ranks' hellos and decides. Whatever the request left at `auto` is decided here
once, and recorded, so that a later attempt decides the same. While they train, the ranks agree
about twice a second whether to stop or to save now: one exchange of a few numbers, in step with
the training, so that all of them learn of a request at the same step. Which steps those are
follows from how long steps take; that too is exchanged.
"""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from clusterddp.errors import TrainingError
from clusterddp.request.train_config import TrainConfig
from clusterddp.run.records import Agreement

POLL_SECONDS = 0.5
_MOST_STEPS = 1000


@dataclass(frozen=True)
class Hello:
    """Description of a rank, by itself."""

    rank: int
    world_size: int
    local_rank: int
    host: str
    pid: int
    kind: str
    """`cuda` or `cpu`."""
    device: str
    """`cuda:1` or `cpu`."""
    gpu: str
    """The GPU's own identifier, empty on a CPU."""
    threads: int
    """Compute threads that this rank could use."""
    torch: str
    """Version of torch."""
    bf16: bool = False
    """True where the rank's processor computes in bf16."""
    warning: str = ""

    @property
    def name(self) -> str:
        """`rank 3 on h02`, for messages."""
        return f"rank {self.rank} on {self.host}"


def decide(
    config: TrainConfig, hellos: Sequence[Hello], recorded: Agreement | None = None
) -> Agreement:
    """Check that the ranks can train together, and settle what the request left at auto.

    `recorded` is the agreement of an earlier attempt: at the same world size its values
    are taken again. Raises TrainingError naming the ranks that do not fit together.
    """
    _check_alike(hellos)
    _check_gpus(hellos)
    _check_ranks(config, len(hellos))
    kind, backend = hellos[0].kind, config.backend
    threads = config.threads or min(hello.threads for hello in hellos)
    if recorded and recorded.world_size == len(hellos):
        if config.device == "auto" and recorded.kind not in ("", kind):
            raise TrainingError(
                f"this run started on {recorded.kind}, but {hellos[0].name} has "
                f"{hellos[0].device} now, so it would not train to the same weights. Give it "
                f"{recorded.kind} again, or choose on purpose with --device {kind}."
            )
        if backend == "auto" and recorded.kind == kind:
            backend = recorded.backend or backend
        threads = config.threads or recorded.threads or threads
    precision = config.precision
    if precision == "auto" and recorded and recorded.kind == kind:
        precision = recorded.precision
    if precision == "auto":
        precision = "bf16" if all(hello.bf16 for hello in hellos) else "fp32"
    if backend == "auto":
        backend = "nccl" if kind == "cuda" else "gloo"
    if backend == "nccl" and kind == "cpu":
        raise TrainingError(
            f"--backend nccl exchanges between GPUs, but {hellos[0].name} computes on the CPU. "
            "Use --backend gloo, or start the ranks where they have GPUs."
        )
    return Agreement(
        backend=backend,
        kind=kind,
        threads=threads,
        world_size=len(hellos),
        precision=precision,
        cuda_graph=_wants_graph(config, kind, len(hellos), precision, backend),
        hosts=tuple(dict.fromkeys(hello.host for hello in hellos)),
        where=_where(hellos),
        warnings=tuple(dict.fromkeys(f"{h.host}: {h.warning}" for h in hellos if h.warning)),
    )


class Poll:
    """Exchange of the ranks' wishes at steps that they all know."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._next = 0
        self._stride = 1
        self._last: tuple[int, float] | None = None
        self.step_seconds = 0.0
        """Seconds from one step to the next, of late."""

    def due(self, step: int) -> bool:
        """Return whether the ranks exchange their wishes at this step."""
        return step >= self._next

    def ask(self, step: int, wishes: list[int]) -> list[int]:
        """Give the largest of each wish over all ranks; every rank calls it at the same step."""
        now = time.monotonic()
        if self._last and step > self._last[0]:
            self.step_seconds = (now - self._last[1]) / (step - self._last[0])
        wanted = _MOST_STEPS
        if self.step_seconds:
            wanted = min(max(int(POLL_SECONDS / self.step_seconds), 1), _MOST_STEPS)
        answer = torch.tensor([*wishes, -wanted], dtype=torch.int64, device=self._device)
        dist.all_reduce(answer, op=dist.ReduceOp.MAX)
        *answers, slowest = answer.tolist()
        # Careful at first: a step that is slow to begin with is soon faster, and the other way.
        self._stride = max(1, min(-slowest, self._stride * 2))
        self._next = step + self._stride
        self._last = (step, time.monotonic())
        return [int(value) for value in answers]


def _wants_graph(
    config: TrainConfig, kind: str, world_size: int, precision: str, backend: str
) -> bool:
    if config.cuda_graph == "on" and kind == "cpu":
        raise TrainingError(
            "--cuda-graph on: the ranks compute on CPUs, and graphs are replayed by GPUs. Leave it "
            "at auto, or start the ranks where they have GPUs."
        )
    if config.cuda_graph == "on" and world_size > 1 and backend != "nccl":
        raise TrainingError(
            f"--cuda-graph on with {world_size} ranks: what --backend {backend} exchanges goes "
            "through the hosts, which a graph cannot hold. Use --backend nccl, or --cuda-graph off."
        )
    fits = world_size == 1 and precision != "fp16" and not config.compile
    fits = fits and config.strategy != "dp"  # whose parts are copied to their GPUs at every step
    return kind == "cuda" and (config.cuda_graph == "on" or (config.cuda_graph == "auto" and fits))


def _check_ranks(config: TrainConfig, world_size: int) -> None:
    if config.strategy != "ddp" and world_size > 1:
        raise TrainingError(
            f"--strategy {config.strategy} trains in one process, but {world_size} were started. "
            "Start one, or use --strategy ddp."
        )
    if config.profile and int(config.profile) >= world_size:
        raise TrainingError(
            f"--profile {config.profile}: there is no such rank; the {world_size} that were "
            "started are numbered from 0."
        )


def _check_alike(hellos: Sequence[Hello]) -> None:
    first = hellos[0]
    for hello in hellos:
        if hello.torch != first.torch:
            raise TrainingError(
                f"{first.name} has torch {first.torch}, {hello.name} has torch {hello.torch}. "
                "Use one environment on all hosts (--python)."
            )
        if hello.kind != first.kind:
            raise TrainingError(
                f"{first.name} computes on {first.device}, {hello.name} on {hello.device}. "
                "Ask for GPUs for every rank, or use --device cpu."
            )


def _check_gpus(hellos: Sequence[Hello]) -> None:
    taken: dict[tuple[str, str], Hello] = {}
    for hello in (each for each in hellos if each.gpu):
        other = taken.setdefault((hello.host, hello.gpu), hello)
        if other is not hello:
            raise TrainingError(
                f"rank {other.rank} and rank {hello.rank} are on one GPU of {hello.host}: "
                f"{hello.gpu} ({other.device} and {hello.device}). Ask for as many GPUs as tasks "
                "on each node (--gpus-per-node), or use --device cpu."
            )


def _where(hellos: Sequence[Hello]) -> tuple[str, ...]:
    lines = []
    for host, group in itertools.groupby(hellos, key=lambda hello: hello.host):
        members = list(group)
        ranks = f"rank {members[0].rank}"
        if len(members) > 1:
            ranks = f"ranks {members[0].rank}-{members[-1].rank}"
        devices = ", ".join(dict.fromkeys(hello.device for hello in members))
        lines.append(f"{ranks} on {host}: {devices}")
    return tuple(lines)
