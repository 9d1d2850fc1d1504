"""Sums up the attempts of a run: why each ended, what was done twice, what was lost."""

from dataclasses import replace

from clusterddp.run import events
from clusterddp.run.attempt import Attempt, attempts
from clusterddp.run.records import AttemptSummary
from clusterddp.run.run_dir import RunDir


def summaries(run: RunDir) -> list[AttemptSummary]:
    """The attempts of a run in which ranks met, the latest last."""
    causes = {
        event.attempt: event.cause
        for event in events.read(run.events)
        if isinstance(event, events.Ended)
    }
    met = [(one, record) for one in attempts(run) if (record := one.read_record())]
    found = []
    for index, (attempt, record) in enumerate(met):
        after = met[index + 1][1] if index + 1 < len(met) else None
        began = record.began or 0.0
        resumed_step = after.step if after else 0
        reached = max(record.step, last_step(attempt), resumed_step)
        last_word = attempt.read_last_word()
        own_cause = last_word.cause if last_word else ""
        summary = AttemptSummary(
            attempt=attempt.number,
            job_id=record.job_id,
            hosts=record.hosts,
            began=began,
            first_step=record.step,
            last_step=reached,
            cause=causes.get(attempt.number) or own_cause or ("killed" if after else ""),
        )
        if after:
            lost = (after.began or 0.0) - (after.saved or began)
            summary = replace(
                summary, steps_done_twice=reached - resumed_step, seconds_lost=round(lost, 3)
            )
        found.append(summary)
    return found


def last_step(attempt: Attempt) -> int:
    """How far an attempt came, as its own last word or its last sign of life tells."""
    last_word = attempt.read_last_word()
    if last_word and last_word.step is not None:
        return last_word.step
    return attempt.read_sign_of_life().step or 0
