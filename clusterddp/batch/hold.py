"""The batch process of a hold: keeps the nodes, and starts runs on them when it is asked to.

A run is a child: a keeper (`launchers.held`) with the run's own controller below it. A signal,
USR1, says that there is a request. The hold outlives its runs. It ends when it was idle for a
while, when the user releases it, or when Slurm ends its job.
"""

import contextlib
import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path

from clusterddp import formatting, log, version
from clusterddp.batch.controller import ScriptOutput, Signals, child_setup
from clusterddp.errors import RequestError, SlurmError
from clusterddp.request.spec import IN_ALLOCATION
from clusterddp.run import events, hold
from clusterddp.run.attempt import print_to_job_log
from clusterddp.run.events import Cause, LostInHold, RunInHold
from clusterddp.run.history import History, withdrawal_cause
from clusterddp.run.hold import Request, Room
from clusterddp.run.run_dir import RunDir
from clusterddp.slurm import client as slurm
from clusterddp.slurm.allocation import allocated
from clusterddp.slurm.client import Ending
from clusterddp.slurm.forms import hosts_of

_POLL_SECONDS = 10.0
"""Interval in which the nodes, and requests whose signal was lost, are looked for."""


def keep(run: RunDir, idle_seconds: float) -> int:
    """Keep the nodes of this job until the hold ends. Return the exit code.

    idle_seconds: time without a run after which it ends.
    """
    signals = Signals()
    with run.job_log.open("ab") as job_log:
        output = ScriptOutput(os.dup(2), job_log.fileno())
        for descriptor in (1, 2):
            os.dup2(job_log.fileno(), descriptor)
    with log.to(lambda line: print_to_job_log(f"clusterddp: {line}")):
        ended = _Hold(run, signals).run(idle_seconds)
        log.info(f"the hold ends: {ended}")
    output.remove()
    return 0


class _Hold:
    """A hold's runs."""

    def __init__(self, run: RunDir, signals: Signals) -> None:
        self._run, self._signals = run, signals
        self._job_id, nodelist = os.environ["SLURM_JOB_ID"], os.environ["SLURM_JOB_NODELIST"]
        self._keepers: dict[str, subprocess.Popen[bytes]] = {}
        """Processes by the names of their requests."""
        history = History.read(run).events  # a start would withdraw an earlier 'release'
        self._is_released = bool(withdrawal_cause(history, self._job_id))
        log.info(f"{run.name} holds {nodelist} as job {self._job_id}")
        self._record(events.Started(nodelist=nodelist, clusterddp=version.described()))

    def run(self, idle_seconds: float) -> str:
        """Serve requests until the hold ends. Record and return the reason."""
        next_look = time.monotonic() + _POLL_SECONDS
        why, cause = "", Cause.STOPPED
        while not why:
            self._signals.wait(0 if self._is_released else _POLL_SECONDS)
            names = self._signals.take()
            try:
                self._reap()
                history = History.read(self._run)
            except OSError:  # a network file system: read again at the next look
                if "TERM" not in names:
                    self._signals.wait(1.0)
                    continue
                history = History(self._run, ())
            room = Room.of(history.events)
            if "TERM" in names:
                ending = slurm.ending(self._job_id, 0)
                cause = Cause.CANCELLED if ending is Ending.CANCELLED else Cause.STOPPED
                why = "scancel" if cause == Cause.CANCELLED else f"Slurm ({ending.value})"
            elif self._is_released or withdrawal_cause(history.events, self._job_id):
                why = "'clusterddp release'"
            else:
                requests = [*hold.take(self._run)]
                idle = time.time() - room.idle_since if room.idle_since else 0.0
                if idle >= idle_seconds and not requests:
                    why = f"being idle for {formatting.setting(idle_seconds)}"
                if requests or time.monotonic() >= next_look:
                    next_look = time.monotonic() + _POLL_SECONDS
                    self._note_lost(room)
                for name, request in requests:
                    self._begin(name, request)
        for keeper in self._keepers.values():
            keeper.terminate()
        while self._keepers:  # they record their results
            self._signals.wait(_POLL_SECONDS)
            self._signals.take()
            with contextlib.suppress(OSError):
                self._reap()
            self._keepers = {n: k for n, k in self._keepers.items() if k.poll() is None}
        for name, request in hold.take(self._run):
            self._record(RunInHold(run=request.run, request=name, why=f"it ends: {why}"))
        self._record(events.Ended(cause=cause, exit_code=0, how=why, why=why))
        return why

    def _begin(self, name: str, request: Request) -> None:
        """Start a run on free nodes, or refuse it."""
        run, asked = RunDir(Path(request.run)), RunInHold(run=request.run, request=name)
        try:
            nodes = Room.of(events.read(self._run.events)).choose(request)
        except (RequestError, OSError) as error:
            self._record(replace(asked, why=str(error)))
            return
        try:
            self._keepers[name] = subprocess.Popen(
                hold.keeper_command(run, nodes),
                env={**request.environ, **self._own_variables()},
                cwd=request.folder,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=child_setup(),  # noqa: PLW1509 -- threads only wait
            )
        except OSError as error:
            why = f"it cannot start in {request.folder}: {error.strerror}"
            self._record(replace(asked, why=why))
            return
        sent = events.Submitted(
            job_id=self._job_id, launcher=IN_ALLOCATION, folder=request.folder
        )  # not before: a refused run is not submitted
        with contextlib.suppress(OSError):
            events.add(run.events, sent)
        self._record(replace(asked, nodelist=",".join(nodes)))
        log.info(f"{run.name} starts on {', '.join(nodes)}")

    def _own_variables(self) -> dict[str, str]:
        """Return the variables of this job, which the user's shell lacks."""
        return {name: text for name, text in os.environ.items() if name.startswith("SLURM")}

    def _reap(self) -> None:
        """Record the runs that have ended."""
        ended = {n: k.returncode for n, k in self._keepers.items() if k.poll() is not None}
        room = Room.of(events.read(self._run.events))
        if any(ended.values()):
            self._note_lost(room)  # which may be why
        for name, code in ended.items():
            of_run = room.runs.get(name, RunInHold(request=name))
            if of_run.run:
                hold.record_end(RunDir(Path(of_run.run)), self._job_id, code)
            if self._record(replace(of_run, nodelist="")):  # else at the next look
                del self._keepers[name]
                log.info(f"{Path(of_run.run).name} has ended with code {code}")

    def _note_lost(self, room: Room) -> None:
        """Record lost nodes, and log the runs that end with them."""
        try:
            left = allocated(self._job_id)  # with --no-kill, Slurm shrinks the job
        except SlurmError:
            return
        lost = tuple(node for node in room.nodes if node not in left and node not in room.lost)
        if not lost:
            return
        self._record(LostInHold(nodes=lost))
        log.info(f"lost: {', '.join(lost)}")
        for event in room.runs.values():
            if {*lost}.intersection(hosts_of(event.nodelist)):
                log.info(f"{Path(event.run).name} ends with it")

    def _record(self, event: events.Event) -> bool:
        """Record an event; return False if the disk is full, for example."""
        try:
            events.add(self._run.events, replace(event, job_id=self._job_id))
        except OSError:
            return False
        return True
