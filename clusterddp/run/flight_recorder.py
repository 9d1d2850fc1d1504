"""torch's flight recorder of NCCL: the file of its dump, and which rank the others waited for.

A dump has up to 2,000 calls with their stacks. The parent of each rank reads the rank's own dump
and records a few numbers, so that no process reads the dumps of all ranks. A dump is a pickle, but
of plain data: it is read without torch, and a class in it is refused.
"""

import io
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from clusterddp.files import read_file
from clusterddp.formatting import clean, ranks
from clusterddp.run.attempt import Attempt
from clusterddp.run.records import Collective, Outcome

# The newer name takes precedence (getCvarString in torch/csrc/distributed/c10d/Utils.hpp).
_FILE = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_ON_TIMEOUT = "TORCH_NCCL_DUMP_ON_TIMEOUT"
_MAX_BYTES = 64 << 20
_MAX_GROUPS, _MAX_TEXT = 64, 120
_UNNAMED = ("", "undefined")
# The other calls may have another size on each rank.
_EQUAL_SIZES = ("all_reduce", "broadcast", "reduce")
_LIBRARY = "/torch/"


def variables(attempt: Attempt, environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables with which NCCL's watchdog dumps the recorder into the attempt.

    torch 2.7 to 2.15 dump it at a timeout by default, into the user's home directory; earlier ones
    only with the third variable. The second name of the file is for torch before 2.9. The user's
    own values take precedence.
    """
    prefix = str(attempt.nccl_trace())
    own = f"/{Path(prefix).name}"  # also that of a run that has started this one
    known = any(not environ.get(name, own).endswith(own) for name in _FILE)
    file = {} if known else dict.fromkeys(_FILE, prefix)
    return {**file, _ON_TIMEOUT: environ.get(_ON_TIMEOUT) or "1"}


def read_dump(path: Path) -> tuple[Collective, ...]:
    """Read the last collective calls of a rank, by group; empty without a usable dump."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            return ()
        dump = _PlainUnpickler(io.BytesIO(read_file(path))).load()
        return tuple(_collectives(dump))[:_MAX_GROUPS]
    except Exception:  # the program may have written anything there
        return ()


class _PlainUnpickler(pickle.Unpickler):
    """Reader of pickles that have only numbers, texts, lists and dicts."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"{module}.{name} in a dump of plain data")


def _collectives(dump: Mapping[str, Any]) -> Iterator[Collective]:
    """Yield the state of each group; see DumpEntries in torch's FlightRecorder.hpp (version 2.x).

    Point-to-point calls have other numbers and are left out.
    """
    status, groups = dump.get("pg_status") or {}, dump["pg_config"]
    calls: dict[str, list[Mapping[str, Any]]] = {name: [] for name in groups if name}
    for entry in dump["entries"]:
        if not entry.get("is_p2p"):
            calls.setdefault(entry["process_group"][0], []).append(entry)
    for name, own in calls.items():
        config = groups.get(name) or {}
        text = own[-1]["process_group"][1] if own else config.get("desc", "")
        known = status.get(str(own[-1]["pg_id"]), {}) if own else {}
        last = max([known.get("last_enqueued_collective", 0), *(_number(each) for each in own)])
        waiting = [each for each in own if not (each["retired"] or each["state"] == "completed")]
        first = min(waiting, key=_number, default=None)
        yield Collective(
            group=clean(name if text in _UNNAMED else f"{name} ({text})")[:_MAX_TEXT],
            size=len(str(config.get("ranks", "")).split(",")) if config else 0,
            last=max(int(last), 0),
            open=_number(first) if first else 0,
            call=_describe(first) if first else "",
            place=_place(first.get("frames") or ()) if first else "",
        )


def _number(entry: Mapping[str, Any]) -> int:
    return int(entry["collective_seq_id"])


def _describe(entry: Mapping[str, Any]) -> str:
    """Return the call with the types and sizes of its input: `all_reduce Float [[1048576]]`."""
    name = str(entry["profiling_name"]).partition(":")[2]
    kinds = ",".join(sorted(set(entry.get("input_dtypes") or ())))
    return clean(f"{name} {kinds} {entry.get('input_sizes') or ''}".strip())[:_MAX_TEXT]


def _place(frames: Iterable[Mapping[str, Any]]) -> str:
    """Return the innermost frame outside of torch: `step (train.py:31)`."""
    for frame in frames:
        if _LIBRARY not in (path := str(frame["filename"])):
            return clean(f"{frame['name']} ({Path(path).name}:{frame['line']})")[:_MAX_TEXT]
    return ""


def find_absent(outcomes: Sequence[Outcome]) -> str:
    """Return which ranks did not join which call; empty if no dump shows an open call.

    A rank that itself waits in another group is a consequence, and is named only without another.
    """
    groups: dict[str, dict[int, Collective]] = {}
    for outcome in outcomes:
        for each in outcome.collectives:
            groups.setdefault(each.group, {})[outcome.rank] = each
    waiting = {rank for members in groups.values() for rank, c in members.items() if c.open}
    found = [_judge(name, of, waiting) for name, of in groups.items()]
    return min(found, default=(0, ""))[1]


def _judge(group: str, members: Mapping[int, Collective], waiting: set[int]) -> tuple[int, str]:
    """Return what one group's open call shows, and its place in the order of causes.

    A lost node leaves no dumps, and of several ranks in one task only some are read.
    """
    numbers = [each.open for each in members.values() if each.open]
    if not numbers:
        return 9, ""
    number = min(numbers)
    here = [rank for rank, each in members.items() if each.open == number]
    first = members[here[0]]
    what = f"call {number} of NCCL's group {group}, {first.call}"
    if first.place:
        what += f" in {first.place}"
    if absent := [rank for rank, each in members.items() if each.last < number]:
        causes = [rank for rank in absent if rank not in waiting]
        said = f"{ranks(causes or absent)} did not join {what}, where {ranks(here)} waited"
        return (0 if causes else 1), said
    by_call: dict[str, list[int]] = {}
    for rank in here:
        name = members[rank].call.partition(" ")[0]
        by_call.setdefault(members[rank].call if name in _EQUAL_SIZES else name, []).append(rank)
    if len(by_call) > 1:
        each = "; ".join(f"{ranks(those)}: {call}" for call, those in by_call.items())
        return 0, f"the ranks made different calls as {number} of NCCL's group {group}: {each}"
    lacking = first.size - len(members)
    if lacking > 0:
        unread = f"the dumps of {lacking} of its ranks were not read"
        return 2, f"{ranks(here)} waited in {what}; {unread}"
    return 3, f"all known ranks joined {what}, but it did not complete: a GPU or the network"
