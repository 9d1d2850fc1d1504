"""The text form of a request, which its spec.json and its script hold: JSON without defaults."""

import dataclasses
import itertools
import json
from typing import Any

from clusterddp.errors import RequestError

FORMAT = 1
_IN_SCRIPT = "#REQUEST "
_COLUMNS = 280


def asked(record: object) -> dict[str, Any]:
    """Return the fields of a record that are not defaults, those of its own records likewise."""
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(record):  # type: ignore[arg-type]
        value = getattr(record, field.name)
        if value != field.default:
            fields[field.name] = asked(value) if dataclasses.is_dataclass(value) else value
    return fields


def lines(fields: dict[str, Any]) -> list[str]:
    """Write fields as JSON in lines of some length; a value is never cut."""
    written = [""]
    for part in json.JSONEncoder().iterencode({"format": FORMAT, **fields}):
        if part.startswith(", ") and len(written[-1]) > _COLUMNS - len(_IN_SCRIPT):
            written[-1] += ","
            written.append(part[2:])
        else:
            written[-1] += part
    return written


def to_script(fields: dict[str, Any]) -> list[str]:
    """Write fields as the comments of a script."""
    return [f"{_IN_SCRIPT}{line}" for line in lines(fields)]


def of_script(script: str) -> str:
    """Return the text that `to_script` has put into a script."""
    behind = itertools.dropwhile(lambda line: not line.startswith(_IN_SCRIPT), script.split("\n"))
    comments = itertools.takewhile(lambda line: line.startswith(_IN_SCRIPT), behind)
    return " ".join(line.removeprefix(_IN_SCRIPT) for line in comments)


def read(text: str, name: str) -> dict[str, Any]:
    """Read fields, with tuples for lists. Raises RequestError for those of a newer version.

    Raises ValueError, KeyError, AttributeError or RecursionError where the text is no record.
    """
    fields: dict[str, Any] = json.loads(text)
    if fields.pop("format") != FORMAT:
        raise RequestError(f"{name} was written by a newer clusterddp; update this one. [CD0506]")
    return {name: _frozen(value) for name, value in fields.items()}


def _frozen(value: object) -> object:
    if isinstance(value, dict):
        return {name: _frozen(item) for name, item in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
