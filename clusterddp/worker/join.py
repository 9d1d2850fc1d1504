"""Rendezvous of a rank: exchange of device information, common settings, process group."""

import dataclasses
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from clusterddp import files, log
from clusterddp.distributed import agreement, rendezvous, tcp_store
from clusterddp.distributed.agreement import RankInfo
from clusterddp.distributed.rendezvous import RunStore
from clusterddp.errors import ClusterDDPError, TrainingError, coded
from clusterddp.processes import change_environment, hardware
from clusterddp.ranks.dist_env import DistEnv
from clusterddp.ranks.variables import GLOO_INTERFACE, VISIBLE_GPUS, host_name
from clusterddp.request.options import is_reference
from clusterddp.request.spec import SHARED_GPUS
from clusterddp.request.train_config import TrainConfig
from clusterddp.run.attempt import Attempt
from clusterddp.run.outcome import note_clocks
from clusterddp.run.records import Agreement
from clusterddp.run.run_dir import RunDir
from clusterddp.slurm.forms import FULL_PREFLIGHT_VARIABLE
from clusterddp.training import device as devices
from clusterddp.training.step import gpus_of_one_process, use_tf32

_OWN_DATA_SECONDS = 3600.0
# At a timeout NCCL ends the process without asking Python. The watchdog ends it first: a checkpoint
# being saved and NCCL's flight recorder take less than this.
_NCCL_GRACE_SECONDS = 60
_RECORDS_BY_ITSELF = hasattr(torch._C._distributed_c10d, "_dump_fr_trace")
# Clock offset from which logs of different hosts are hard to compare.
_APART_SECONDS = 0.5


@dataclass(frozen=True)
class JoinResult:
    """Result of the rendezvous for one rank."""

    info: RankInfo
    agreed: Agreement
    device: torch.device
    checks_nodes: bool = False
    """True if the ranks check their nodes before they train (set on rank 0)."""

    @property
    def attempt(self) -> Attempt:
        return Attempt(RunDir(Path(self.agreed.run_dir)), self.agreed.attempt)


@dataclass(frozen=True)
class _Answer:
    """Part of rank 0's answer, in addition to the agreement."""

    devices: tuple[str, ...]
    """Device of each rank."""
    send_clock: tuple[int, ...]
    """Ranks that answer with their host's time."""
    sent: float
    checks_nodes: bool


def join(
    config: TrainConfig,
    env: DistEnv,
    store: RunStore,
    environ: Mapping[str, str],
    settle: Callable[[list[RankInfo]], Agreement],
    lookups: tcp_store.Lookups | None,
) -> JoinResult:
    """Send this rank's information to rank 0, get the common settings, join the process group.

    settle: determines the common settings on rank 0.
    lookups: the name lookups of this start.

    Raises ClusterDDPError; PeerError if another rank caused the failure.
    """
    try:
        info = describe_rank(config, env, environ)
    except ClusterDDPError as error:
        rendezvous.report_refusal(store, env, error)
        raise
    checks_nodes = bool(environ.get(FULL_PREFLIGHT_VARIABLE))
    joined = _rendezvous(config, env, store, info, settle, checks_nodes)
    agreed = joined.agreed
    interface = ""
    if lookups and agreed.backend == "gloo" and GLOO_INTERFACE not in environ:
        interface = lookups.gloo_interface()
    defaults = _variables(config, joined, interface)
    change_environment({name: environ.get(name, value) for name, value in defaults.items()})
    _init_group(config, joined, env, store)
    log_settings(config, agreed, joined.info, env)
    return joined


