"""Records that any version, or a killed writer, may have written."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from clusterddp import files
from clusterddp.run import events, records
from clusterddp.run.events import Ended, Event, Failure, Started, Submitted
from clusterddp.run.records import AttemptRecord, FinalRecord, Outcome, Report, TaskError

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "fields.md"
KINDS = [kind for kind in vars(records).values() if dataclasses.is_dataclass(kind)]
FAILURE = {"rank": 1, "host": "h01", "reason": "boom", "log": "logs/rank-1.log"}


def test_events_are_written_with_the_fields_that_differ_from_their_defaults(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    failure = Failure(1, "h01", "boom", "logs/rank-1.log")
    events.add(path, Ended(job_id="7", exit_code=1, first_failure=failure, step=None))
    line = json.loads(path.read_text())
    assert line.pop("time") > 0
    assert line == {
        **{"event": "ended", "job_id": "7", "exit_code": 1},
        "first_failure": {**FAILURE, "exit_code": None},
    }
    assert events.read(path)[0].first_failure == failure  # type: ignore[attr-defined]


def test_a_torn_line_and_an_unknown_event_cost_no_other(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(
        '{"event": "submitted", "job_id": "7", "launcher": "sbatch", "of_tomorrow": [1]}\n'
        '{"event": "resurrected", "job_id": "8", "attempt": 3}\n[1]\n{"event": ["started"]}\n'
        '{"event": "started", "att'
    )
    submitted, unknown, nameless = events.read(path)
    assert submitted == Submitted(job_id="7", launcher="sbatch")
    assert (type(unknown), unknown.job_id, unknown.attempt) == (Event, "8", 3)
    assert nameless == Event()
    events.add(path, Started(job_id="7"))
    assert events.read(path)[-1].job_id == "7"


@pytest.mark.parametrize("value", [None, "x", [], {}, True, 1e400, 10**400])
def test_a_field_of_another_type_has_its_default(value: object) -> None:
    """The other fields are kept, and nothing that stands in a record raises."""
    for kind in (AttemptRecord, FinalRecord, Report):
        assert files.load(kind, dict.fromkeys(vars(kind()), value)) is not None
    kept = files.load(AttemptRecord, {"step": value, "host": "h01", "world_size": 2.0})
    assert kept == AttemptRecord(host="h01", world_size=2)


def test_a_record_without_what_it_must_have_is_none() -> None:
    whole = {
        **{"rank": 0, "local_rank": 0, "node_rank": 0, "host": "h01", "pid": 5, "job_id": "7"},
        **{"restart": 0, "step_id": "0", "started": 1.0, "error": {"type": "E", "message": "m"}},
    }
    assert files.load(Outcome, whole, strict=True) == Outcome(
        0, 0, 0, "h01", 5, "7", 0, "0", 1.0, error=TaskError("E", "m")
    )
    for name in ("rank", "host", "started"):
        assert files.load(Outcome, {**whole, name: []}) is None
    assert files.load(Outcome, {**whole, "exit_code": "1"}, strict=True) is None
    assert files.load(Outcome, [whole]) is None


@pytest.mark.parametrize("kind", [*Event.__subclasses__(), *KINDS], ids=lambda kind: kind.__name__)
def test_every_field_is_documented(kind: Any) -> None:
    text = DOCS.read_text()
    names = [field.name for field in dataclasses.fields(kind)]
    assert [name for name in names if f"`{name}`" not in text] == []
    assert f"`{getattr(kind, 'kind', '')}`" in text or kind in KINDS
