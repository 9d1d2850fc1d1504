"""Read and write a run's files: atomically, and with types whatever process wrote them."""

import dataclasses
import errno
import json
import math
import os
import stat
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

T = TypeVar("T")

Loss = Annotated[float, "may be NaN or infinite"]
"""A number that a record may give as NaN or infinite: the training has diverged."""

_WRONG = object()
_made: dict[type, dict[str, Callable[[object], object]]] = {}


def read(kind: type[T], path: Path, *, strict: bool = False) -> T | None:
    """Read the record in a JSON file; None if it is missing, incomplete or of another type."""
    return load(kind, read_json(path), strict=strict)


def load(kind: type[T], content: object, *, strict: bool = False) -> T | None:
    """Build a record, a dataclass, from parsed JSON.

    A field that is missing or of the wrong type gets its default. Unknown names are ignored, since
    another version may have written them. Returns None if the content is not an object or a field
    without a default cannot be read; with strict, if any field cannot be read.
    """
    if not isinstance(content, dict):
        return None
    known = {
        name: convert(content[name])
        for name, convert in _converters(kind).items()
        if name in content
    }
    values = {name: value for name, value in known.items() if value is not _WRONG}
    if strict and len(values) < len(known):
        return None
    try:
        return kind(**values)
    except TypeError:
        return None


def read_json(path: Path) -> dict[str, object] | None:
    """Read the object in a JSON file; None if it is missing or incomplete."""
    try:
        value = json.loads(read_file(path))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def finite(value: object) -> Any:
    """Return a value as plain JSON types; a loss that is not a number becomes null."""
    return json.loads(json.dumps(value), parse_constant=lambda _: None)


def number(value: object) -> float | None:
    """Return a finite number; None for anything else."""
    finite = _finite(value)
    return finite if isinstance(finite, float) else None


def read_json_lines(path: Path) -> Iterator[dict[str, object]]:
    """Yield the objects of a JSON-lines file; a line left incomplete by a kill is skipped."""
    if not path.is_file():
        return
    yield from parse_json_lines(path.read_bytes())


def read_lines(kind: type[T], path: Path) -> Iterator[T]:
    """Yield the readable records of a JSON-lines file. Raises OSError."""
    return (record for line in read_json_lines(path) if (record := load(kind, line)) is not None)


def parse_json_lines(content: bytes) -> Iterator[dict[str, object]]:
    """Yield the objects in a part of a JSON-lines file, whose first and last lines may be cut."""
    for line in content.decode(errors="replace").splitlines():
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            yield value


def read_file(path: Path) -> bytes:
    """Read a regular file. Raises OSError for anything else, without waiting at a FIFO."""
    with open(path, "rb", opener=_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return file.read()


def _at_once(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_NONBLOCK)


def read_tail(path: Path, most: int, *, since: int = 0) -> bytes:
    """Read the last bytes of a file, from an offset on; none if it cannot be read."""
    try:
        with open(path, "rb", opener=_at_once) as file:  # not a FIFO
            file.seek(max(since, file.seek(0, os.SEEK_END) - most))
            return file.read()
    except OSError:
        return b""


def write_atomically(path: Path, content: bytes, *, sync: bool = True) -> None:
    """Write a file atomically and durably: temporary file, fsync, rename, fsync of the directory.

    Mode 0600. Raises OSError, and then leaves an existing file unchanged. sync: False skips both
    fsyncs, for a record that may be lost with its host.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    if sync:
        sync_folder(path.parent)


def create(path: Path, content: bytes = b"") -> bool:
    """Create a file exclusively. Return False if it exists already.

    Exactly one process succeeds, also across hosts on a shared file system. Mode 0600. Raises
    OSError, and then leaves no incomplete file.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return False
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return True


def create_record(path: Path, record: object) -> bool:
    """Write a dataclass or JSON types, as `create` does."""
    return create(path, f"{json.dumps(record, default=dataclasses.asdict)}\n".encode())


def age(path: Path, folder: Path) -> float:
    """Return the seconds since a file's last change, by the file system's clock; inf if missing.

    folder: a writable directory on the same file system. Raises OSError.
    """
    if not os.path.lexists(path):
        return math.inf
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".now-") as probe:
        now = os.fstat(probe.fileno()).st_mtime
        try:  # after the probe: a slow disk may delay that for seconds
            return now - path.stat().st_mtime
        except OSError:
            return math.inf


