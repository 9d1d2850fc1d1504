"""The lines of events.jsonl, as a script of one's own may write and read them."""

import time
from typing import Any

from clusterddp.files import append_json_line, read_json_lines
from clusterddp.run.events import parse
from clusterddp.run.run_dir import RunDir


class Line(dict[str, Any]):
    """Fields of a line; one that is left out has its default."""

    def __missing__(self, name: str) -> Any:
        return getattr(parse({"event": self.get("event")}), name)


def add_event(run: RunDir, event: str, **fields: Any) -> None:
    """Append one line."""
    append_json_line(run.events, {"event": event, "time": round(time.time(), 3), **fields})


def read_events(run: RunDir) -> list[Line]:
    """All lines, in the order in which they were written."""
    return [Line(content) for content in read_json_lines(run.events)]


def kinds(run: RunDir) -> list[str]:
    """The names of the events, in their order."""
    return [event["event"] for event in read_events(run)]
