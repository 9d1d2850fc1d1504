"""What released versions wrote is read by this one, with the verdicts of the version's own."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from clusterddp import files
from clusterddp.checkpoints.catalog import Best
from clusterddp.errors import RequestError
from clusterddp.run import events, outcome, records
from clusterddp.run.run_dir import RunDir, SweepDir
from clusterddp.submission.snapshot import Snapshot
from tests.kept.reading import VERSIONS, Kept, losses, seen

KINDS: Mapping[str, type] = {
    "alive": records.Liveness, "attempt.json": records.AttemptRecord, "best.json": Best,
    "end.json": records.FinalRecord, "evaluation.json": records.EvaluationRecord,
    "preflight.json": records.PreflightRecord, "report.json": records.Report,
    "resolved.json": records.Agreement, "stop": records.StopRequest,
}  # fmt: skip
"""The records of one object, by the names of their files."""


@pytest.fixture(scope="module", params=VERSIONS, ids=lambda version: version.name)
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kept:
    return Kept.unpack(request.param, tmp_path_factory.mktemp("kept"))


def test_the_commands_say_of_each_run_what_its_own_version_said(kept: Kept) -> None:
    assert list(differences(kept.expected["seen"], seen(kept))) == []


def test_a_difference_is_named_by_its_place() -> None:
    told = {"runs": {"a": {"step": 3, "epoch": 1}}, "all": [1, 2]}
    now = {"runs": {"a": {"step": 4, "epoch": 1, "new": 0}}, "all": [1]}
    assert list(differences(told, now)) == ["runs a step: 3, now 4", "all: [1, 2], now [1]"]


def test_each_record_is_read_whole(kept: Kept) -> None:
    read = 0
    for path in sorted(kept.folder.glob("jobs/**/*")):
        name = path.relative_to(kept.folder)
        if path.is_file() and "code" not in name.parts and (why := why_not_whole(path)):
            pytest.fail(f"{name}: {why}")
        read += path.name in KINDS
    assert read > len(KINDS)


@pytest.mark.parametrize("change", [{"world_size": "many"}, {"formerly": 1}])
def test_a_record_that_is_not_read_whole_is_told(
    kept: Kept, tmp_path: Path, change: dict[str, object]
) -> None:
    content = files.read_json(kept.folder / "jobs/finished/attempts/0001/attempt.json")
    assert content
    path = tmp_path / "attempt.json"
    path.write_text(json.dumps(content | change))
    assert next(iter(change)) in why_not_whole(path)


def test_each_checkpoint_has_the_loss_that_its_version_measured(kept: Kept) -> None:
    assert losses(kept) == pytest.approx(kept.expected["losses"], rel=1e-3)


def test_each_run_has_a_page_a_text_and_its_logs(kept: Kept, tmp_path: Path) -> None:
    names = [run.name for run in kept.runs]
    page = tmp_path / "page.html"
    kept.typed("report", *names, f"--html={page}")
    html, text = page.read_text(), kept.typed("report", *names)
    assert [name for name in names if name not in html or name not in text] == []
    for run in kept.runs:
        for log in run.logs.glob("rank-*.log"):
            rank = log.stem.removeprefix("rank-")
            assert kept.typed("logs", run.name, f"--rank={rank}") == log.read_text(), log


def differences(told: Any, now: Any, place: str = "") -> Iterator[str]:
    """Yield what differs from what was told; a field that is new is no difference."""
    if isinstance(told, dict) and isinstance(now, dict):
        for name, value in told.items():
            yield from differences(value, now.get(name), f"{place} {name}".strip())
    elif isinstance(told, list) and isinstance(now, list) and len(told) == len(now):
        for number, (value, other) in enumerate(zip(told, now, strict=True)):
            yield from differences(value, other, f"{place} {number}")
    elif told != now:
        yield f"{place}: {told}, now {now}"


def why_not_whole(path: Path) -> str:
    """Return what this version does not read of a record; empty if it reads all, or of no kind."""
    if path.name in KINDS:
        return _lost(KINDS[path.name], files.read_json(path))
    if path.name == "events.jsonl":
        kinds = {each.kind: each for each in events.Event.__subclasses__()}
        lines = list(files.read_json_lines(path))
        return "".join(_lost(kinds.get(str(each.pop("event"))), each) for each in lines)
    if path.name == "metrics.jsonl":
        return "".join(_lost(records.MetricsLine, line) for line in files.read_json_lines(path))
    if path.name.startswith("node-") and path.suffix == ".json":
        content = files.read_json(path) or {}
        return "".join(_lost(records.Outcome, each) for each in content[outcome.RANKS])
    if path.name == "code.json":
        return "" if Snapshot.read(path) else "no snapshot"
    if path.name in ("spec.json", "sweep.json"):
        run = (RunDir if path.name == "spec.json" else SweepDir)(path.parent)
        try:
            run.load_spec()
        except RequestError as error:
            return str(error)
    return ""


def _lost(kind: Any, content: Any) -> str:
    """Return what a kind of record does not take of a content."""
    if kind is None or not isinstance(content, dict):
        return f"no kind of record for {content}"
    known = {each.name for each in dataclasses.fields(kind)}
    unknown = sorted(set(content) - known)
    if unknown and kind is not records.PreflightRecord:  # the measurements are for people
        return f"{kind.__name__} has no {unknown}"
    if files.load(kind, content, strict=True) is None:
        return f"{kind.__name__} does not take {content}"
    return ""
