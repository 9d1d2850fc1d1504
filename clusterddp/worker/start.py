"""Start of an attempt: rank 0 settles the common settings, data and checkpoint, and publishes them;
then every rank loads its training and test sets.
"""

import dataclasses
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from clusterddp import files, log, polling
from clusterddp.checkpoints import catalog, state
from clusterddp.checkpoints.catalog import Best
from clusterddp.checkpoints.state import Content
from clusterddp.data import mnist
from clusterddp.data.loader import Images, Loader
from clusterddp.data.synthetic import generate
from clusterddp.data.user_dataset import OwnSets
from clusterddp.distributed import agreement, rendezvous
from clusterddp.distributed.agreement import RankInfo
from clusterddp.distributed.rendezvous import RunStore
from clusterddp.errors import CheckpointError, ClusterDDPError, DataError, PeerError, TrainingError
from clusterddp.ranks.dist_env import DistEnv
from clusterddp.request.options import is_reference
from clusterddp.request.train_config import TrainConfig, changes
from clusterddp.run.attempt import Attempt
from clusterddp.run.records import Agreement
from clusterddp.run.run_dir import RunDir
from clusterddp.training import resumable


def settle_attempt(
    config: TrainConfig,
    run_dir: Path | None,
    number: int | None,
    environ: Mapping[str, str],
    infos: Sequence[RankInfo],
    fingerprint: Callable[[], str] | None = None,
) -> Agreement:
    """Determine and publish, on rank 0, the common settings of all ranks in this attempt.

    number: the attempt created by the launcher; if None, it is created here.
    fingerprint: returns the dataset's fingerprint if the data was already read, or is a user's
        dataset; otherwise its files are read.

    Raises TrainingError, DataError, CheckpointError, StartRefused or Superseded.
    """
    run = RunDir((run_dir or Path("jobs", time.strftime("train-%Y%m%d-%H%M%S"))).resolve())
    recorded = files.read(Agreement, run.resolved)
    terms = agreement.decide(config, infos, recorded)
    data_sha256 = _check_data(config, recorded, fingerprint)
    with writing(f"the run directory {run.path}", "Choose a directory that this host can write."):
        run.make(run.attempts)
        resumable.record_request(run, terms.world_size, terms.hosts, train=config)
        job_id = environ.get("SLURM_JOB_ID", "")
        patience = config.rendezvous_timeout or polling.OTHER_ATTEMPT_SECONDS
        attempt = resumable.take_attempt(run, number, job_id, patience)
        origin = _choose_checkpoint(config, attempt, recorded, terms.world_size, data_sha256)
        agreement.check_precision(config, origin.precision, infos)
        if origin.precision == "fp16" and config.cuda_graph == "on":
            raise TrainingError(
                f"--cuda-graph on conflicts with fp16, the precision of the checkpoint "
                f"{origin.source}: fp16 adapts its loss scale at each step. Omit --cuda-graph, or "
                "choose another --precision. [CD0808]"
            )
        return _publish(config, attempt, terms, origin, data_sha256, environ)


@contextmanager
def writing(what: str, remedy: str = "") -> Iterator[None]:
    """Raise TrainingError, on rank 0, if the body cannot write; `what` names the target."""
    try:
        yield
    except OSError as error:
        words = f"rank 0 on {socket.gethostname()} cannot write {what}: {error.strerror}. {remedy}"
        raise TrainingError(words.rstrip(), code="CD0504") from None


def _check_data(
    config: TrainConfig, recorded: Agreement | None, fingerprint: Callable[[], str] | None
) -> str:
    """Return the dataset's fingerprint. Raises DataError if the run started with another one."""
    is_own = is_reference(config.dataset)
    if not is_own:
        mnist.ensure(config.dataset, config.data_dir, {"synthetic": generate})
    sha256 = fingerprint() if fingerprint else mnist.fingerprint(config.dataset, config.data_dir)
    known = recorded.data_sha256 if recorded else ""
    if known and known != sha256:
        where = config.data_dir if is_own else mnist.dataset_root(config.dataset, config.data_dir)
        raise DataError(
            f"the {config.dataset} dataset at {where} has changed since this run first started "
            f"(SHA-256 {known[:12]}…, now {sha256[:12]}…), so results would "
            f"differ.{mnist.rendered_by(config.dataset, config.data_dir)} Restore the "
            f"{'images' if is_own else 'files'}, or submit a new run. [CD0608]"
        )
    return sha256


