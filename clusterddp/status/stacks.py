"""Stacks of a run's ranks, read on each of its hosts and grouped by equal stacks.

A rank's record names its process. On Slurm an additional job step (srun --overlap) reads the stacks
on each host; the ranks of a rehearsal are all on this host. The ranks need not respond.
"""

import base64
import binascii
import contextlib
import json
import os
import subprocess
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from clusterddp import files
from clusterddp.errors import RequestError, SlurmError
from clusterddp.formatting import clean, count, line
from clusterddp.processes import stacks
from clusterddp.processes.stacks import Frame, Program
from clusterddp.run import events
from clusterddp.run.attempt import latest
from clusterddp.run.outcome import read_outcomes, read_outcomes_of
from clusterddp.run.records import Outcome
from clusterddp.run.run_dir import RunDir
from clusterddp.slurm.client import submission_environment
from clusterddp.status.state import RunState, latest_submission

if TYPE_CHECKING:
    from clusterddp.status.status import RunStatus

ANSWER_SECONDS = 60.0
"""Timeout for the answers of a job's hosts."""
_ANSWER = "clusterddp-stacks"
_CHUNK = 512  # srun forwards lines of up to 1,024 bytes in one piece
_AT_ONCE = 8
_MAX_WORDS = 80
_LIBRARIES = ("site-packages/", "dist-packages/")
_DATALOADER = "torch/utils/data/dataloader.py"


@dataclass(frozen=True)
class RankStacks:
    """Programs of one rank; if there are none, `note` says why."""

    rank: int
    host: str
    programs: tuple[Program, ...] = ()
    note: str = ""

    @property
    def is_known(self) -> bool:
        """True if the stacks of all its programs were read."""
        return bool(self.programs) and all(program.threads for program in self.programs)


def read(run: RunDir, status: "RunStatus", ranks: Sequence[int] = ()) -> list[RankStacks]:
    """Read the current stacks of a running run's ranks; for named ranks, of all their processes.

    Raises RequestError if the run is not running or has no such rank; see also `gather`.
    """
    if status.state not in (RunState.RUNNING, RunState.UNKNOWN):
        detail = f" ({status.detail})" if status.detail else ""
        hint = f"'clusterddp logs {run.cli_name}' shows what its ranks printed."
        if status.state in (RunState.CREATED, RunState.QUEUED):
            hint = "Try again when it is running."
        raise RequestError(f"{run.name} is not running but {status.state}{detail}. {hint} [CD0507]")
    if latest_submission(events.read(run.events)) is None and not _outcomes(run, ()):
        raise RequestError(
            f"{run.name} was started by hand, so the hosts of its ranks are unknown. Stacks need "
            "a run started with 'clusterddp submit'. [CD0507]"
        )
    for rank in ranks:
        status.check_rank(rank)
    return gather(run, ranks, workers=bool(ranks), world_size=status.world_size or 0)


def gather(
    run: RunDir, ranks: Sequence[int] = (), *, workers: bool = False, world_size: int = 0
) -> list[RankStacks]:
    """Read the current stacks of a run's ranks: all ranks, or the named ones.

    workers: include the processes that the ranks have started. world_size: 0 if unknown. Raises
    RequestError for a run of another user or on another machine, SlurmError if no host of its job
    answers.
    """
    if run.path.stat().st_uid != os.geteuid():
        raise RequestError(
            f"{run.path} belongs to another user: only its owner can read its stacks. [CD0507]"
        )
    outcomes = _outcomes(run, ranks)
    recorded = {outcome.rank for outcome in outcomes}
    wanted = ranks or range(world_size)
    rank_stacks = [RankStacks(r, "", note="has no record yet") for r in wanted if r not in recorded]
    at_work = []
    for outcome in outcomes:
        if outcome.ended is not None:
            note = f"has ended: {outcome.reason}"
        elif outcome.ticks is None:
            note = "its record was written by an older clusterddp and does not name its process"
        else:
            at_work.append(outcome)
            continue
        rank_stacks.append(RankStacks(outcome.rank, outcome.host, note=note))
    submission = latest_submission(events.read(run.events))
    if submission and submission.is_local:
        if submission.is_alive is None:
            host = submission.host or "another machine"
            raise RequestError(f"{run.name} runs on {host}: run this command there. [CD0507]")
        rank_stacks += _read(at_work, workers=workers)
    elif at_work and at_work[0].job_id:
        rank_stacks += _query_hosts(run, at_work, ranks, workers=workers)
    else:
        rank_stacks += read_here(run, ranks, workers=workers)
        known = {each.rank for each in rank_stacks}
        rank_stacks += [
            RankStacks(outcome.rank, outcome.host, note=f"runs on {outcome.host}: try there")
            for outcome in at_work
            if outcome.rank not in known
        ]
    return sorted(rank_stacks, key=lambda each: each.rank)


