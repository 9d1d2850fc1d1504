"""Agreements of the ranks: before training on the open settings, during training on stops.

Rank 0 checks all ranks' infos and decides every setting left at `auto`. The decision is recorded,
so that a later attempt decides the same. During training the ranks agree about twice a second
whether to stop or to save: one exchange of a few numbers at a common step, so that all ranks learn
of a request at the same step. The interval in steps follows from the exchanged step times.

Every exchange waits until gloo's threads have released its tensors. They do so slightly after the
waiting thread continues; releasing a tensor that Python created takes Python's lock, which aborts
the process (SIGABRT) if the interpreter is shutting down. Without a process group an exchange
involves only this rank.
"""

import dataclasses
import itertools
import pickle
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from clusterddp.errors import TrainingError
from clusterddp.request.options import is_reference
from clusterddp.request.spec import SHARING
from clusterddp.request.train_config import TrainConfig
from clusterddp.run.records import Agreement

T = TypeVar("T")

_DROPPED_SECONDS = 5.0
AUTO_CAPTURES = False
"""True if `--cuda-graph auto` captures the built-in models on a single GPU; false until the tests
marked `gpu` have passed on one."""
POLL_SECONDS = 0.5
_MAX_STEPS = 1000
_UNKNOWN = 10**9  # steps: more than any device does in POLL_SECONDS


@dataclass(frozen=True)
class RankInfo:
    """Description that a rank sends of itself."""

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
    """UUID of the GPU; empty on a CPU."""
    threads: int
    """Number of compute threads available to this rank."""
    torch: str
    """Version of torch."""
    bf16: bool = False
    """True if the rank's device computes in bf16."""
    gpus: tuple[str, ...] = ()
    """UUIDs of all GPUs visible to this rank, by number."""
    shares_gpu: bool = False
    """True if NCCL is set to allow several ranks on one GPU, and can."""
    warning: str = ""

    @property
    def name(self) -> str:
        """`rank 3 on h02`, for messages."""
        return f"rank {self.rank} on {self.host}"


def assign_gpus(infos: Sequence[RankInfo]) -> list[RankInfo]:
    """Assign each rank a different GPU among its visible ones, if there are enough.

    Keeps a rank's choice if possible. A site can show each task the GPUs of its socket and
    distribute tasks over sockets in turn: then a rank cannot choose without the others.
    """
    owners: dict[tuple[str, str], RankInfo] = {}

    def place(info: RankInfo, tried: set[str]) -> bool:
        """Find a GPU, perhaps another rank's that can move (Kuhn's bipartite matching)."""
        free_first = sorted(
            info.gpus, key=lambda gpu: ((info.host, gpu) in owners, gpu != info.gpu)
        )
        for gpu in free_first:
            if gpu not in tried:
                tried.add(gpu)
                owner = owners.get((info.host, gpu))
                if owner is None or place(owner, tried):
                    owners[info.host, gpu] = info
                    return True
        return False

    for info in infos:
        place(info, set())
    own = {info.rank: gpu for (_, gpu), info in owners.items()}
    return [
        dataclasses.replace(info, gpu=gpu, device=f"cuda:{info.gpus.index(gpu)}")
        if (gpu := own.get(info.rank))
        else info
        for info in infos
    ]


def decide(
    config: TrainConfig, infos: Sequence[RankInfo], recorded: Agreement | None = None
) -> Agreement:
    """Check that the ranks can train together and decide the settings left at auto.

    recorded: agreement of an earlier attempt, whose values are kept at the same world size.
    Raises TrainingError with the ranks that do not match.
    """
    _check_alike(infos)
    shared = _shared_gpus(config, infos)
    _check_ranks(config, len(infos))
    kind, backend = infos[0].kind, config.backend
    threads = config.threads or min(info.threads for info in infos)
    if recorded and recorded.world_size == len(infos):
        if config.device == "auto" and recorded.kind not in ("", kind):
            raise TrainingError(
                f"this run started on {recorded.kind}, but {infos[0].name} now has "
                f"{infos[0].device}, which would change the weights. Give it "
                f"{recorded.kind} again, or force the change with --device {kind}. [CD0806]"
            )
        if backend == "auto" and recorded.kind == kind:
            backend = recorded.backend or backend
        threads = config.threads or recorded.threads or threads
    precision = config.precision
    if precision == "auto" and recorded and recorded.kind == kind:
        precision = recorded.precision
    if precision == "auto":
        precision = "bf16" if all(info.bf16 for info in infos) else "fp32"
    check_precision(config, precision, infos)
    warnings = [f"{info.host}: {info.warning}" for info in infos if info.warning] + shared
    if backend == "auto":
        # A single rank communicates with no other and skips the slow start of NCCL.
        backend = "nccl" if kind == "cuda" and len(infos) > 1 else "gloo"
    if backend == "nccl" and kind == "cpu":
        raise TrainingError(
            f"--backend nccl needs GPUs, but {infos[0].name} computes on the CPU. "
            "Use --backend gloo, or nodes with GPUs. [CD0807]"
        )
    return Agreement(
        backend=backend,
        kind=kind,
        threads=threads,
        world_size=len(infos),
        precision=precision,
        cuda_graph=_wants_graph(config, kind, len(infos), precision, backend, recorded),
        hosts=tuple(dict.fromkeys(info.host for info in infos)),
        where=_where(infos),
        warnings=tuple(dict.fromkeys(warnings)),
    )


