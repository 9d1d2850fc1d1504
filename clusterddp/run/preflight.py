"""Check the nodes of a job before an attempt's tasks, and record the results."""

import contextlib
import dataclasses
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from clusterddp import files, formatting, log
from clusterddp.preflight import collector, evaluation
from clusterddp.preflight.collector import Collection
from clusterddp.ranks.dist_env import MAX_PORT, MIN_PORT
from clusterddp.run.attempt import Attempt, print_to_job_log
from clusterddp.run.records import PreflightRecord
from clusterddp.slurm.forms import NONCE_VARIABLE

_FORMAT = 1
_OPEN = (
    f"If a firewall forbids it, open ports {MIN_PORT} to {MAX_PORT} between the nodes, "
    "where the ranks meet as well; or submit with --preflight none"
)


def check(
    attempt: Attempt,
    nodes: Sequence[str],
    program: Sequence[str],
    batch_host: Sequence[str],
    gpus: int,
    ranks: int,
    prepare: Callable[[], None],
    ports: Sequence[int] = (),
    is_over: Callable[[], bool] = lambda: False,
) -> PreflightRecord:
    """Check the nodes, log a table, and record the results with the failed nodes.

    program: command of clusterddp on the host. batch_host: its name and address. gpus: per node.
    ranks: number of ranks in the job, for the limits of a process.
    prepare: runs in srun's process before srun. ports: candidates for the listening ports on this
    host and the nodes; the first free one is used. is_over: returns whether the job is ending,
    polled throughout. If the checks cannot run or the job is ending, no node fails.
    """
    began, nonce = time.monotonic(), secrets.token_hex(16)
    environ = {**os.environ, NONCE_VARIABLE: nonce}
    try:
        with contextlib.closing(collector.listen(ports)) as server:
            names = list(filter(None, batch_host))
            port = server.getsockname()[1]
            argv = collector.probe_command(nodes, program, names, port, gpus, ports)
            with collector.started(argv, environ, attempt.preflight_log, prepare) as poll:
                codes = partial(collector.exit_codes, attempt.preflight_log)
                ended = partial(_either, is_over, lambda: poll() is not None)
                collection = collector.collect(server, nodes, nonce, ended, codes)
    except OSError as error:
        collection = Collection(error=error.strerror or str(error))
    took = round(time.monotonic() - began, 3)
    judged = evaluation.evaluate(collection.nodes, collection.unresponsive)
    low_limits = evaluation.low_limits(collection.nodes, ranks)
    remarks = (*collection.remarks, *judged.remarks, *low_limits)
    if collection.error:
        more = f". {_OPEN}" if collection.is_unreachable else f"; {_last_words(attempt)}"
        why = f"{collection.error}{more}".rstrip("; ")
        record = PreflightRecord(f"could not run: {why}", took)
    else:
        rows = evaluation.table(collection.nodes, collection.unresponsive, judged)
        print_to_job_log(formatting.clean(formatting.table(rows)))
        summary = format_summary((node.host for node in collection.nodes), judged.failed, took)
        switches = evaluation.nodes_of_switches(collection.nodes)
        record = PreflightRecord(summary, took, judged.failed, remarks, judged.slow, switches)
    measured = [dataclasses.asdict(node) for node in collection.nodes]
    conclude(
        record, attempt.preflight, {"unresponsive": collection.unresponsive, "nodes": measured}
    )
    return record


def format_summary(hosts: Iterable[str], failed: Mapping[str, str], took: float) -> str:
    """Return a summary of the checks of these hosts; took: seconds."""
    summary = f"{formatting.count(len({*hosts} - {*failed}), 'node')} passed in {took:.1f} s"
    return f"failed: {', '.join(failed)}; {summary}" if failed else summary


def conclude(
    record: PreflightRecord,
    path: Path,
    measured: Mapping[str, object],
    write: Callable[[Path, object], None] = files.write_record,
) -> bool:
    """Log and record the results of the checks. Return whether they could be recorded."""
    log_record(record)
    try:
        write(path, {"format": _FORMAT, **vars(record), **measured})
    except OSError as error:
        log.warning(f"cannot write {path}: {error.strerror}. [CD0518]")
        return False
    return True


def _either(first: Callable[[], bool], second: Callable[[], bool]) -> bool:
    return first() or second()


def note(attempt: Attempt, remark: str) -> None:
    """Add a consequence of the checks to their record."""
    content = files.read_json(attempt.preflight) or {}
    try:
        summary = f"{content.get('summary', '')}; {remark}".removeprefix("; ")
        files.write_record(attempt.preflight, {**content, "summary": summary})
    except OSError as error:
        log.warning(f"cannot write {attempt.preflight}: {error.strerror}. [CD0518]")


def log_record(record: PreflightRecord) -> None:
    """Log the results of the checks, with a line for each failed node."""
    for line in (record.summary, *record.remarks):
        log.info(f"preflight: {formatting.line(line)}")
    for host, reason in record.failed.items():
        log.info(f"preflight: {host} failed: {formatting.line(reason)}")


def _last_words(attempt: Attempt) -> str:
    """Return the last line that srun or a probe printed."""
    text = files.read_tail(attempt.preflight_log, 4096).decode(errors="replace")
    return text.strip().rpartition("\n")[2]
