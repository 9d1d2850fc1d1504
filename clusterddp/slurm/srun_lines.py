"""Parses messages of srun and slurmstepd in a job's log: ended tasks, lost nodes, ended steps."""

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass

from clusterddp.slurm.forms import hosts_of

# srun: error: h02: task 3: Killed / h01: tasks 0-2: Exited with exit code 1 (srun's
# launch_common_step_terminated and _handle_msg; the list is a bitmap in range form).
_TASKS_ENDED = re.compile(
    r"^srun: error: (?P<host>[^\s:]+): tasks? (?P<ranks>[\d,-]+): (?P<what>.+?)\s*$"
)
_EXITED = re.compile(r"Exited with exit code (\d+)")
# 22.05 adds the origin: srun: launch/slurm: _step_signal: Terminating StepId=17.0
_ENDING = re.compile(
    r"^(srun: (?:\S+: \w+: )?Terminating|slurmstepd: error: \*\*\* STEP .* CANCELLED)"
)
# Inside the job, only srun's messages distinguish a lost node from scancel.
_STEP_ENDED = re.compile(r"^slurmstepd\S*: error: \*\*\* STEP \S+ ON \S+ CANCELLED", re.MULTILINE)
_STEP_PREEMPTED = re.compile(_STEP_ENDED.pattern + r" AT \S+ DUE TO PREEMPTION", re.MULTILINE)
# srun's first message if its step is ended from outside; a failed task is reported earlier.
_STEP_ABORTED = re.compile(r"srun: (forcing job termination\nsrun: )?Job step aborted\b")
_NODE_LOST = re.compile(r"^srun: error: Node failure on (\S+)", re.MULTILINE)
# srun's messages if a step cannot be created or launched; seen on 22.05, the second one in its
# source (step_launch.c). A step that the request makes impossible is not meant.
_NOT_LAUNCHED = re.compile(
    r"^srun: error: (?P<what>Task launch for \S+ failed on node (?P<host>[^\s:]+): .+"
    r"|task \d+ launch failed: .+|Application launch failed: .+"
    r"|Unable to create step for job \S+: (?!.*(?:permitted|specification|[Mm]emory|limit"
    r"|configuration is not available|Invalid)).+?)\s*$",
    re.MULTILINE,
)
_FATAL = [signal.Signals[f"SIG{name}"] for name in ("KILL", "SEGV", "ABRT", "BUS", "ILL", "FPE")]
"""Signals that are never a request to end."""
# srun prints strsignal(3)'s text.
_SIGNAL_WORDS = {
    signal.strsignal(number): (f"killed by {number.name}", 128 + number)
    for number in (*_FATAL, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
}
_SIGNAL_WORDS["Out Of Memory"] = "out of memory (killed by the kernel)", 137
_KILLED = {"Out Of Memory", *map(signal.strsignal, _FATAL)}


@dataclass(frozen=True)
class TaskEnd:
    """End of a task, reported by srun."""

    rank: int
    host: str
    words: str
    primary: bool
    """True if srun had not yet begun to end the other tasks, and SIGTERM is not the cause."""

    @property
    def exit_code(self) -> int | None:
        """Task's exit code, or None if it did not exit."""
        exited = _EXITED.fullmatch(self.words)
        return int(exited[1]) if exited else None

    @property
    def was_killed(self) -> bool:
        """True if a fatal signal ended the task."""
        return self._signal in _KILLED

    def explain(self) -> tuple[str, int | None]:
        """Return the cause of the end, and the shell's exit code or None."""
        if self.exit_code is not None:
            return f"exit code {self.exit_code}", self.exit_code
        return _SIGNAL_WORDS.get(self._signal, (self.words, None))

    @property
    def _signal(self) -> str:
        return self.words.removesuffix(" (core dumped)")


def task_ends(log: str) -> list[TaskEnd]:
    """Return the ends of tasks in the order reported by srun."""
    ends = []
    is_ending = False
    for line in log.splitlines():
        is_ending = is_ending or _ENDING.match(line) is not None
        if ended := _TASKS_ENDED.match(line):
            what = ended["what"]
            primary = not what.startswith("Terminated") and not (
                is_ending and what.startswith("Killed")
            )
            ends += [TaskEnd(rank, ended["host"], what, primary) for rank in _ranks(ended["ranks"])]
    return ends


def exit_codes(log: str) -> dict[str, int]:
    """Return the exit codes of failed tasks by node, for a step with one task per node."""
    # srun may join several nodes in one line: h[02-04].
    return {
        host: int(exited[1])
        for line in log.splitlines()
        if (ended := _TASKS_ENDED.match(line)) and (exited := _EXITED.fullmatch(ended["what"]))
        for host in hosts_of(ended["host"])
    }


def lost_nodes(log: str) -> tuple[str, ...]:
    """Return the nodes that srun reported as failed."""
    return tuple(dict.fromkeys(host for text in _NODE_LOST.findall(log) for host in hosts_of(text)))


def launch_failure(log: str) -> tuple[str, str] | None:
    """Return why Slurm could not start a step, and the node that srun names; None if it could."""
    found = _NOT_LAUNCHED.search(log)
    return (found["what"], found["host"] or "") if found else None


def was_ended(log: str) -> bool:
    """Return whether slurmstepd was ordered to end the step."""
    return bool(_STEP_ENDED.search(log))


def was_preempted(log: str) -> bool:
    """Return whether slurmstepd ended the step because of a preemption."""
    return bool(_STEP_PREEMPTED.search(log))


def was_aborted(log: str) -> bool:
    """Return whether srun learned of the step's end before any task's end."""
    lines = [line for line in log.splitlines() if line.startswith("srun: ")]
    return _STEP_ABORTED.match("\n".join(lines)) is not None


def _ranks(text: str) -> Iterator[int]:
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (not last or last.isdigit()):
            yield from range(int(first), int(last or first) + 1)