def check_precision(config: TrainConfig, precision: str, infos: Sequence[RankInfo]) -> None:
    """Raise TrainingError if a rank's device does not support the precision.

    precision: the requested one, or the recorded one if `config` leaves it open. Requested bf16
    passes, because torch emulates it slowly; so does bf16 on CPUs.
    """
    open_to_us = config.precision == "auto"
    lacking = next((info for info in infos if not info.bf16), None)
    if precision == "tf32":
        lacking = next((info for info in infos if info.kind == "cpu"), lacking)
    elif precision != "bf16" or not open_to_us or infos[0].kind == "cpu":
        return
    if lacking:
        wanted = f"this run started in {precision}" if open_to_us else f"--precision {precision}"
        raise TrainingError(
            f"{wanted}, which {lacking.name} does not support ({lacking.device}): it needs an "
            "Ampere GPU or later. Request such GPUs (--constraint), or change the precision: "
            f"--precision fp32{' --allow-config-change' if open_to_us else ''}. [CD0807]"
        )


class Poll:
    """Exchange of the ranks' wishes at agreed steps."""

    def __init__(self) -> None:
        self._next = 0
        self._stride = 1
        self._last: tuple[int, float] | None = None
        self.step_seconds = 0.0
        """Recent seconds per step."""
        self.pace = _UNKNOWN
        """Agreed number of steps in POLL_SECONDS, the same on all ranks."""

    def due(self, step: int) -> bool:
        """Return whether the ranks exchange their wishes at this step."""
        return step >= self._next

    def ask(self, step: int, wishes: list[int]) -> list[int]:
        """Return the maximum of each wish over all ranks; collective, at the same step."""
        now = time.monotonic()
        if self._last and step > self._last[0]:
            self.step_seconds = (now - self._last[1]) / (step - self._last[0])
        wanted = int(POLL_SECONDS / self.step_seconds) if self.step_seconds else _UNKNOWN
        answer = torch.tensor([*wishes, -wanted], dtype=torch.int64, device=device())
        maximum(answer)
        *answers, slowest = answer.tolist()
        self.pace = -slowest
        # Adjust slowly: the first steps are often slower, or faster, than later ones.
        self._stride = max(1, min(self.pace, self._stride * 2, _MAX_STEPS))
        self._next = step + self._stride
        self._last = (step, time.monotonic())
        return [int(value) for value in answers]


def _wants_graph(
    config: TrainConfig,
    kind: str,
    world_size: int,
    precision: str,
    backend: str,
    recorded: Agreement | None,
) -> bool:
    if config.cuda_graph == "on" and kind == "cpu":
        raise TrainingError(
            "--cuda-graph on needs GPUs, but the ranks compute on CPUs. Leave it at auto, or use "
            "nodes with GPUs. [CD0808]"
        )
    if config.cuda_graph == "on" and world_size > 1 and backend != "nccl":
        raise TrainingError(
            f"--cuda-graph on with {world_size} ranks: --backend {backend} communicates through "
            "the hosts, which a graph cannot capture. Use --backend nccl, or --cuda-graph off. "
            "[CD0808]"
        )
    if config.cuda_graph != "auto" or kind == "cpu":
        return config.cuda_graph == "on"
    fits = precision != "fp16" and not config.compile
    fits = fits and config.strategy != "dp"  # DataParallel copies the model at every step
    fits = fits and (world_size == 1 or backend == "nccl")
    if recorded and (recorded.kind, recorded.world_size) == (kind, world_size):
        return fits and recorded.cuda_graph
    # Python code of a user model would run only at the capture.
    return AUTO_CAPTURES and fits and world_size == 1 and not is_reference(config.model)


def _check_ranks(config: TrainConfig, world_size: int) -> None:
    if config.strategy != "ddp" and world_size > 1:
        raise TrainingError(
            f"--strategy {config.strategy} trains in one process, but {world_size} were started. "
            "Start one process, or use --strategy ddp. [CD0807]"
        )
    if config.profile and int(config.profile) >= world_size:
        raise TrainingError(
            f"--profile {config.profile}: there is no such rank. Use 0 to {world_size - 1}. "
            "[CD0807]"
        )