def _rendezvous(
    config: TrainConfig,
    env: DistEnv,
    store: RunStore,
    info: RankInfo,
    settle: Callable[[list[RankInfo]], Agreement],
    checks_nodes: bool,
) -> JoinResult:
    """Exchange information with all ranks; rank 0 also compares the hosts' clocks."""
    senders: dict[int, str] = {}

    def decide(infos: list[rendezvous.Message]) -> rendezvous.Message:
        ranks = [rank for each in infos if (rank := files.load(RankInfo, each))]
        assert len(ranks) == env.world_size, "every rank sends a complete message"
        ranks = agreement.assign_gpus(sorted(ranks, key=lambda info: info.rank))
        agreed = settle(ranks)
        senders.update(rendezvous.clock_senders(infos))
        answer = _Answer(
            devices=tuple(rank.device for rank in ranks),
            send_clock=tuple(sorted(senders)),
            sent=time.time(),
            checks_nodes=checks_nodes,
        )
        return {**dataclasses.asdict(agreed), **vars(answer)}

    # Meanwhile rank 0 calls a user function, which may have to download its data.
    patience = _OWN_DATA_SECONDS if is_reference(config.dataset) else rendezvous.GRACE_SECONDS
    timeout = config.rendezvous_seconds(env.num_nodes)
    decision = rendezvous.agree(store, env, vars(info), decide, timeout, patience)
    agreed, answer = files.load(Agreement, decision), files.load(_Answer, decision)
    assert agreed and answer, "rank 0 sends a complete agreement"
    info = dataclasses.replace(info, device=answer.devices[env.rank])
    if env.rank in answer.send_clock:
        rendezvous.send_clock(store, env, time.time())
    joined = JoinResult(info, agreed, torch.device(info.device), answer.checks_nodes)
    if senders:
        ahead = rendezvous.collect_clocks(store, env, senders, answer.sent)
        apart = [f"{host} {s:+.1f} s" for host, s in ahead.items() if abs(s) >= _APART_SECONDS]
        if apart:
            log.warning(f"clocks differ from rank 0's host: {', '.join(apart)} [CD0908]")
        with suppress(OSError):  # on a full disk the record is lost
            note_clocks(joined.attempt.outcomes, {info.host: 0.0, **ahead})
    return joined


def _variables(config: TrainConfig, joined: JoinResult, interface: str) -> dict[str, str]:
    """Return default values of variables that torch and its libraries read.

    interface: the network interface for gloo, if it had to be detected.
    """
    agreed, trace = joined.agreed, ""
    if agreed.backend == "nccl" and agreed.world_size > 1:
        trace = str(joined.attempt.nccl_trace())
    variables = {
        "KINETO_LOG_LEVEL": "99" if config.profile else "",  # silences the profiler's library
        GLOO_INTERFACE: interface,
        # cuBLAS is deterministic only with a fixed workspace (torch.use_deterministic_algorithms).
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8" if config.deterministic else "",
        # File to which NCCL's watchdog dumps its flight recorder at a timeout; two names exist.
        "TORCH_FR_DUMP_TEMP_FILE": trace,
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": trace,
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1" if trace else "",
        # Off by default in torch 2.4; later versions renamed the variable and warn about this name.
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000" if trace and not _RECORDS_BY_ITSELF else "",
    }
    return {name: value for name, value in variables.items() if value}


def describe_rank(config: TrainConfig, env: DistEnv, environ: Mapping[str, str]) -> RankInfo:
    """Choose the device of this rank, and return the rank's information for rank 0.

    Raises TrainingError if the rank cannot train here.
    """
    if absent := config.missing_package():
        raise TrainingError(absent, code="CD0803")
    wants_gpu = config.device != "cpu"  # asking the driver is slow
    visible = torch.cuda.device_count() if wants_gpu and torch.cuda.is_available() else 0
    choice = devices.choose(
        config.device,
        visible=visible,
        local_rank=env.local_rank,
        granted=devices.granted_gpus(environ),
        driver=hardware.gpu_driver(),
        build=devices.torch_build(),
    )
    threads = usable_threads(environ, env.local_world_size)
    warning = choice.warning
    if config.strategy == "dp" and gpus_of_one_process("dp", choice.kind) < 2:
        warning = warning or (
            f"--strategy dp has {'one GPU' if choice.kind == 'cuda' else 'no GPU'} here: it trains "
            f"only on {choice.name}, like --strategy single"
        )
    warnings = [warning]
    gpus: tuple[str, ...] = ()
    if choice.kind == "cuda":
        gpus = _select_gpu(choice.index, visible, environ)
        if threads == 1:
            warnings.append(
                "a GPU rank has one CPU: training, NCCL, data loading and checkpoints compete for "
                "it. Request more, such as --cpus-per-task 4"
            )
    return RankInfo(
        rank=env.rank,
        world_size=env.world_size,
        local_rank=env.local_rank,
        host=host_name(environ),
        pid=os.getpid(),
        kind=choice.kind,
        device=choice.name,
        gpu=gpus[choice.index] if gpus else "",
        threads=threads,
        torch=torch.__version__,
        bf16=devices.computes_in_bf16(choice.kind),
        gpus=gpus,
        shares_gpu=choice.kind == "cuda" and _nccl_shares_gpus(environ),
        warning="; ".join(filter(None, warnings)),
    )


