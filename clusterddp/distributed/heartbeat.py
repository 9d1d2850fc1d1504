"""What each rank posts about itself for the watchdogs of all, and which ranks post no more."""

import json
from collections.abc import Mapping
from typing import NamedTuple

from clusterddp.distributed.phase import Phase, Place


class Posting(NamedTuple):
    """What a rank tells the others about itself."""

    host: str
    place: Place
    still_seconds: float
    """How long it has not moved."""
    number: int
    """Of this posting: where it does not grow, the rank does not answer."""
    left: bool = False

    def to_json(self) -> str:
        return json.dumps(self._asdict())

    @classmethod
    def from_json(cls, text: bytes) -> "Posting | None":
        """None where it is no posting, as the store takes anything from anybody."""
        try:
            fields = json.loads(text)
            step, turn, phase = map(int, fields["place"])
            return cls(
                host=printable(str(fields["host"])),
                place=Place(step, turn, Phase(phase)),
                still_seconds=float(fields["still_seconds"]),
                number=int(fields["number"]),
                left=bool(fields["left"]),
            )
        except (ValueError, KeyError, TypeError):
            return None


class Look(NamedTuple):
    """What the store held of some ranks at one moment."""

    ranks: range
    postings: Mapping[int, Posting]
    suspect: str
    """What the speaking rank has found."""


class Signs:
    """Which of some ranks still answer: those whose postings' number grows."""

    def __init__(self, ranks: range, quiet: float) -> None:
        self.ranks, self._quiet = ranks, quiet
        self._began = self._looked_at = 0.0
        self._look: Look | None = None
        # For each rank its number, when that was first seen, whether it has grown since we look.
        self._seen: dict[int, tuple[int | None, float, bool]] = {}

    def update(self, look: Look, now: float) -> None:
        if look is self._look:
            return  # the store has not answered again; that alone silences nobody
        if self._look is None:
            self._began = now
        self._look, self._looked_at = look, now
        for rank in self.ranks:
            number = look.postings[rank].number if rank in look.postings else None
            if rank not in self._seen:
                self._seen[rank] = number, now, False
            elif number != self._seen[rank][0]:
                self._seen[rank] = number, now, True

    def ready(self) -> bool:
        return self._looked_at - self._began >= self._quiet

    def silent(self, now: float, still_seconds: float) -> dict[int, float]:
        """Each rank that does not answer, with the seconds since its last sign.

        One that has given none since we look stopped about when everything did.
        """
        return {
            rank: now - at if grown else still_seconds
            for rank, (_, at, grown) in self._seen.items()
            if self._looked_at - at >= self._quiet
        }


def printable(text: str) -> str:
    return "".join(character for character in text if character.isprintable())[:1000]