def _check_alike(infos: Sequence[RankInfo]) -> None:
    first = infos[0]
    for info in infos:
        if info.torch != first.torch:
            raise TrainingError(
                f"{first.name} has torch {first.torch}, {info.name} has torch {info.torch}. "
                "Use one environment on all hosts (--python). [CD0806]"
            )
        if info.kind != first.kind:
            raise TrainingError(
                f"{first.name} computes on {first.device}, {info.name} on {info.device}. "
                "Request GPUs for every rank, or use --device cpu. [CD0806]"
            )


def _shared_gpus(config: TrainConfig, infos: Sequence[RankInfo]) -> list[str]:
    """Return a warning for each GPU with several ranks; raise if sharing was not requested."""
    ranks: dict[tuple[str, str], list[RankInfo]] = {}
    for info in infos:
        if info.gpu:
            ranks.setdefault((info.host, info.gpu), []).append(info)
    shared = {where: group for where, group in ranks.items() if len(group) > 1}
    for (host, gpu), group in shared.items():
        one, other = group[:2]
        if config.backend != "gloo" and not all(info.shares_gpu for info in group):
            raise TrainingError(
                f"rank {one.rank} and rank {other.rank} are on one GPU of {host}: {gpu} "
                f"({one.device} and {other.device}). Request as many GPUs as tasks on each node "
                "(--gpus-per-node), without a --gpu-bind that hides some of them, or use "
                f"--device cpu. To share a GPU: --backend gloo, or {SHARING}. [CD0805]"
            )
    return [
        f"{host}: ranks {', '.join(str(info.rank) for info in group)} share the time and memory "
        f"of a GPU ({gpu})"
        for (host, gpu), group in shared.items()
    ]


def _where(infos: Sequence[RankInfo]) -> tuple[str, ...]:
    lines = []
    for host, group in itertools.groupby(infos, key=lambda info: info.host):
        members = list(group)
        ranks = f"rank {members[0].rank}"
        if len(members) > 1:
            ranks = f"ranks {members[0].rank}-{members[-1].rank}"
        devices = ", ".join(dict.fromkeys(info.device for info in members))
        lines.append(f"{ranks} on {host}: {devices}")
    return tuple(lines)


def has_group() -> bool:
    """Return whether this process has a default process group."""
    return dist.is_available() and dist.is_initialized()


def rank_and_world_size() -> tuple[int, int]:
    """Return this rank and the number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if has_group() else (0, 1)


def device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Return the device for small values of a process group: NCCL supports only GPUs."""
    if has_group() and dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def maximum(values: torch.Tensor) -> None:
    """Set each value to its maximum over all ranks."""
    if has_group():
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        _await_dropped([values])


def rows(values: list[float], group: dist.ProcessGroup | None = None) -> list[list[float]]:
    """Return the numbers of all ranks, one row per rank."""
    if rank_and_world_size()[1] == 1:
        return [values]
    sent = torch.tensor(values, dtype=torch.float64, device=device(group))
    received = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
    dist.all_gather(received, sent, group)
    _await_dropped([sent, *received])
    return [each.tolist() for each in received]


def gather(value: T, *, on_first: bool = False, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the pickled and exchanged values of all ranks; with `on_first` only on rank 0.

    Collective over the default process group, or another one of all ranks.
    """
    rank, world_size = rank_and_world_size()
    if world_size == 1:
        return [value]
    data = bytearray(pickle.dumps(value))
    lengths = [int(row[0]) for row in rows([len(data)], group)]
    padded = bytearray(max(lengths))
    padded[: len(data)] = data
    sent = torch.frombuffer(padded, dtype=torch.uint8).to(device(group))
    receives = rank == 0 or not on_first
    received = [torch.empty_like(sent) for _ in lengths] if receives else []
    if on_first:
        dist.gather(sent, received or None, dst=0, group=group)
    else:
        dist.all_gather(received, sent, group)
    _await_dropped([sent, *received])
    return [
        pickle.loads(bytes_of(each[:length]))
        for each, length in zip(received, lengths if receives else [], strict=True)
    ]


def bytes_of(tensor: torch.Tensor) -> bytearray:
    """Return a copy of a tensor of bytes, from any device and also without numpy."""
    data = bytearray(len(tensor))
    if data:  # torch refuses an empty buffer
        torch.frombuffer(data, dtype=torch.uint8).copy_(tensor)
    return data


def _await_dropped(tensors: Iterable[torch.Tensor]) -> None:
    """Wait until only Python holds the tensors; not needed for NCCL's."""
    deadline = time.monotonic() + _DROPPED_SECONDS
    for each in tensors:
        users: Callable[[], int] = getattr(each, "_use_count")  # noqa: B009 -- torch's stubs lack it
        while each.device.type == "cpu" and users() > 1 and time.monotonic() < deadline:
            time.sleep(0.0001)