def read_here(run: RunDir, ranks: Sequence[int] = (), *, workers: bool = False) -> list[RankStacks]:
    """Read the stacks of the ranks that run on this host."""
    names = {os.environ.get("SLURMD_NODENAME"), os.uname().nodename}
    outcomes = [each for name in names if name for each in _outcomes(run, ranks, name)]
    return _read([o for o in outcomes if o.ended is None and o.ticks], workers=workers)


def encode_lines(rank_stacks: Sequence[RankStacks], host: str) -> Iterator[str]:
    """Encode an answer as lines, which srun may interleave with the lines of other hosts."""
    content = json.dumps([asdict(each) for each in rank_stacks]).encode()
    text = base64.b64encode(zlib.compress(content)).decode()
    for start in range(0, len(text), _CHUNK):
        yield f"{_ANSWER} {host} {text[start : start + _CHUNK]}"


def decode_lines(text: str) -> list[RankStacks]:
    """Decode the hosts' answers; skip incomplete ones."""
    parts: dict[str, list[str]] = {}
    for words in map(str.split, text.splitlines()):
        if len(words) == 3 and words[0] == _ANSWER:
            parts.setdefault(words[1], []).append(words[2])
    rank_stacks: list[RankStacks] = []
    for chunks in parts.values():
        with contextlib.suppress(binascii.Error, zlib.error, ValueError, TypeError):
            answer = json.loads(zlib.decompress(base64.b64decode("".join(chunks))))
            rank_stacks += filter(None, (files.load(RankStacks, each) for each in answer))
    return rank_stacks


def _outcomes(run: RunDir, ranks: Sequence[int], host: str = "") -> list[Outcome]:
    """Read the records of the named ranks, or of all; of one host, whatever their number."""
    attempt = latest(run)

    def read(folder: Path) -> list[Outcome]:
        return read_outcomes_of(folder, host) if host else read_outcomes(folder)

    outcomes = read(attempt.outcomes if attempt else run.outcomes)
    if not outcomes and attempt:  # its ranks were started by hand
        outcomes = read(run.outcomes)
    return [outcome for outcome in outcomes if not ranks or outcome.rank in ranks]


def _read(outcomes: Sequence[Outcome], *, workers: bool) -> list[RankStacks]:
    def read_one(outcome: Outcome) -> RankStacks:
        programs = stacks.read_stacks(outcome.pid, outcome.ticks or 0, workers=workers)
        note = "" if programs else "its process has ended"
        return RankStacks(outcome.rank, outcome.host, tuple(programs), note)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(read_one, outcomes))


