"""Finds the run that is meant by a name, a job id or a directory, and asks how runs are doing."""

import contextlib
import difflib
from collections.abc import Sequence
from pathlib import Path

from clusterddp.errors import ClusterDDPError, RequestError
from clusterddp.run import events
from clusterddp.run.attempt import latest
from clusterddp.run.run_dir import RunDir, find_runs
from clusterddp.run.status import RunStatus, run_status
from clusterddp.run.submission import jobs_to_ask, latest_submission
from clusterddp.slurm.queries import query

DEFAULT_ROOT = "jobs"
"""Usual output root, below the current folder."""


def all_runs(root: Path) -> list[RunDir]:
    """Return the runs below the output root, the latest last.

    Raises RequestError where it cannot be read.
    """
    try:
        return find_runs(root)
    except OSError as error:
        raise RequestError(
            f"--output-root: {root} cannot be read: {error.strerror}. Name a folder of runs that "
            "you can read."
        ) from None


def find_run(root: Path, text: str | None) -> RunDir:
    """Find the run of a name, job id or directory; the latest when `text` is None.

    Raises RequestError when there is none, or a job id that belongs to several.
    """
    runs = all_runs(root)
    if text is None:
        if not runs:
            raise RequestError(
                f"there is no run below {root}. Start one with 'clusterddp submit', or name the "
                "folder that holds your runs with --output-root."
            )
        return runs[-1]
    for run in runs:
        if run.name == text:
            return run
    if "/" in text and (Path(text) / "spec.json").is_file():
        return RunDir(Path(text))
    holders = [run for run in runs if text in _job_ids(run)]
    if len(holders) == 1:
        return holders[0]
    if holders:
        names = ", ".join(run.name for run in holders)
        raise RequestError(f"the job id {text} belongs to several runs: {names}. Name one of them.")
    raise RequestError(f"there is no run {text!r} below {root}.{_hint(runs, text)}")


def statuses(runs: Sequence[RunDir]) -> list[RunStatus]:
    """Return how the runs are doing; asks Slurm once for all of them, and only where it must."""
    submissions = [latest_submission(events.read(run.events)) for run in runs]
    states = query(jobs_to_ask(submissions))
    return [run_status(run, states) for run in runs]


def find_each(root: Path, texts: Sequence[str]) -> list[RunDir]:
    """Find each run, as `find_run` does; one that is named twice is there once."""
    return list({run.path: run for run in (find_run(root, text) for text in texts)}.values())


def find_those(root: Path, texts: Sequence[str]) -> tuple[list[RunDir], list[ClusterDDPError]]:
    """Find each run once; returns the runs and, for the other names, the errors."""
    runs: dict[Path, RunDir] = {}
    wrong: list[ClusterDDPError] = []
    for text in texts:
        try:
            run = find_run(root, text)
        except RequestError as error:
            wrong.append(error)
        else:
            runs[run.path] = run
    return list(runs.values()), wrong


def _job_ids(run: RunDir) -> set[str]:
    """Return a run's job ids: of its submissions, or of the job whose shell started its ranks.

    Of an array's element they are its own, 12, its name, 11_1, and the array's, 11.
    """
    recorded = events.read(run.events)
    if not recorded:
        with contextlib.suppress(OSError):  # a run that cannot be read hides no other
            record = (attempt := latest(run)) and attempt.read_record()
            recorded = [events.Event(job_id=record.job_id)] if record else []
    elements = [event.array_element for event in recorded if event.array_element]
    arrays = [name.partition("_")[0] for name in elements]
    return {event.job_id for event in recorded if event.job_id} | {*elements, *arrays}


def _hint(runs: Sequence[RunDir], text: str) -> str:
    names = [run.name for run in runs]
    near = difflib.get_close_matches(text, names, n=3) or [n for n in names if text in n][-3:]
    if near:
        return f" Did you mean {', '.join(near)}?"
    if names:
        return f" The latest are {', '.join(names[-3:])}; 'clusterddp jobs' lists them all."
    return " There are no runs there; --output-root names the folder that holds them."
