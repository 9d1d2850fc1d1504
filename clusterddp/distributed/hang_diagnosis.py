"""Who keeps all others waiting, judged from what the ranks have posted."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from clusterddp.distributed.heartbeat import Posting
from clusterddp.distributed.phase import Phase


class Verdict(NamedTuple):
    """What is wrong, and with which ranks."""

    kind: str
    """silent, left, behind, level, or alone: a rank that knows only about itself."""
    ranks: tuple[int, ...]
    text: str
    reason: str = ""
    """The same without the ranks' names; empty where none of them is known to hang."""


def judge(
    postings: Mapping[int, Posting],
    silent: Mapping[int, float],
    world_size: int,
    silent_seconds: float,
) -> Verdict:
    """Who keeps the others waiting, when nothing has moved for `silent_seconds`.

    `postings` has the newest of each rank that ever posted, `silent` the seconds since the last
    sign of each rank that does not answer any more.
    """
    if silent:
        # Before those that left: they may have done so for the want of this one.
        first = min(silent)
        sign = (
            f"the last sign of rank {first} came {silent[first]:.0f} s ago, "
            f"{postings[first].place.words()}"
            if first in postings
            else f"rank {first} never gave a sign"
        )
        why = "not answer (stopped, cut off, or stuck in native code)"
        return Verdict(
            "silent",
            tuple(sorted(silent)),
            f"{_who(silent, postings)} {'does' if len(silent) == 1 else 'do'} {why}: {sign}",
            f"it did {why}",
        )
    left = [rank for rank, seen in postings.items() if seen.left and seen.place.phase < Phase.DONE]
    if left:
        place = postings[min(left)].place
        return Verdict(
            "left",
            tuple(sorted(left)),
            f"{_who(left, postings)} left the training, {place.words()}; "
            f"the log of rank {min(left)} says why",
        )
    lowest = min(seen.place for seen in postings.values())
    highest = max(seen.place for seen in postings.values())
    if lowest == highest:
        return Verdict(
            "level",
            (),
            f"all {world_size} ranks are at the same place, {lowest.words()}; "
            "their logs have their stacks",
        )
    behind = sorted(rank for rank, seen in postings.items() if seen.place == lowest)
    moved = min(postings[rank].still_seconds for rank in behind)
    if moved < silent_seconds:
        hint = f"last moved {moved:.0f} s ago"
    else:
        hint = "its log has its stack" if len(behind) == 1 else "their logs have their stacks"
    where = f"{lowest.words()}, while others are {highest.words()}"
    return Verdict(
        "behind",
        tuple(behind),
        f"{_who(behind, postings)} {'is' if len(behind) == 1 else 'are'} behind: {where}; {hint}",
        where,
    )


def _who(ranks: Sequence[int] | Mapping[int, object], postings: Mapping[int, Posting]) -> str:
    """`rank 2 on h02`, `ranks 8, 9 on h02 and rank 12 on h03`."""
    hosts: dict[str, list[int]] = {}
    for rank in sorted(ranks)[:16]:
        hosts.setdefault(f" on {postings[rank].host}" if rank in postings else "", []).append(rank)
    groups = [
        f"{'rank' if len(some) == 1 else 'ranks'} {', '.join(map(str, some))}{host}"
        for host, some in hosts.items()
    ]
    more = [f"{len(ranks) - 16} more"] if len(ranks) > 16 else []
    return " and ".join([*groups, *more])