@dataclass(frozen=True)
class _Origin:
    """Checkpoint from which an attempt resumes, if any, and the settings it implies."""

    reference_world_size: int
    source: Path | None = None
    step: int = 0
    best: Best | None = None
    precision: str = ""
    """Its training precision, if the configuration does not set one."""


def _choose_checkpoint(
    config: TrainConfig,
    attempt: Attempt,
    recorded: Agreement | None,
    world_size: int,
    data_sha256: str,
) -> _Origin:
    """Choose the checkpoint to resume from, and check its compatibility."""
    source, _ = resumable.source_of(attempt)
    if source is None and config.init_from:
        source = catalog.find(config.init_from)
    if source is None:
        # A run that restarts at step 0 uses the current number of ranks as reference.
        earlier = None if catalog.given_up_attempt(attempt.run) else recorded
        origin = _Origin((earlier.reference_world_size if earlier else 0) or world_size)
    else:
        content = state.load(source)
        check_fits(source, content, config, data_sha256=data_sha256)
        before = content["config"]
        changed = changes(before, vars(config))
        if changed and not config.allow_config_change:
            raise CheckpointError(
                f"the checkpoint {source} was trained with another configuration: "
                f"{'; '.join(changed)}. Use the former options, or add "
                "--allow-config-change. [CD0703]"
            )
        batch_size, accumulate = before["batch_size"], before["gradient_accumulation_steps"]
        assert isinstance(batch_size, int) and isinstance(accumulate, int)
        origin = _Origin(
            config.reference_world_size(
                world_size, content["global_batch_size"], batch_size * accumulate
            ),
            source,
            step=content["step"],
            best=Best(**content["best"]) if content["best"] else None,
            precision=content["precision"] if config.precision == "auto" else "",
        )
    if problem := config.uneven_batch(origin.reference_world_size, world_size):
        raise TrainingError(problem, code="CD0105")
    return origin


def check_fits(path: Path, content: Content, config: TrainConfig, *, data_sha256: str) -> None:
    """Raise CheckpointError for the checkpoint of another model, dataset, optimizer or program.

    data_sha256: fingerprint of this run's training set.
    """
    if "config" not in content:
        raise CheckpointError(f"the checkpoint {path} was saved by another program. [CD0704]")
    for name in ("model", "dataset", "optimizer"):
        theirs, ours = content["config"].get(name), getattr(config, name)
        if theirs != ours:
            raise CheckpointError(
                f"the checkpoint {path} was trained with --{name} {theirs}, this run has --{name} "
                f"{ours}. Use --{name} {theirs}, or start without --init-from. [CD0703]"
            )
    theirs = content["data_sha256"]
    if theirs != data_sha256:
        raise CheckpointError(
            f"the dataset has changed since the checkpoint {path}: expected images with SHA-256 "
            f"{theirs[:16]}..., found {data_sha256[:16]}... in {config.data_dir}. "
            "Give the directory of the former images (--data-dir), or start a new run."
            f"{mnist.rendered_by(config.dataset, config.data_dir)} [CD0608]"
        )


def _publish(
    config: TrainConfig,
    attempt: Attempt,
    terms: Agreement,
    origin: _Origin,
    data_sha256: str,
    environ: Mapping[str, str],
) -> Agreement:
    """Create the attempt's directories, and record the common settings."""
    source = resumable.publish(
        attempt,
        origin.source,
        origin.step,
        keep_last=config.keep_last,
        world_size=terms.world_size,
        hosts=terms.hosts,
        environ=environ,
        best=origin.best,
    )
    precision = origin.precision or terms.precision
    agreed = dataclasses.replace(
        terms,
        precision=precision,
        # fp16 adapts its loss scale at each step, which a graph cannot do.
        cuda_graph=terms.cuda_graph and precision != "fp16",
        run_dir=str(attempt.run.path),
        attempt=attempt.number,
        resume=str(source.resolve()) if source else "",
        global_batch_size=config.step_size * origin.reference_world_size,
        reference_world_size=origin.reference_world_size,
        data_sha256=data_sha256,
        lr=config.peak_lr(origin.reference_world_size),
    )
    files.write_record(attempt.run.resolved, agreed, indent=2)
    return agreed


