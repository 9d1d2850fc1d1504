"""Values of a record that may be absent, damaged, or of another version: as the type, or None."""

import math
from collections.abc import Mapping
from typing import Any


def as_number(value: object) -> float | None:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:  # JSON's integers have no bound
        return None
    return found if math.isfinite(found) else None


def loss(record: Mapping[str, Any], name: str) -> float | None:
    """A number that may be none: that a training has diverged is what its loss has to tell."""
    value = record.get(name)
    return value if isinstance(value, float) and not math.isfinite(value) else as_number(value)


def as_whole(value: object) -> int | None:
    """A number, without its fraction."""
    found = as_number(value)
    return None if found is None else int(found)


def number(record: Mapping[str, Any], name: str) -> float | None:
    return as_number(record.get(name))


def whole(record: Mapping[str, Any], name: str) -> int | None:
    return as_whole(record.get(name))


def numbers(record: Mapping[str, Any], name: str) -> list[float | None]:
    """A list of numbers; what is none of them is None, so that each keeps its place."""
    value = record.get(name)
    return [as_number(item) for item in value] if isinstance(value, list) else []


def text(record: Mapping[str, Any], name: str) -> str:
    """A text; empty without one."""
    value = record.get(name)
    return value if isinstance(value, str) else ""


def texts(record: Mapping[str, Any], name: str) -> list[str]:
    """A list of texts."""
    value = record.get(name)
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def objects(record: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """A list of objects."""
    value = record.get(name)
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
