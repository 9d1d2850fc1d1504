"""Starts an attempt: rank 0 settles what is auto, makes the folders, chooses the checkpoint.

Then each rank obtains its two sets: from its node's one copy in memory, read image by image, or
from a user's own function.
"""

import dataclasses
import json
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from clusterddp import log
from clusterddp.checkpoints import catalog, state
from clusterddp.checkpoints.files import Best
from clusterddp.data import mnist, prepare, shared_memory
from clusterddp.data.in_memory import Images
from clusterddp.data.loader import Loaded
from clusterddp.data.user_dataset import OwnSets
from clusterddp.distributed import agreement, rendezvous
from clusterddp.distributed.agreement import Agreement, Hello
from clusterddp.errors import CheckpointError, ClusterDDPError, DataError, PeerError, TrainingError
from clusterddp.ranks.dist_env import DistEnv
from clusterddp.request import user_functions
from clusterddp.request.spec import JobSpec, Resources
from clusterddp.request.train_config import TrainConfig, changes
from clusterddp.run import attempt as attempts
from clusterddp.run import files
from clusterddp.run.attempt import Attempt
from clusterddp.run.files import write_atomically
from clusterddp.run.records import AttemptRecord
from clusterddp.run.run_dir import RunDir
from clusterddp.slurm import forms
from clusterddp.training import metrics, optimizer

Sets = tuple[Images | Loaded, Images | Loaded, shared_memory.Held | None]


def decide(
    config: TrainConfig,
    run_dir: Path | None,
    number: int | None,
    hellos: Sequence[Mapping[str, Any]],
    identity: AttemptRecord,
    fingerprint: Callable[[], str] | None = None,
) -> Agreement:
    """What holds for all ranks of this attempt.

    number: the attempt that the starting side has made; without it one is made here.
    identity: job_id, restart, host and pid, for attempt.json.
    fingerprint: gives the dataset's where it was read already, or is a person's own; else its
        files are read for it.

    Raises TrainingError, DataError, CheckpointError, NotStarted or Superseded.
    """
    run = RunDir((run_dir or Path("jobs", time.strftime("train-%Y%m%d-%H%M%S"))).resolve())
    recorded = files.read(Agreement, run.resolved)
    agreed = agreement.decide(config, [Hello(**hello) for hello in hellos], recorded)
    if not user_functions.is_reference(config.dataset):
        prepare.ensure(config.dataset, config.data_dir, may_fetch=False)
    sha256 = fingerprint() if fingerprint else mnist.fingerprint(config.dataset, config.data_dir)
    agreed = dataclasses.replace(agreed, run_dir=str(run.path), data_sha256=sha256)
    _check_data(config, recorded, agreed)
    try:
        run.make(run.attempts)
        _record_request(run, config, agreed)
        attempt = _attempt(run, number, identity, config)
        agreed = _go_on(config, agreed, attempt, recorded, identity)
        lr = optimizer.peak_lr(config, agreed.reference_world_size)
        content = json.dumps({**dataclasses.asdict(agreed), "lr": lr}, indent=2)
        write_atomically(run.resolved, f"{content}\n".encode())
    except OSError as error:
        raise TrainingError(
            f"rank 0 on {socket.gethostname()} cannot write the run directory {run.path}: "
            f"{error.strerror}. Choose a folder that this host can write."
        ) from None
    return agreed


def _record_request(run: RunDir, config: TrainConfig, agreed: Agreement) -> None:
    """Of ranks that nobody submitted, so that `report` and the other commands know the run."""
    if run.spec.exists() or not forms.RUN_NAME.fullmatch(run.name):
        return
    nodes = len(agreed.hosts)
    even = agreed.world_size % nodes == 0
    spec = JobSpec(
        run_name=run.name,
        run_dir=str(run.path),
        resources=Resources(
            nodes=nodes if even else 1,
            tasks_per_node=agreed.world_size // (nodes if even else 1),
        ),
        python=sys.executable,
        train=config,
        launcher="local",
    )
    write_atomically(run.spec, spec.to_json().encode())


