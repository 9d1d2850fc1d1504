"""Stacks of a process's descendants on this machine, read from outside.

Nothing here ends or changes a program. py-spy reads its memory without stopping it. A handler that
the program installed at its start writes the stack of its main thread to a file in memory; the
signal for it is ignored by programs without the handler. Python 3.14 can read another Python from
outside, or else have it write its stacks as soon as it runs Python code (sys.remote_exec).
"""

import contextlib
import faulthandler
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from clusterddp import polling
from clusterddp.processes import table
from clusterddp.processes.table import Process

ARMED_FILE = "clusterddp-stacks"
"""Name of the file in memory to which an armed program writes (`armed/sitecustomize.py`)."""
# Ignored by default: it does not harm a program without a handler.
_SIGNAL = signal.SIGURG
_PY_SPY_SECONDS = 15.0
_MAX_FRAMES = 200
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_CAP_SYS_PTRACE = 19
_FIRST_WITH_HOOK = 14
_NO_HOOK_WORDS = "its Python has no remote hook (3.14 has)"
_NOT_ARMED = (
    "it has no stack handler (possible reasons: --no-stacks; python -I, -E or -S; Python "
    "before 3.8; a changed PYTHONPATH; its own handler of SIGURG)"
)
_NO_HOOK = 3
"""Exit code of an interpreter without a remote hook."""
_STACK = "Stack (most recent call first):\n"
"""First line that faulthandler writes for a single thread."""
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)')


@dataclass(frozen=True)
class Frame:
    """Call of a function, and its current line; 0 if unknown."""

    function: str
    file: str
    line: int


@dataclass(frozen=True)
class Thread:
    """Thread of a program with its calls, innermost first."""

    name: str
    frames: tuple[Frame, ...]


@dataclass(frozen=True)
class Program:
    """Program and its threads, the main one first; if there are none, `note` says why."""

    pid: int
    words: str
    """Command line."""
    threads: tuple[Thread, ...] = ()
    how: str = ""
    """How the threads were read: py-spy, handler or hook."""
    note: str = ""
    rank: int | None = None
    """Rank in the world of the agent that started it, such as torchrun."""


@contextlib.contextmanager
def armed() -> Iterator[None]:
    """Let `read_stacks` read the stack of this process's main thread while the body runs."""
    if not hasattr(os, "memfd_create"):  # not Linux
        yield
        return
    # Only the thread that handles the signal: reading a running thread's frames is not safe.
    with open(os.memfd_create(ARMED_FILE), "wb") as file:  # noqa: PTH123 -- a descriptor
        faulthandler.register(_SIGNAL, file=file, all_threads=False)
        try:
            yield
        finally:
            faulthandler.unregister(_SIGNAL)


def read_stacks(pid: int, ticks: int, *, workers: bool = False) -> list[Program]:
    """Return the stacks of the Python programs in a process tree, or a note if there are none.

    pid: the root's id in its own PID namespace. ticks: its start, from `start_ticks`.
    workers: include the Python processes that the programs have started. Empty if the root ended.
    """
    processes = table.processes()
    root = next((p for p in processes.values() if p.ticks == ticks and p.own_pid == pid), None)
    if root is None:
        return []
    if root.uid != os.geteuid():
        note = f"process {root.pid} belongs to user {root.uid}: only that user may read it"
        return [Program(root.pid, "", note=note)]
    children: dict[int, list[Process]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process)
    programs = list(_programs(root, children))
    if not programs:
        below = list(_below(root, children))
        note = f"no Python in it ({' > '.join(each.name for each in below)}), {root.doing}"
        if not all(_may_read(each) for each in below):
            note = f"{root.doing}; not permitted to read it: {_missing_right()}"
        return [Program(root.pid, root.words, note=note)]
    if workers:
        programs = [p for top in programs for p in _below(top, children) if _is_python(p)]
    return [_read_program(each) for each in programs]  # in turn: forks share an armed file


def _below(root: Process, children: Mapping[int, Sequence[Process]]) -> Iterator[Process]:
    yield root
    for child in children.get(root.pid, ()):
        yield from _below(child, children)


def _programs(root: Process, children: Mapping[int, Sequence[Process]]) -> Iterator[Process]:
    """Yield the topmost Python programs; for an agent, the ranks that it has started."""
    if _is_python(root):
        ranks = []
        if _AGENTS not in root.environ:
            ranks = [p for p in _below(root, children) if _AGENTS in p.environ and _is_python(p)]
        tops = {p.pid for p in ranks}
        yield from [p for p in ranks if p.parent not in tops] or [root]
        return
    for child in children.get(root.pid, ()):
        yield from _programs(child, children)


_AGENTS = "TORCHELASTIC_RUN_ID"


def _may_read(process: Process) -> bool:
    try:
        _program(process)
    except PermissionError:  # it has a capability that this process lacks
        return False
    except OSError:
        pass
    return True