def _query_hosts(
    run: RunDir, outcomes: Sequence[Outcome], ranks: Sequence[int], *, workers: bool
) -> list[RankStacks]:
    """Read the stacks on each host with an additional job step."""
    hosts = list(dict.fromkeys(outcome.host for outcome in outcomes))
    python = next((outcome.python for outcome in outcomes if outcome.python), "")
    spec = run.read_spec()
    if spec and (spec.container_image or spec.wrapper or not python):
        python = spec.controller_python  # the tasks' interpreter may exist only in an image
    path = run.path.absolute()
    argv = [
        *("srun", f"--jobid={outcomes[0].job_id}", "--overlap", f"--nodelist={','.join(hosts)}"),
        *(f"--nodes={len(hosts)}", f"--ntasks={len(hosts)}", "--ntasks-per-node=1", "--mem=0"),
        *("--gres=none", "--mpi=none", "--input=none", "--kill-on-bad-exit=0", "--export=ALL"),
        *(f"--chdir={path}", python),
        *([str(path / run.bundle.name)] if run.bundle.exists() else ["-m", "clusterddp"]),
        *("stacks", "--here", str(path), *(["--workers"] if workers else [])),
        *(f"--rank={rank}" for rank in ranks),
    ]
    try:
        srun = subprocess.Popen(
            argv,
            env=submission_environment(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
        )
    except OSError as error:
        raise SlurmError(
            f"srun does not start ({error.strerror}); it is needed to read stacks on the job's "
            "hosts. Run this command on a machine of the cluster. [CD0402]"
        ) from None
    with srun:
        answer, words = _communicate(srun)
    rank_stacks = decode_lines(answer)
    if not rank_stacks:
        raise SlurmError(
            f"no host of job {outcomes[0].job_id} has answered srun --overlap: "
            f"{line(words.strip()) or f'exit code {srun.returncode}'}. To ask only the host of "
            "rank R: --rank R."
        )
    answered = {each.rank for each in rank_stacks}
    return rank_stacks + [
        RankStacks(outcome.rank, outcome.host, note="its host has not answered")
        for outcome in outcomes
        if outcome.rank not in answered
    ]


def _communicate(srun: "subprocess.Popen[str]") -> tuple[str, str]:
    """Read srun's output until it ends; end it after a timeout."""
    for seconds, end in ((ANSWER_SECONDS, srun.terminate), (10.0, srun.kill)):
        try:
            return srun.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            end()
    return srun.communicate()


@dataclass(frozen=True)
class _Entry:
    """Program of a rank, or a note instead."""

    rank: int
    host: str
    program: Program
    of_several: bool = False
    """True if the rank runs several programs."""

    @property
    def key(self) -> object:
        return self.program.threads[0].frames if self.program.threads else self.program.note

    @property
    def name(self) -> str:
        program = f" ({_shortened(self.program.words)})" if self.of_several else ""
        return f"rank {self.rank}{f' on {self.host}' if self.host else ''}{program}"


def format_stacks(rank_stacks: Sequence[RankStacks], *, whole: bool = False) -> str:
    """Return stacks as text: equal main threads once, the most frequent first.

    whole: all threads of each program, one after another.
    """
    if whole:
        return clean("\n".join(text for entry in _entries(rank_stacks) for text in _threads(entry)))
    groups, lines = _groups(rank_stacks), []
    total = sum(map(len, groups))
    for group in groups:
        program = group[0].program
        if program.threads:
            frames = program.threads[0].frames
            ways = ", ".join(sorted({entry.program.how for entry in group}))
            lines.append(f"{_describe_ranks(group, total)} in {_code_location(frames)} ({ways})")
            lines += _traceback(frames)
        else:
            lines.append(f"{_describe_ranks(group, total)}: {program.note}")
    return clean("\n".join(lines))


def code_locations(rank_stacks: Sequence[RankStacks]) -> list[tuple[str, list[int]]]:
    """Return each code location, `all_reduce (…)`, with its ranks, the most frequent first.

    Stacks that differ only in the standard library, or in outer calls, have the same location.
    """
    ranks: dict[str, list[int]] = {}
    for entry in _entries(rank_stacks):
        if entry.program.threads:
            ranks.setdefault(_code_location(entry.program.threads[0].frames), []).append(entry.rank)
    return sorted(ranks.items(), key=lambda item: (-len(item[1]), item[1][0]))


def _groups(rank_stacks: Sequence[RankStacks]) -> list[list[_Entry]]:
    groups: dict[object, list[_Entry]] = {}
    for entry in _entries(rank_stacks):
        groups.setdefault(entry.key, []).append(entry)
    return sorted(groups.values(), key=lambda group: (-len(group), group[0].rank))


def _entries(rank_stacks: Sequence[RankStacks]) -> Iterator[_Entry]:
    for each in rank_stacks:
        ranks = Counter(program.rank for program in each.programs)
        for program in each.programs or [Program(0, "", note=each.note)]:
            rank = each.rank if program.rank is None else program.rank
            yield _Entry(rank, each.host, program, ranks[program.rank] > 1)


def _describe_ranks(group: Sequence[_Entry], total: int) -> str:
    """Return `rank 17 on gpu03`, or `61 of 64 (ranks 0-16, 18-61)`."""
    if len(group) == 1:
        return group[0].name
    every = f"all {total}" if len(group) == total else f"{len(group)} of {total}"
    return f"{every} (ranks {_ranges(sorted({entry.rank for entry in group}))})"


def _ranges(numbers: Sequence[int]) -> str:
    parts: list[tuple[int, int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1] = parts[-1][0], number
        else:
            parts.append((number, number))
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)


def _code_location(frames: Sequence[Frame]) -> str:
    """Return the innermost call outside the standard library, and its caller in the user's code."""
    if not frames:
        return "no Python function"
    shown = [frame for frame in frames if not _is_standard(frame)] or [frames[0]]
    inner, own = shown[0], next((f for f in shown[1:] if not _is_library(f)), None)
    name = "DataLoader" if inner.file.endswith(_DATALOADER) else inner.function
    caller = f", called from {own.function} ({_short(own)})" if own else ""
    return f"{name} ({_short(inner)}){caller}"


def _is_library(frame: Frame) -> bool:
    return any(folder in frame.file for folder in _LIBRARIES)


def _is_standard(frame: Frame) -> bool:
    """Return whether it is in the standard library: `/usr/lib/python3.11/queue.py`."""
    folders = Path(frame.file).parts
    in_library = any(f.startswith("python3") for f in folders) and "lib" in folders
    return frame.file.startswith("<frozen") or (in_library and not _is_library(frame))


def _short(frame: Frame) -> str:
    name = Path(frame.file).name
    for folder in _LIBRARIES:
        if folder in frame.file:
            name = frame.file.rpartition(folder)[2]
    return f"{name}:{frame.line}"


def _traceback(frames: Sequence[Frame]) -> list[str]:
    """Return calls in Python's traceback format, without the import system, as Python does."""
    shown = [frame for frame in reversed(frames) if not frame.file.startswith("<frozen importlib")]
    return [f'  File "{f.file}", line {f.line}, in {f.function}' for f in shown or frames]


def _threads(entry: _Entry) -> Iterator[str]:
    program = entry.program
    rank = replace(entry, of_several=False).name
    if not program.threads:
        yield f"{rank}{f', process {program.pid}' if program.pid else ''}: {program.note}"
        return
    yield f"{rank}, process {program.pid}, {_shortened(program.words)} ({program.how}):"
    for thread in program.threads:
        yield f" {thread.name} (most recent call last):"
        yield from _traceback(thread.frames)


def _shortened(words: str) -> str:
    """Return a command line (possibly with a whole program) as one short line."""
    text = line(words)
    return text if len(text) <= _MAX_WORDS else f"{text[:_MAX_WORDS]}…"


def heading(name: str, rank_stacks: Sequence[RankStacks]) -> str:
    """Return the heading: name of the run, number of ranks and hosts."""
    hosts: Mapping[str, None] = dict.fromkeys(each.host for each in rank_stacks if each.host)
    return f"{name}: {count(len(rank_stacks), 'rank')} on {count(len(hosts), 'host')}"