def _attempt(
    run: RunDir,
    number: int | None,
    identity: AttemptRecord,
    config: TrainConfig,
) -> Attempt:
    if number is None:
        attempts.await_silence(run, identity.job_id, config.rendezvous_timeout)
        return attempts.begin(run)
    attempt = Attempt(run, number)
    if not attempt.path.is_dir():
        raise TrainingError(
            f"{attempt.path} is gone: the run directory was removed or replaced while the job "
            "was starting. Submit the run again."
        )
    return attempt


def _go_on(
    config: TrainConfig,
    agreed: Agreement,
    attempt: Attempt,
    recorded: Agreement | None,
    identity: AttemptRecord,
) -> Agreement:
    """Choose the checkpoint, check that it fits, and lay the attempt's folders out."""
    run = attempt.run
    # An agent starts the ranks of an attempt again, within the job, when one of them has failed.
    again = attempt.checkpoints.is_dir()
    own = catalog.newest_in(attempt.checkpoints) if again else None
    own = own or catalog.source(run)
    source = own or (catalog.find(config.resume) if config.resume else None)
    best = None
    # A run that begins at step 0 again begins with the ranks that there are now.
    before_now = None if catalog.given_up_attempt(run) else recorded
    step, reference = 0, (before_now.reference_world_size if before_now else 0) or agreed.world_size
    if source is not None:
        content = state.load(source)
        state.check_fits(source, content, config, data_sha256=agreed.data_sha256)
        _check_configuration(source, content["config"], config)
        step, earlier = int(content["step"]), content["config"]
        before = earlier["batch_size"] * earlier.get("accumulate", 1)
        best = Best(**content["best"]) if content["best"] else None
        if config.precision == "auto":
            agreed = dataclasses.replace(agreed, precision=content.get("precision", "fp32"))
        reference = config.reference_world_size(
            agreed.world_size, content["global_batch_size"], before
        )
    agreed = dataclasses.replace(
        agreed,
        attempt=attempt.number,
        reference_world_size=reference,
        global_batch_size=config.step_size * reference,
    )
    problem = config.uneven_batch(reference, agreed.world_size)
    if problem:
        raise TrainingError(problem)
    found = source
    if not again:
        found = catalog.adopt(attempt, source, config.keep_last, best=best)
    agreed = dataclasses.replace(agreed, resume=str(found.resolve()) if found else "")
    metrics.copy_history(run.metrics, attempt.metrics, step if own else 0)
    attempt.end.unlink(missing_ok=True)
    # What an attempt has gained counts from its first start.
    origin = attempt.read_record() or AttemptRecord(
        step=step,
        saved=source.stat().st_mtime if source else None,
        resumed_from=_shown(run, source),
    )
    attempts.publish(
        attempt,
        dataclasses.replace(
            identity,
            step=origin.step,
            saved=origin.saved,
            resumed_from=origin.resumed_from,
            starts_in_job=origin.starts_in_job + 1,
            world_size=agreed.world_size,
            hosts=agreed.hosts,
        ),
    )
    return agreed


def _shown(run: RunDir, source: Path | None) -> str | None:
    if source is None:
        return None
    path = source.resolve()
    return str(path.relative_to(run.path)) if path.is_relative_to(run.path) else str(path)


def _check_data(config: TrainConfig, recorded: Agreement | None, agreed: Agreement) -> None:
    known = recorded.data_sha256 if recorded else ""
    if known and known != agreed.data_sha256:
        own = user_functions.is_reference(config.dataset)
        where = config.data_dir if own else mnist.folder(config.dataset, config.data_dir)
        raise DataError(
            f"the {config.dataset} dataset at {where} has changed since this run first started "
            f"(SHA-256 {known[:12]}…, now {agreed.data_sha256[:12]}…): it would not train to the "
            f"same weights.{mnist.rendered_by(config.dataset, config.data_dir)} Put the "
            f"{'images' if own else 'files'} back, or submit a new run."
        )


