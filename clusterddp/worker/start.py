"""Starts an attempt: rank 0 agrees, checks the data, chooses the checkpoint and publishes; then
every rank obtains its two sets.
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

from clusterddp import files, log
from clusterddp.checkpoints import catalog, state
from clusterddp.checkpoints.catalog import Best
from clusterddp.checkpoints.state import Content
from clusterddp.data import mnist
from clusterddp.data.loader import Images, Loaded
from clusterddp.data.synthetic import generate
from clusterddp.data.user_dataset import OwnSets
from clusterddp.distributed import agreement, rendezvous
from clusterddp.distributed.agreement import Hello
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
    hellos: Sequence[Hello],
    fingerprint: Callable[[], str] | None = None,
) -> Agreement:
    """Decide on rank 0 what holds for all ranks of this attempt, and publish it.

    number: the attempt that the starting side has made; without it one is made here.
    fingerprint: gives the dataset's where it was read already, or is a user's own; else its
        files are read for it.

    Raises TrainingError, DataError, CheckpointError, StartRefused or Superseded.
    """
    run = RunDir((run_dir or Path("jobs", time.strftime("train-%Y%m%d-%H%M%S"))).resolve())
    recorded = files.read(Agreement, run.resolved)
    terms = agreement.decide(config, hellos, recorded)
    data_sha256 = _check_data(config, recorded, fingerprint)
    with writing(f"the run directory {run.path}", "Choose a folder that this host can write."):
        run.make(run.attempts)
        resumable.record_request(run, terms.world_size, terms.hosts, train=config)
        job_id, patience = environ.get("SLURM_JOB_ID", ""), config.rendezvous_timeout
        attempt = resumable.take_attempt(run, number, job_id, patience)
        origin = _choose_checkpoint(config, attempt, recorded, terms.world_size, data_sha256)
        agreement.check_precision(config, origin.precision, hellos)
        if origin.precision == "fp16" and config.cuda_graph == "on":
            raise TrainingError(
                f"--cuda-graph on against fp16, in which the checkpoint {origin.source} was "
                "trained: its loss scale is chosen step by step. Leave --cuda-graph out, or choose "
                "another --precision. [CD0808]"
            )
        return _publish(config, attempt, terms, origin, data_sha256, environ)


@contextmanager
def writing(what: str, remedy: str = "") -> Iterator[None]:
    """Raise TrainingError, on rank 0, where the body cannot write; `what` names file or folder."""
    try:
        yield
    except OSError as error:
        words = f"rank 0 on {socket.gethostname()} cannot write {what}: {error.strerror}. {remedy}"
        raise TrainingError(words.rstrip(), code="CD0504") from None


def _check_data(
    config: TrainConfig, recorded: Agreement | None, fingerprint: Callable[[], str] | None
) -> str:
    """Return the dataset's fingerprint. Raises DataError where the run had another before."""
    is_own = is_reference(config.dataset)
    if not is_own:
        mnist.ensure(config.dataset, config.data_dir, {"synthetic": generate})
    sha256 = fingerprint() if fingerprint else mnist.fingerprint(config.dataset, config.data_dir)
    known = recorded.data_sha256 if recorded else ""
    if known and known != sha256:
        where = config.data_dir if is_own else mnist.folder(config.dataset, config.data_dir)
        raise DataError(
            f"the {config.dataset} dataset at {where} has changed since this run first started "
            f"(SHA-256 {known[:12]}…, now {sha256[:12]}…): it would not train to the "
            f"same weights.{mnist.rendered_by(config.dataset, config.data_dir)} Put the "
            f"{'images' if is_own else 'files'} back, or submit a new run. [CD0608]"
        )
    return sha256


@dataclass(frozen=True)
class _Origin:
    """The checkpoint from which an attempt resumes, if any, and what it settles."""

    reference_world_size: int
    source: Path | None = None
    step: int = 0
    best: Best | None = None
    precision: str = ""
    """The precision it was trained at, where the configuration leaves it open."""


