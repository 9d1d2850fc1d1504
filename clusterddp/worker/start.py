"""How an attempt starts: rank 0 settles what is auto, makes the folders, chooses the checkpoint."""

import dataclasses
import json
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from clusterddp.checkpoints import catalog, state
from clusterddp.checkpoints.files import Best
from clusterddp.data import mnist, prepare
from clusterddp.distributed import agreement
from clusterddp.distributed.agreement import Agreement, Hello
from clusterddp.errors import CheckpointError, DataError, TrainingError
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