def _program(process: Process) -> str:
    return Path(f"/proc/{process.pid}/exe").readlink().name


def _is_python(process: Process) -> bool:
    try:
        program = _program(process)
    except OSError:
        return False
    if program.startswith(("python", "pypy")):
        return True
    return "libpython" in table.read_text(process.pid, "maps")


def _read_program(process: Process) -> Program:
    """Read the stacks of a Python program with the first method that works."""
    rank = process.environ.get("RANK", "") if _AGENTS in process.environ else ""
    notes = []
    for how, ask in _WAYS.items():
        threads, note = ask(process)
        if threads:
            number = int(rank) if rank.isdigit() else None
            return Program(process.pid, process.words, tuple(threads), how, rank=number)
        notes.append(note)
    state = f"{process.doing}; " if process.state != "R" else ""
    note = f"{state}its stack cannot be read: {'; '.join(notes)}"
    return Program(process.pid, process.words, note=note)


def _ask_py_spy(process: Process) -> tuple[list[Thread], str]:
    paths = (process.environ.get("PATH", ""), os.environ.get("PATH", ""))
    folders = [str(Path(process.argv[0]).parent), *os.pathsep.join(paths).split(os.pathsep)]
    own = (folder for folder in folders if folder.startswith("/"))  # no relative directories
    program = shutil.which("py-spy", path=os.pathsep.join(own))
    if program is None:
        return [], "no py-spy on its PATH"
    # --nonblocking: stopping the program could interrupt one of its system calls.
    argv = [program, "dump", "--pid", str(process.pid), "--json", "--nonblocking"]
    words = ""
    for _ in range(3):  # stacks of a running program can change during the read
        try:
            done = _run(argv, _PY_SPY_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            return [], f"{program} does not work: {error}"
        if done.returncode == 0 and (threads := _py_spys(done.stdout, process.pid)):
            return threads, ""
        words = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no output"
        if "permission" in done.stderr.lower() or "operation not" in done.stderr.lower():
            return [], f"py-spy is not permitted to read it: {_missing_right()}"
    return [], f"py-spy: {words}"


def _missing_right() -> str:
    """Explain why a process may not read another process of the same user."""
    has_right = _capabilities() >> _CAP_SYS_PTRACE & 1
    with contextlib.suppress(OSError, ValueError):
        scope = int(_YAMA.read_text())
        if scope and not (has_right and scope < 3):
            allowed = {1: "only its own children", 2: "others only with CAP_SYS_PTRACE"}
            return (
                f"kernel.yama.ptrace_scope is {scope}, so a process may read "
                f"{allowed.get(scope, 'no other')}. Needed: ptrace_scope 0, or CAP_SYS_PTRACE"
            )
    return "CAP_SYS_PTRACE is missing, or the container's seccomp profile forbids it"


def _capabilities() -> int:
    return int(table.status("self").get("CapEff", "0"), 16)


def _py_spys(text: str, pid: int) -> list[Thread]:
    """Parse py-spy's JSON, the main thread first; empty if it is malformed."""
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
        main: list[Thread] = []
        others: list[Thread] = []
        for thread in json.loads(text):
            calls = thread["frames"][:_MAX_FRAMES]
            frames = [Frame(str(f["name"]), str(f["filename"]), int(f["line"])) for f in calls]
            name = thread.get("thread_name") or f"thread {thread.get('os_thread_id', '')}"
            is_main = name == "MainThread" or thread.get("os_thread_id") == pid
            group = main if is_main else others
            group.append(Thread("MainThread" if is_main else str(name), tuple(frames)))
        return main + others
    return []


def _ask_handler(process: Process) -> tuple[list[Thread], str]:
    file = _armed_file(process.pid)
    if file is None or not _takes_signal(process.pid):
        return [], _NOT_ARMED
    try:
        with file.open("rb") as answer:
            size = answer.seek(0, os.SEEK_END)
            os.kill(process.pid, _SIGNAL)

            def has_answered() -> bool:
                # Its main thread blocks the signal while it writes.
                return bool(_written(answer, size)) and not _is_writing(process.pid)

            if polling.wait_until(
                has_answered, polling.STACKS_SECONDS, every=polling.CHILD_POLL_SECONDS
            ):
                return [Thread("MainThread", _frames(_written(answer, size)[0]))], ""
    except OSError:
        return [], "it is ending"
    return [], "its stack handler does not answer"


def _written(answer: IO[bytes], since: int) -> list[str]:
    """Return the written stacks: more than one if others have asked at the same time."""
    answer.seek(since)
    return answer.read().decode(errors="replace").split(_STACK)[1:]


def _armed_file(pid: int) -> Path | None:
    """Find the file in memory that an armed program holds open (an exec closes it)."""
    with contextlib.suppress(OSError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if file.readlink().name.startswith(f"memfd:{ARMED_FILE} "):
                    return file
    return None


def _takes_signal(pid: int) -> bool:
    return bool(int(table.status(pid).get("SigCgt", "0"), 16) >> (_SIGNAL - 1) & 1)


def _is_writing(pid: int) -> bool:
    status = table.status(pid)
    masks = int(status.get("SigBlk", "0"), 16) | int(status.get("ShdPnd", "0"), 16)
    return bool(masks >> (_SIGNAL - 1) & 1)


def _frames(text: str) -> tuple[Frame, ...]:
    """Parse faulthandler's output."""
    matches = filter(None, map(_FRAME.fullmatch, text.splitlines()))
    return tuple(
        Frame(m["function"], m["file"], int(m["line"]) if m["line"].isdigit() else 0)
        for m in matches
    )


# Runs in the program: writes the stacks to a directory atomically. If it runs too late, it removes
# the directory.
_HOOKED = """\
def _write():
    import json, os, shutil, sys, threading
    folder = {folder!r}
    if not os.path.exists(folder + "/wanted"):
        shutil.rmtree(folder, ignore_errors=True)
        return
    names = {{t.ident: t.name for t in threading.enumerate()}}
    main, threads = threading.main_thread().ident, []
    current = {{**sys._current_frames(), main: sys._getframe(2)}}
    for ident, frame in sorted(current.items(), key=lambda item: item[0] != main):
        calls = []
        while frame is not None and len(calls) < {most}:
            calls.append(dict(name=frame.f_code.co_name, filename=frame.f_code.co_filename,
                              line=frame.f_lineno or 0))
            frame = frame.f_back
        threads.append(dict(thread_name=names.get(ident) or "thread %d" % ident, frames=calls))
    with open(folder + "/draft", "w") as file:
        json.dump(threads, file)
    os.rename(folder + "/draft", folder + "/stacks")
_write()
del _write
"""
# Runs in an interpreter of the program's version. Reading from outside uses a private API of 3.14.
_CALL_HOOK = """\
import json, sys
if not hasattr(sys, "remote_exec"):
    sys.exit(3)
pid = int(sys.argv[1])
try:
    from _remote_debugging import RemoteUnwinder
    threads = [
        dict(os_thread_id=thread.thread_id, frames=[
            dict(name=f.funcname, filename=f.filename, line=f.lineno) for f in thread.frame_info
        ])
        for thread in RemoteUnwinder(pid, all_threads=True).get_stack_trace()
    ]
except PermissionError:
    raise
except Exception:
    threads = []
if any(thread["os_thread_id"] == pid and thread["frames"] for thread in threads):
    print(json.dumps(threads))
else:
    sys.remote_exec(pid, sys.argv[2])
"""


def _ask_hook(process: Process) -> tuple[list[Thread], str]:
    """Use the program's own interpreter to read it from outside or with sys.remote_exec."""
    try:
        program = Path(f"/proc/{process.pid}/exe").readlink()
    except OSError:
        return [], "it is ending"
    if _namespace(process.pid) != _namespace("self"):
        return [], "its Python's remote hook is in a container"
    version = re.match(r"python3\.(\d+)", program.name)
    if version and int(version[1]) < _FIRST_WITH_HOOK:
        return [], _NO_HOOK_WORDS
    folder = Path(tempfile.mkdtemp(prefix="clusterddp-stacks-"))
    script, wanted, answer = folder / "hook.py", folder / "wanted", folder / "stacks"
    script.write_text(_HOOKED.format(folder=str(folder), most=_MAX_FRAMES))
    wanted.touch()
    is_asked = False
    try:
        argv = [str(program), "-I", "-S", "-c", _CALL_HOOK, str(process.pid), str(script)]
        done = _run(argv, _PY_SPY_SECONDS)
        if done.returncode == _NO_HOOK:
            return [], _NO_HOOK_WORDS
        if done.returncode:
            words = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
            right = f" ({_missing_right()})" if "permi" in words.lower() else ""
            return [], f"its Python's remote hook: {words}{right}"
        if threads := _py_spys(done.stdout, process.pid):
            return threads, ""
        is_asked = True
        if polling.wait_until(
            answer.exists, polling.STACKS_SECONDS, every=polling.CHILD_POLL_SECONDS
        ):
            is_asked = False
            return _py_spys(answer.read_text(errors="replace"), process.pid), ""
        return [], "its Python's remote hook waits for its main thread to run Python code"
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"its Python's remote hook: {error}"
    finally:
        wanted.unlink(missing_ok=True)
        if not is_asked:  # else the program may still read the script, which then removes itself
            shutil.rmtree(folder, ignore_errors=True)


def _namespace(pid: int | str) -> str:
    with contextlib.suppress(OSError):
        return str(Path(f"/proc/{pid}/ns/mnt").readlink())
    return ""


_WAYS = {"py-spy": _ask_py_spy, "handler": _ask_handler, "hook": _ask_hook}


def _run(argv: Sequence[str], seconds: float) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        argv,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=seconds,
        check=False,
    )