def _select_gpu(index: int, visible: int, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Select this GPU before any other CUDA call; return the UUIDs of the visible GPUs.

    Empty if torch has no UUIDs: two ranks on one GPU are then not detected.
    """
    shown = environ.get(VISIBLE_GPUS, "").split(",")[0]
    try:
        torch.cuda.set_device(index)  # else the calls below would also open the first GPU
        if shown.startswith("MIG-"):  # CUDA may return the UUID of the whole GPU
            return (shown,)
        properties = map(torch.cuda.get_device_properties, range(visible))
        return tuple(str(each.uuid) for each in properties if hasattr(each, "uuid"))
    except RuntimeError as error:
        raise TrainingError(
            f"GPU {index} of {socket.gethostname()} cannot be used: {str(error).splitlines()[0]}. "
            "Another process may use it exclusively, or it is broken: run nvidia-smi there. "
            "[CD0814]"
        ) from None


def _nccl_shares_gpus(environ: Mapping[str, str]) -> bool:
    """Return whether NCCL is configured to share a GPU among ranks, and supports it."""
    asked = environ.get(SHARED_GPUS, "") not in ("", "0")
    return asked and torch.cuda.nccl.version() >= (2, 30)  # type: ignore[no-untyped-call]


def usable_threads(environ: Mapping[str, str], local_world_size: int) -> int:
    """Return the number of CPUs from Slurm, or this rank's share of the process's CPUs."""
    given = environ.get("SLURM_CPUS_PER_TASK", "")
    if given.isdigit() and int(given):
        ranks = local_world_size if "TORCHELASTIC_RUN_ID" in environ else 1  # ranks per task
        return max(int(given) // ranks, 1)
    try:
        usable = len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        usable = os.cpu_count() or 1
    return max(usable // local_world_size, 1)


def _init_group(config: TrainConfig, joined: JoinResult, env: DistEnv, store: RunStore) -> None:
    agreed, device = joined.agreed, joined.device
    ends_first = config.hang_timeout and agreed.backend == "nccl"
    timeout = config.process_group_timeout + (_NCCL_GRACE_SECONDS if ends_first else 0)
    torch.set_num_threads(agreed.threads)
    if config.deterministic:
        torch.use_deterministic_algorithms(True)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # Otherwise cuDNN may choose algorithms whose sums differ from run to run.
        torch.backends.cudnn.deterministic = True
        use_tf32(agreed.precision)
    mode = config.numa_binding
    if mode != "none" and (trouble := devices.bind_to_numa(mode, device)):
        log.warning(coded(trouble, "CD0824"))
    dist.init_process_group(
        agreed.backend,
        store=PrefixStore("group", store),
        rank=env.rank,
        world_size=env.world_size,
        timeout=timedelta(seconds=timeout),
        device_id=device if device.type == "cuda" and agreed.backend == "nccl" else None,
    )


def log_settings(config: TrainConfig, agreed: Agreement, info: RankInfo, env: DistEnv) -> None:
    """Log this rank's device; on rank 0 also the common settings."""
    log.info(
        f"rank {env.rank} of {env.world_size} on {info.host} (local rank {env.local_rank}): "
        f"{info.device}, {agreed.threads} {'thread' if agreed.threads == 1 else 'threads'}, "
        f"{agreed.backend}"
    )
    if env.rank:
        return
    if env.world_size > 1:
        for line in agreed.where:
            log.info(line)
    for warning in agreed.warnings:
        log.warning(coded(warning, "CD0824"))
    peak = config.peak_lr(agreed.reference_world_size)
    passes = (
        f", in {config.gradient_accumulation_steps} passes"
        if config.gradient_accumulation_steps > 1
        else ""
    )
    log.info(
        f"lr {config.lr:g} x {peak / config.lr:g} ({config.lr_scaling}) = {peak:g}, warmup "
        f"{config.warmup_steps} steps; batch {agreed.batch_size} x {env.world_size} = "
        f"{agreed.global_batch_size}{passes}"
    )
    auto = " (auto)" if config.precision == "auto" else ""
    graph = ", the step as one CUDA graph" if agreed.cuda_graph else ""
    log.info(f"precision {agreed.precision}{auto}{graph}")
    log.info(f"attempt {agreed.attempt} of the run")
    if agreed.resume:
        log.info(f"resuming from {agreed.resume}")
    log.info(f"run directory: {agreed.run_dir}")