def _choose_checkpoint(
    config: TrainConfig,
    attempt: Attempt,
    recorded: Agreement | None,
    world_size: int,
    data_sha256: str,
) -> _Origin:
    """Choose the checkpoint to resume from, and check that it fits."""
    source, _ = resumable.source_of(attempt)
    if source is None and config.init_from:
        source = catalog.find(config.init_from)
    if source is None:
        # A run that begins at step 0 again begins with the ranks that there are now.
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
                f"{'; '.join(changed)}. Give the options as they were, or add "
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
            f"the dataset has changed since the checkpoint {path}: it was trained on images with "
            f"SHA-256 {theirs[:16]}..., those in {config.data_dir} have {data_sha256[:16]}... "
            "Name the folder with the former ones (--data-dir), or start a new run."
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
    """Lay the attempt's folders out, and record what was agreed on."""
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
        # fp16's loss scale is chosen step by step, which no graph holds.
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


Sets = tuple[Images | Loaded, Images | Loaded]


def obtain(
    config: TrainConfig,
    env: DistEnv,
    store: RunStore,
    reading: mnist.Reading | OwnSets | None,
    device: torch.device,
    *,
    data_sha256: str,
) -> tuple[Sets, mnist.Held | None]:
    """Obtain the training set and the test set; and what this rank holds for others until `close`.

    Collective over the default process group. With --data-pipeline memory the first rank of a node
    reads the files and the others map what it has read; a rank that cannot logs it and reads them.
    reading: on the first rank of a node, what it has begun to read; of a user dataset on
        every rank.
    data_sha256: the fingerprint on rank 0; a user dataset has to have it on every rank.

    Raises DataError when there is no whole set here, PeerError where the rank that was to read
    it failed, and TrainingError where a user function fails.
    """
    key = f"data/{env.node_rank}"
    if isinstance(reading, OwnSets):
        _have_first_read(env, store, key, reading.load)
        if env.local_rank:
            _said_by_first(store, env, key)
        if reading.fingerprint() != data_sha256:
            raise DataError(
                f"--dataset {config.dataset} gives rank {env.rank} on {socket.gethostname()} "
                "another set than rank 0. Every rank has to get the same images in the same "
                "order: seed what is random, sort what is listed. [CD0608]"
            )
        return reading.on(device), None

    def read() -> mnist.Offer | None:
        if env.rank:  # rank 0 has made sure of it already
            mnist.ensure(config.dataset, config.data_dir, {"synthetic": generate})
        return reading.held().offer() if reading else None

    _have_first_read(env, store, key, read)
    if config.data_pipeline == "loader":
        train_set, test_set = (
            mnist.torchvision_set(config.dataset, config.data_dir, train=each)
            for each in (True, False)
        )
        loaded = Loaded(train_set, device, config.workers), Loaded(test_set, device, config.workers)
        return loaded, None
    held = reading.held() if reading else _take(config, env, store, key)
    train, test = (Images(*held.tensors(train=each), device) for each in (True, False))
    return (train, test), held


def _have_first_read(
    env: DistEnv, store: RunStore, key: str, read: Callable[[], mnist.Offer | None]
) -> None:
    """Have the first rank of every node read the dataset, and leave an offer to the others.

    A user function that downloads thus does so once: rank 0 has called it before.
    """
    fault = None
    if env.local_rank == 0:
        message = {}
        try:
            if offer := read():
                message = dataclasses.asdict(offer)
        except ClusterDDPError as error:
            fault, message = error, {"error": str(error)}
        rendezvous.put(store, key, message)
    dist.barrier()
    if fault:  # only now: the others would wait here for this rank
        raise fault


def _take(config: TrainConfig, env: DistEnv, store: RunStore, key: str) -> mnist.Held:
    offer = files.load(mnist.Offer, _said_by_first(store, env, key))
    try:
        return mnist.take(offer)
    except (OSError, ValueError) as error:
        log.info(
            f"rank {env.rank} on {socket.gethostname()} reads the dataset itself, as it cannot map "
            f"the copy of its node's first rank: {error}"
        )
        return mnist.read(config.dataset, config.data_dir)


def _said_by_first(store: RunStore, env: DistEnv, key: str) -> Mapping[str, object]:
    """Return what this node's first rank has left; raises PeerError where it has failed."""
    message = rendezvous.ask(store, env, key, "the offer of its node's first rank") or {}
    if "error" in message:
        raise PeerError(f"the first rank of this node has no dataset: {message['error']}")
    return message