def _check_configuration(source: Path, before: Mapping[str, Any], config: TrainConfig) -> None:
    changed = changes(before, config)
    if changed and not config.allow_changed:
        raise CheckpointError(
            f"the checkpoint {source} was trained with another configuration: "
            f"{'; '.join(changed)}. Give the options as they were, or add --allow-changed."
        )


def obtain(
    config: TrainConfig,
    env: DistEnv,
    store: Store,
    reading: shared_memory.Reading | OwnSets | None,
    device: torch.device,
    *,
    data_sha256: str,
) -> Sets:
    """The training set, the test set, and what this rank holds of them for others until `close`.

    Collective over the default process group. With --data-pipeline memory the first rank of a node
    reads the files and the others map what it has read; a rank that cannot says so and reads them.
    reading: on the first rank of a node, what it has begun to read; of a person's own dataset on
        every rank.
    data_sha256: the fingerprint that rank 0 has found; an own set has to be that on every rank.

    Raises DataError when there is no whole set here, PeerError where the rank that was to read
    it failed, and TrainingError where a person's function fails.
    """
    key = f"data/{env.node_rank}"
    if isinstance(reading, OwnSets):
        _in_turn(reading, env, store, key)
        if reading.fingerprint() != data_sha256:
            raise DataError(
                f"--dataset {config.dataset} gives rank {env.rank} on {socket.gethostname()} "
                "another set than rank 0. Every rank has to get the same images in the same "
                "order: seed what is random, sort what is listed."
            )
        return (*reading.on(device), None)
    held, fault = None, None
    if env.local_rank == 0:
        try:
            if env.rank:  # rank 0 has made sure of it already
                prepare.ensure(config.dataset, config.data_dir, may_fetch=False)
            held = reading.held() if reading else None
        except DataError as error:
            fault = error
        offer = {"error": str(fault)} if fault else held.offer() if held else {}
        rendezvous.put(store, key, offer)
    dist.barrier()
    if fault:  # only now: the others would wait here for this rank
        raise fault
    if config.data_pipeline == "loader":
        read = mnist.torchvision_set
        train_set, test_set = (
            Loaded(read(config.dataset, config.data_dir, train=train), device, config.workers)
            for train in (True, False)
        )
        return train_set, test_set, None
    if held is None:
        held = reading.held() if reading else _take(config, env, store, key)
    train, test = (Images(*held.tensors(train=each), device) for each in (True, False))
    return train, test, held


def _in_turn(sets: OwnSets, env: DistEnv, store: Store, key: str) -> None:
    """Have a function that downloads do so once: rank 0 has called it already, then comes the
    first rank of every node, then all others.
    """
    fault = None
    if env.local_rank == 0:
        try:
            sets.load()
        except ClusterDDPError as error:
            fault = error
        rendezvous.put(store, key, {"error": str(fault)} if fault else {})
    dist.barrier()
    if fault:  # only now: the others would wait here for this rank
        raise fault
    if env.local_rank:
        _offer_of_first(store, env, key)
        sets.load()


def _take(config: TrainConfig, env: DistEnv, store: Store, key: str) -> shared_memory.Held:
    offer = _offer_of_first(store, env, key)
    try:
        return shared_memory.take(offer)
    except (OSError, ValueError, LookupError, TypeError) as error:
        log.info(shared_memory.why_alone(error, env.rank))
        return shared_memory.read(config.dataset, config.data_dir)


def _offer_of_first(store: Store, env: DistEnv, key: str) -> dict[str, Any]:
    """What the first rank of this node has put there; raises PeerError where it has failed."""
    offer = rendezvous.ask(store, env, key, "the offer of its node's first rank") or {}
    if "error" in offer:
        raise PeerError(f"the first rank of this node has no dataset: {offer['error']}")
    return dict(offer)
