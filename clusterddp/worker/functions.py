"""Any function on several ranks of this workstation: what they return, or who failed and why."""

import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from clusterddp.errors import EXIT_FAILED, RequestError, TrainingError
from clusterddp.processes import start_methods
from clusterddp.processes.group import TaskGroup
from clusterddp.processes.signals import held_back
from clusterddp.ranks import from_flags
from clusterddp.worker.workstation import free_port, rank_environment


def call_on_ranks(
    function: Callable[..., Any], arguments: Sequence[Any], procs: int, start_method: str
) -> list[Any]:
    """Call it in so many processes, each with its rank in os.environ; what they return, by rank.

    All print where this process does. When one fails the others are ended. Raises TrainingError
    with the traceback of the rank that failed first, and RequestError where the function cannot go
    to other processes this way.
    """
    called: object = (function, tuple(arguments))
    if start_method != "fork":
        called = _pickled(function, arguments)
    start_methods.get_ready(start_method)
    ranks = from_flags.local_ranks(procs, free_port())
    with tempfile.TemporaryDirectory(prefix="clusterddp-launch-") as name, TaskGroup() as group:
        folder = Path(name)
        with held_back({signal.SIGINT}):  # a rank that starts meanwhile would be left running
            for env in ranks:
                call = (called, folder, env.rank)
                group.call(start_method, _rank, call, rank_environment(env), tee=True)
        statuses = group.wait()
        if any(statuses):
            raise TrainingError(_first_failure(folder, statuses, group.first_failed))
        return [_read_result(folder, rank) for rank in range(procs)]


def _pickled(function: Callable[..., Any], arguments: Sequence[Any]) -> bytes:
    """The function by its name, for a process that imports it anew."""
    try:
        main = sys.modules["__main__"]
        if function.__module__ == "__main__" and not hasattr(main, "__file__"):
            raise pickle.PicklingError("it is defined in a notebook's cell or at a prompt")
        return pickle.dumps((function, tuple(arguments)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise RequestError(
            f"{getattr(function, '__qualname__', function)} cannot be sent to another process: "
            f"{error}. Use start_method='fork', or a function of a module, and arguments that can "
            "be pickled."
        ) from None


def _rank(called: Any, folder: Path, rank: int) -> None:
    """In a rank's process. It has its environment by now: an import may read that already."""
    try:
        function, arguments = pickle.loads(called) if isinstance(called, bytes) else called
        value = function(*arguments)
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code:
            lines = traceback.format_exception(error)
            del lines[1:2]  # this very function
            _fail(folder, rank, "".join(lines).rstrip())
        value = None
    try:
        content = pickle.dumps(value)
    except Exception as error:  # a value's own __reduce__ can raise anything
        words = f"{type(error).__name__}: {error}"
        _fail(folder, rank, f"what rank {rank} returned cannot be pickled: {words}")
    _result(folder, rank).write_bytes(content)


def _fail(folder: Path, rank: int, words: str) -> NoReturn:
    content = {"time": time.time(), "words": words}
    _failure(folder, rank).write_bytes(pickle.dumps(content))
    sys.stdout.flush()
    # Past what the function's libraries do at an exit: a process group that has lost a peer may
    # hang there.
    os._exit(EXIT_FAILED)


def _read_result(folder: Path, rank: int) -> Any:
    try:
        return pickle.loads(_result(folder, rank).read_bytes())
    except FileNotFoundError:
        raise TrainingError(f"rank {rank} left with exit code 0 and returned nothing.") from None
    except Exception as error:  # what builds the value anew can raise anything
        raise TrainingError(
            f"what rank {rank} returned cannot be unpickled here: {type(error).__name__}: {error}"
        ) from error


def _first_failure(folder: Path, statuses: Sequence[int], first: int | None) -> str:
    """Which rank failed first, and its own words.

    first: the one whose process ended first; another may have raised before, and ended later.
    """
    said: dict[int, dict[str, Any]] = {}
    for rank in range(len(statuses)):
        path = _failure(folder, rank)
        if path.exists():
            said[rank] = pickle.loads(path.read_bytes())
    if first in said or first is None:
        first = min(said, key=lambda rank: float(said[rank]["time"]))
        return f"rank {first} of {len(statuses)} failed first:\n{said[first]['words']}"
    status = statuses[first]
    words = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"
    return f"rank {first} of {len(statuses)} failed first: {words}."


def _result(folder: Path, rank: int) -> Path:
    return folder / f"result-{rank}"


def _failure(folder: Path, rank: int) -> Path:
    return folder / f"failure-{rank}"