def write_record(
    path: Path, record: object, *, indent: int | None = None, sync: bool = True
) -> None:
    """Write a dataclass or JSON types, as `write_atomically` does. Raises OSError."""
    text = json.dumps(record, indent=indent, default=dataclasses.asdict)
    write_atomically(path, f"{text}\n".encode(), sync=sync)


def append_json_line(
    path: Path, content: Mapping[str, object], mode: int = 0o600, *, sync: bool = True
) -> None:
    """Append an object to a JSON-lines file in one write, and sync it. Raises OSError.

    mode: mode of a new file.
    """
    line = json.dumps(content, default=dataclasses.asdict)
    append_line(path, line, os.O_CREAT, sync=sync, mode=mode)


def append_line(
    path: Path, line: str, flags: int, *, sync: bool = False, mode: int = 0o600
) -> None:
    """Append a line in one write. Raises OSError. flags: of open(2). mode: mode of a new file.

    Concurrent writers do not mix their lines. An incomplete last line, left by a kill or a full
    disk, is ended first.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | flags, mode)
    try:
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        content = f"\n{line}\n".encode() if torn else f"{line}\n".encode()
        if os.write(descriptor, content) < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        if sync:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if sync and not size:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a directory's entries durable. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _converters(kind: Any) -> dict[str, Callable[[object], object]]:
    """Return the functions that convert the JSON values of a class's fields, cached by class."""
    if kind not in _made:
        _made[kind] = {field.name: _converter(field.type) for field in dataclasses.fields(kind)}
    return _made[kind]


def _converter(annotation: Any) -> Callable[[object], object]:
    """Return a function that converts a JSON value to this type, or returns _WRONG."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        [inner] = [_converter(each) for each in arguments if each is not type(None)]
        return lambda value: None if value is None else inner(value)
    if origin is tuple:
        item, may_be_none = _converter(arguments[0]), type(None) in get_args(arguments[0])
        return lambda value: _items(value, item, may_be_none)
    if origin is Mapping:
        inner = _converter(arguments[1])
        return lambda value: _entries(value, inner)
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return lambda value: _WRONG if (made := load(annotation, value)) is None else made
    return _PLAIN[annotation]


def _items(value: object, convert: Callable[[object], object], may_be_none: bool) -> object:
    """Convert the items of a list; an invalid one becomes None if allowed, else is dropped."""
    if not isinstance(value, list | tuple):  # a tuple comes from a record built in this process
        return _WRONG
    items = (convert(item) for item in value)
    kept = (item for item in items if may_be_none or item is not _WRONG)
    return tuple(None if item is _WRONG else item for item in kept)


def _entries(value: object, convert: Callable[[object], object]) -> object:
    if not isinstance(value, dict):
        return _WRONG
    entries = ((name, convert(item)) for name, item in value.items())
    return {name: item for name, item in entries if item is not _WRONG}


def _loss(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _WRONG
    try:
        return float(value)
    except OverflowError:  # JSON's integers have no bound
        return _WRONG


def _finite(value: object) -> object:
    number = _loss(value)
    return number if isinstance(number, float) and math.isfinite(number) else _WRONG


def _whole(value: object) -> object:
    if not isinstance(value, int | float) or _finite(value) is _WRONG:
        return _WRONG
    return int(value)


def _of(kind: type, value: object) -> object:
    return value if isinstance(value, kind) else _WRONG


_PLAIN: dict[object, Callable[[object], object]] = {
    float: _finite,
    Loss: _loss,
    int: _whole,
    str: partial(_of, str),
    bool: partial(_of, bool),
    object: lambda value: value,
}
