"""Lookup of runs and sweeps by name, job id, directory or pattern."""

import contextlib
import difflib
import fnmatch
import os
from collections.abc import Sequence
from pathlib import Path

from clusterddp import log
from clusterddp.errors import ClusterDDPError, RequestError
from clusterddp.run import events
from clusterddp.run.attempt import latest
from clusterddp.run.history import History
from clusterddp.run.run_dir import RunDir, SweepDir, directories, find_in_other_dirs, find_runs

_PATTERN = frozenset("*?[")
DEFAULT_ROOT = "jobs"
"""Default runs directory, below the current directory."""


def find_run(root: Path, text: str | None) -> RunDir:
    """Find a run by name, job id or directory; the latest run if `text` is None.

    If it is not below `root`, the user's other runs directories are searched. Raises RequestError
    if there is no such run, or if a job id belongs to several runs.
    """
    runs = find_runs(root)
    if text is None:
        if not runs:
            raise RequestError(
                f"there are no runs in the directory '{root}'. Start one with 'clusterddp submit', "
                "or use --runs-dir DIR. [CD0501]"
            )
        return runs[-1]
    for run in runs:
        if run.name == text:
            return run
    if "/" in text and _is_run(text):
        return RunDir(Path(text))
    if SweepDir(root / text).is_sweep:
        raise RequestError(
            f"{text} is a sweep, but this command needs one run. Name one of its trials, such "
            f"as {text}-0. [CD0502]"
        )
    holders = [run for run in runs if text in job_ids(run)]
    if len(holders) == 1:
        return holders[0]
    if holders:
        names = ", ".join(run.name for run in holders)
        raise RequestError(
            f"the job id {text} belongs to several runs: {names}. Name one of them. [CD0502]"
        )
    others = find_in_other_dirs(RunDir, root, text, lambda run: text in job_ids(run))
    if len(others) == 1:
        log.info(f"{text} is {others[0].path}")
        return others[0]
    if others:
        paths = ", ".join(str(run.path) for run in others)
        raise RequestError(
            f"there is no run {text!r} in '{root}', but there are several elsewhere: {paths}. "
            "Give the directory of one of them. [CD0502]"
        )
    if not runs and not _is_run(text):
        raise RequestError(
            f"there is no run {text!r} in the directory '{root}', which has no runs. Use "
            "--runs-dir DIR. [CD0501]"
        )
    hint = _hint(runs, text)
    if text and _is_run(text):
        hint = f" For the run in the directory of that name, type {'./' + text!r}."
    raise RequestError(f"there is no run {text!r} in '{root}'.{hint} [CD0501]")


def is_run_of(root: Path, text: str) -> bool:
    """Return whether a text is the name or a job id of a run below this runs directory."""
    return _is_run(str(root / text)) or any(text in job_ids(run) for run in find_runs(root))


def _is_run(text: str) -> bool:
    return os.path.isfile(Path(text, "spec.json"))  # noqa: PTH113 -- False for a name that is too long


def job_ids(run: RunDir) -> set[str]:
    """Return the job ids of a run's submissions, or of its manually started ranks.

    For an array task: its own id (12), its name (11_1) and the array's id (11).
    """
    recorded = events.read(run.events)
    if not recorded:
        with contextlib.suppress(OSError):  # an unreadable run must not hide others
            record = (attempt := latest(run)) and attempt.read_record()
            recorded = [events.Event(job_id=record.job_id)] if record else []
    elements = [event.array_task for event in recorded if event.array_task]
    arrays = [name.partition("_")[0] for name in elements]
    return {event.job_id for event in recorded if event.job_id} | {*elements, *arrays}


def find_sweeps(runs_dir: Path) -> list[SweepDir]:
    """List the readable sweeps below a runs directory, latest last.

    Raises RequestError if the directory cannot be read.
    """
    return directories(SweepDir, runs_dir)


def find_sweep(runs_dir: Path, text: str) -> SweepDir | None:
    """Find a sweep by name, directory or job id of its array; None if there is none.

    If it is not below `runs_dir`, the user's other runs directories are searched. Raises
    RequestError if the directory cannot be read.
    """
    for path in (runs_dir / text, Path(text)):
        if (path.parent == runs_dir or "/" in text) and SweepDir(path).is_sweep:
            return SweepDir(path)
    if text.isdecimal():
        sweeps = reversed(find_sweeps(runs_dir))
        if found := next((sweep for sweep in sweeps if text in arrays_of(sweep)), None):
            return found
    others = find_in_other_dirs(SweepDir, runs_dir, text, lambda sweep: text in arrays_of(sweep))
    if len(others) != 1 or is_run_of(runs_dir, text):
        return None
    log.info(f"{text} is {others[0].path}")
    return others[0]


def select(root: Path, text: str) -> list[RunDir]:
    """Return the runs that a text names: one run, a sweep's trials, or the matches of a pattern.

    The id of a sweep's array selects the trials in this array. Raises RequestError if there are no
    such runs.
    """
    sweep = find_sweep(root, text)
    if sweep and text.isdecimal() and sweep.name != text:
        sent = History.read(sweep).every(events.Submitted)
        return [sweep.trial(i) for each in sent if each.job_id == text for i in each.indices]
    if sweep:
        return sweep.trials
    if not is_pattern(text):
        return [find_run(root, text)]
    found = [run for run in find_runs(root) if fnmatch.fnmatchcase(run.name, text)]
    if not found:
        raise RequestError(f"no run in '{root}' matches {text!r}. [CD0501]")
    return found


def names_several(root: Path, text: str) -> bool:
    """Return whether a text may name several runs: a sweep or a pattern."""
    return is_pattern(text) or find_sweep(root, text) is not None


def select_each(root: Path, texts: Sequence[str]) -> tuple[list[RunDir], list[ClusterDDPError]]:
    """Return the runs that the texts name, without duplicates, and the errors."""
    runs: dict[Path, RunDir] = {}
    wrong: list[ClusterDDPError] = []
    for text in texts:
        try:
            runs |= {run.path: run for run in select(root, text)}
        except RequestError as error:
            wrong.append(error)
    return list(runs.values()), wrong


def group_trials(root: Path, runs: Sequence[RunDir]) -> list[RunDir]:
    """Return the runs below a runs directory, with each sweep instead of its trials.

    The trials of a sweep with a damaged request are returned themselves.
    """
    sweeps = [sweep for sweep in find_sweeps(root) if sweep.read_spec()]
    trials = {run.path for sweep in sweeps for run in sweep.trials}
    others = [*(run for run in runs if run.path not in trials), *sweeps]
    return sorted(others, key=lambda run: (run.spec.stat().st_mtime, run.name))


def latest_sweep(root: Path) -> SweepDir | None:
    """Return the sweep of the latest run; None if this run is not a trial of a sweep."""
    runs = find_runs(root)
    return runs[-1].sweep if runs else None


def arrays_of(sweep: SweepDir) -> list[str]:
    """Return the job arrays that were submitted for a sweep, latest last."""
    return [each.job_id for each in History.read(sweep).every(events.Submitted) if each.job_id]


def is_pattern(text: str) -> bool:
    """Return whether a text is a pattern, such as `lr-*`."""
    return not _PATTERN.isdisjoint(text)


def _hint(runs: Sequence[RunDir], text: str) -> str:
    names = [run.name for run in runs]
    near = difflib.get_close_matches(text, names, n=3) or [n for n in names if text in n][-3:]
    if near:
        return f" Did you mean {', '.join(near)}?"
    return f" The latest are {', '.join(names[-3:])}; 'clusterddp runs' lists them all."
