"""The runs of a comparison as they stand: found by its name, each read into a `Trial`."""

import re
from collections.abc import Sequence
from pathlib import Path

from clusterddp import log
from clusterddp.comparison.results import DONE, INTERRUPTED, Trial
from clusterddp.comparison.rows import Row
from clusterddp.errors import EXIT_INTERRUPTED, RequestError
from clusterddp.run.lookup import all_runs, find_run, statuses
from clusterddp.run.progress import latest_report
from clusterddp.run.run_dir import RunDir
from clusterddp.run.state import FAILED
from clusterddp.run.status import RunStatus

_LAST_BYTES = 4096


def run_name(name: str, row: Row, turn: int, turns: int) -> str:
    """`NAME-ddp-2`, and `NAME-ddp-2-r3` where each row is repeated."""
    return f"{name}-{row.name}{f'-r{turn}' if turns > 1 else ''}"


def trials_of(root: Path, texts: Sequence[str]) -> list[Trial]:
    """What became of runs; each text is the name of a comparison, or a run as `find_run` finds it.

    A run of a comparison whose request is damaged is left out, which is logged. Raises
    RequestError where there is none, or one that trains nothing.
    """
    known = all_runs(root)
    found: dict[Path, tuple[Row, RunDir]] = {}
    for text in texts:
        of_it = re.compile(re.escape(text) + r"-(single|d?dp-\d+)(-r\d+)?")
        own = [run for run in known if of_it.fullmatch(run.name)]
        meant = own or [find_run(root, text)]
        damaged: list[RequestError] = []
        for run in meant:
            try:
                found[run.path] = Row.of(run.load_spec()), run
            except RequestError as error:
                damaged.append(error)
        if len(damaged) == len(meant):
            raise damaged[0]
        for why in damaged:
            log.info(f"left out: {why}")
    current = statuses([run for _, run in found.values()])
    return [
        trial(row, run, status) for (row, run), status in zip(found.values(), current, strict=True)
    ]


def trial(row: Row, run: RunDir, status: RunStatus) -> Trial:
    """A run as it stands."""
    if status.state == DONE:
        report = latest_report(run, status.attempt)
        if row.strategy == "dp" and report.get("device") == "cpu":
            return Trial(row, run.name, FAILED, "it saw no GPU, and the CPU has no DataParallel")
        return Trial(row, run.name, DONE, report=report)
    if status.exit_code == EXIT_INTERRUPTED:
        return Trial(row, run.name, INTERRUPTED)
    return Trial(row, run.name, status.state, _why(run, status))


def last_words(run: RunDir) -> str:
    """The last line that a run of one process, or the process that controls it, has printed."""
    return _last_line(run.job_log) or _last_line(run.rank_log(0))


def _why(run: RunDir, status: RunStatus) -> str:
    said = status.first_failure
    # A rank that is alone in its process leaves no other record of its error.
    if not said and status.launcher == "local" and re.fullmatch(r"exit code \d+", status.detail):
        said = last_words(run)
    return (said or status.detail).partition("\n")[0]


def _last_line(path: Path) -> str:
    try:
        content = path.read_bytes()[-_LAST_BYTES:].decode(errors="replace").strip()
    except OSError:
        return ""
    return content.splitlines()[-1] if content else ""