Sets = tuple[Images | Loader, Images | Loader]


def load_datasets(
    config: TrainConfig,
    env: DistEnv,
    store: RunStore,
    reading: mnist.Reading | OwnSets | None,
    device: torch.device,
    *,
    data_sha256: str,
) -> tuple[Sets, mnist.SharedDataset | None]:
    """Load the training and test sets; also return the data that this rank shares until `close`.

    Collective over the default process group. With --data-pipeline memory the first rank of a node
    reads the files and the other ranks map its memory; a rank that cannot do so reads the files.
    reading: the read in progress, on the first rank of a node; for a user dataset on every rank.
    data_sha256: the fingerprint on rank 0; a user dataset must have it on every rank.

    Raises DataError for a missing or incomplete dataset, PeerError if the reading rank failed, and
    TrainingError if a user function fails.
    """
    key = f"data/{env.node_rank}"
    if isinstance(reading, OwnSets):
        _read_on_first_rank(env, store, key, reading.load)
        if env.local_rank:
            _first_rank_message(store, env, key)
        if reading.fingerprint() != data_sha256:
            raise DataError(
                f"--dataset {config.dataset} returns other data on rank {env.rank} on "
                f"{socket.gethostname()} than on rank 0. All ranks need the same images in the "
                "same order: seed random numbers, sort file lists. [CD0608]"
            )
        return reading.on(device), None

    def read() -> mnist.SharedRef | None:
        if env.rank:  # rank 0 has already checked
            mnist.ensure(config.dataset, config.data_dir, {"synthetic": generate})
        return reading.wait().ref() if reading else None

    _read_on_first_rank(env, store, key, read)
    if config.data_pipeline == "loader":
        train_set, test_set = (
            mnist.torchvision_set(config.dataset, config.data_dir, train=each)
            for each in (True, False)
        )
        loaded = (
            Loader(train_set, device, config.num_workers),
            Loader(test_set, device, config.num_workers),
        )
        return loaded, None
    shared = reading.wait() if reading else _take(config, env, store, key)
    train, test = (Images(*shared.tensors(train=each), device) for each in (True, False))
    return (train, test), shared


def _read_on_first_rank(
    env: DistEnv, store: RunStore, key: str, read: Callable[[], mnist.SharedRef | None]
) -> None:
    """Read the dataset on the first rank of each node, and publish a reference for the other ranks.

    A user function thus downloads only once: rank 0 has already called it.
    """
    fault = None
    if env.local_rank == 0:
        message = {}
        try:
            if ref := read():
                message = dataclasses.asdict(ref)
        except ClusterDDPError as error:
            fault, message = error, {"error": str(error)}
        rendezvous.put(store, key, message)
    dist.barrier()
    if fault:  # not before: the other ranks wait in the barrier
        raise fault


def _take(config: TrainConfig, env: DistEnv, store: RunStore, key: str) -> mnist.SharedDataset:
    ref = files.load(mnist.SharedRef, _first_rank_message(store, env, key))
    try:
        return mnist.take(ref)
    except (OSError, ValueError) as error:
        log.info(
            f"rank {env.rank} on {socket.gethostname()} cannot map the dataset of its node's first "
            f"rank and reads the files: {error}"
        )
        return mnist.read(config.dataset, config.data_dir)


def _first_rank_message(store: RunStore, env: DistEnv, key: str) -> Mapping[str, object]:
    """Return the message of this node's first rank; raises PeerError if that rank failed."""
    message = rendezvous.ask(store, env, key, "the dataset of its node's first rank") or {}
    if "error" in message:
        raise PeerError(f"the first rank of this node has no dataset: {message['error']}")
    return message
