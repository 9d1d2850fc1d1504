"""What a run has been through: its starts, why each ended, what was done twice, what was lost."""

from dataclasses import dataclass

from clusterddp.run import events
from clusterddp.run.attempt import Attempt, attempts
from clusterddp.run.files import read_json
from clusterddp.run.run_dir import RunDir


@dataclass(frozen=True)
class Chapter:
    """One attempt of a run, as it looks from the next one."""

    attempt: int
    job_id: str
    hosts: list[str]
    began: float
    """When its ranks had met, seconds since the epoch."""
    first_step: int
    """The step of the checkpoint from which it started."""
    last_step: int
    """How far it came, to within two seconds where it was killed."""
    cause: str
    """Why it ended: a word of `requeue`, `killed` where nobody could record it, or empty for the
    latest one."""
    steps_done_twice: int = 0
    seconds_lost: float = 0.0
    """From the saving of what the next attempt went on from until the next one's ranks had met."""


def chapters(run: RunDir) -> list[Chapter]:
    """The attempts of a run in which ranks met, the latest last."""
    causes = {
        event.attempt: event.cause
        for event in events.read(run.events)
        if isinstance(event, events.Ended)
    }
    met = [(one, record) for one in attempts(run) if (record := one.read_record())]
    told = []
    for index, (one, record) in enumerate(met):
        after = met[index + 1][1] if index + 1 < len(met) else None
        first = int(record.get("step") or 0)
        resumed = int(after.get("step") or 0) if after else 0
        reached = max(first, last_step(one), resumed)
        began = float(record.get("began") or 0.0)
        told.append(
            Chapter(
                attempt=one.number,
                job_id=str(record.get("job_id") or ""),
                hosts=[str(host) for host in record.get("hosts") or []],
                began=began,
                first_step=first,
                last_step=reached,
                cause=causes.get(one.number) or _own_word(one) or ("killed" if after else ""),
                steps_done_twice=reached - resumed if after else 0,
                seconds_lost=(
                    round(float(after.get("began") or 0.0) - float(after.get("saved") or began), 3)
                    if after
                    else 0.0
                ),
            )
        )
    return told


def _own_word(attempt: Attempt) -> str:
    """Why it ended, as its ranks have noted it, where no script has recorded that."""
    return str((read_json(attempt.end) or {}).get("cause") or "")


def last_step(attempt: Attempt) -> int:
    """How far an attempt came, as its own last word or its last sign of life tells."""
    for path in (attempt.end, attempt.alive):
        step = (read_json(path) or {}).get("step")
        if isinstance(step, int):
            return step
    return 0
