"""Stacks of the programs below a process of this machine, read from outside.

Nothing here ends or alters a program. py-spy reads its memory and does not stop it. A handler that
the program armed at its start writes the stack of its main thread into a file in memory, on a
signal that is ignored where there is no such handler. Python 3.14 can read another Python from
outside, and else have it write its stacks as soon as it runs Python code (sys.remote_exec).
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

from clusterddp import patience
from clusterddp.processes import table
from clusterddp.processes.table import Process

ARMED_FILE = "clusterddp-stacks"
"""Name of the file in memory into which an armed program writes (`armed/sitecustomize.py`)."""
# By default it is ignored: a program without a handler takes no harm from it.
_SIGNAL = signal.SIGURG
_PY_SPY_SECONDS = 15.0
_MOST_FRAMES = 200
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_CAP_SYS_PTRACE = 19
_FIRST_WITH_HOOK = 14
_NO_HOOK_WORDS = "its Python has no remote hook (3.14 has)"
_NOT_ARMED = (
    "no handler was armed at its start, as under --no-arm-stacks, python -I, -E or -S, before "
    "Python 3.8, without the task's PYTHONPATH, or where it takes SIGURG itself"
)
_NO_HOOK = 3
"""Exit code of an interpreter without a remote hook."""
_STACK = "Stack (most recent call first):\n"
"""First line that faulthandler writes of a thread alone."""
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)')


@dataclass(frozen=True)
class Frame:
    """Call of a function, and the line that it has come to; 0 where that is unknown."""

    function: str
    file: str
    line: int


@dataclass(frozen=True)
class Thread:
    """Thread of a program with its calls, the innermost first."""

    name: str
    frames: tuple[Frame, ...]


@dataclass(frozen=True)
class Program:
    """Program below a process, and its threads, the main one first; none where `note` says why."""

    pid: int
    words: str
    """Command line."""
    threads: tuple[Thread, ...] = ()
    how: str = ""
    """Way in which they were read: py-spy, handler or hook."""
    note: str = ""
    rank: int | None = None
    """Rank in the world of an agent that has started it, such as torchrun."""


@contextlib.contextmanager
def armed() -> Iterator[None]:
    """Let `look` have the stack of this process's main thread while the body runs."""
    if not hasattr(os, "memfd_create"):  # Linux alone
        yield
        return
    # Only the thread that takes the signal: the frames of one that runs may not be read beside it.
    with open(os.memfd_create(ARMED_FILE), "wb") as file:  # noqa: PTH123 -- a descriptor
        faulthandler.register(_SIGNAL, file=file, all_threads=False)
        try:
            yield
        finally:
            faulthandler.unregister(_SIGNAL)


def look(pid: int, ticks: int, *, workers: bool = False) -> list[Program]:
    """Return the stacks of what runs in a process: of its Python programs, if it has any.

    pid, ticks: as the process sees its number, and as `start_ticks` does. workers: those of the
    processes that these programs have started, too. Empty where the process has gone.
    """
    processes = table.processes()
    root = next((p for p in processes.values() if p.ticks == ticks and p.own_pid == pid), None)
    if root is None:
        return []
    if root.uid != os.geteuid():
        note = f"process {root.pid} is of user {root.uid}: only that user may look at it"
        return [Program(root.pid, "", note=note)]
    children: dict[int, list[Process]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process)
    programs = list(_programs(root, children))
    if not programs:
        below = list(_below(root, children))
        note = f"no Python in it ({' > '.join(each.name for each in below)}), {root.doing}"
        if not all(_may_look_at(each) for each in below):
            note = f"{root.doing}; it may not be looked at: {_missing_right()}"
        return [Program(root.pid, root.words, note=note)]
    if workers:
        programs = [p for top in programs for p in _below(top, children) if _is_python(p)]
    return [_look_at(program) for program in programs]  # forked ones share their armed file


def _below(root: Process, children: Mapping[int, Sequence[Process]]) -> Iterator[Process]:
    yield root
    for child in children.get(root.pid, ()):
        yield from _below(child, children)


def _programs(root: Process, children: Mapping[int, Sequence[Process]]) -> Iterator[Process]:
    """Yield the topmost Python programs; in place of an agent, the ranks that it has started."""
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


def _may_look_at(process: Process) -> bool:
    try:
        _program(process)
    except PermissionError:  # it has a right that this process has not
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


def _look_at(process: Process) -> Program:
    """Read the stacks of a Python program, in the first way that works."""
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
    own = (folder for folder in folders if folder.startswith("/"))  # and no working folder
    program = shutil.which("py-spy", path=os.pathsep.join(own))
    if program is None:
        return [], "no py-spy on its PATH"
    # It reads beside the program rather than stop it, which could end a system call of its.
    argv = [program, "dump", "--pid", str(process.pid), "--json", "--nonblocking"]
    words = ""
    for _ in range(3):  # a program that runs can move under its eyes
        try:
            done = _run(argv, _PY_SPY_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            return [], f"{program} does not work: {error}"
        if done.returncode == 0 and (threads := _py_spys(done.stdout, process.pid)):
            return threads, ""
        words = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "it printed none"
        if "permission" in done.stderr.lower() or "operation not" in done.stderr.lower():
            return [], f"py-spy may not read it: {_missing_right()}"
    return [], f"py-spy: {words}"


def _missing_right() -> str:
    """Say what forbids one process of a user's to read another."""
    has_right = _capabilities() >> _CAP_SYS_PTRACE & 1
    with contextlib.suppress(OSError, ValueError):
        scope = int(_YAMA.read_text())
        if scope and not (has_right and scope < 3):
            only = {1: "its own children alone", 2: "another with CAP_SYS_PTRACE alone"}
            return (
                f"kernel.yama.ptrace_scope is {scope}, by which a process may look at "
                f"{only.get(scope, 'none')}; it takes 0 there, or CAP_SYS_PTRACE"
            )
    return "CAP_SYS_PTRACE is missing here, or a container's seccomp profile forbids it"


def _capabilities() -> int:
    return int(table.status("self").get("CapEff", "0"), 16)


def _py_spys(text: str, pid: int) -> list[Thread]:
    """Read py-spy's JSON, the main thread first; empty where it is none."""
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
        main: list[Thread] = []
        others: list[Thread] = []
        for thread in json.loads(text):
            calls = thread["frames"][:_MOST_FRAMES]
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
                # Its main thread blocks the signal while it writes: it has begun, and then ended.
                return bool(_written(answer, size)) and not _is_writing(process.pid)

            if patience.wait_until(
                has_answered, patience.STACKS_ANSWER, every=patience.CHILD_PAUSE
            ):
                return [Thread("MainThread", _frames(_written(answer, size)[0]))], ""
    except OSError:
        return [], "it ends"
    return [], "its handler does not answer"


def _written(answer: IO[bytes], since: int) -> list[str]:
    """Return the stacks that were written; several, where others have looked at the same time."""
    answer.seek(since)
    return answer.read().decode(errors="replace").split(_STACK)[1:]


def _armed_file(pid: int) -> Path | None:
    """Find the file in memory that an armed program holds: an exec closes it."""
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
    """Read what faulthandler writes."""
    matches = filter(None, map(_FRAME.fullmatch, text.splitlines()))
    return tuple(
        Frame(m["function"], m["file"], int(m["line"]) if m["line"].isdigit() else 0)
        for m in matches
    )


# In the program: writes the stacks into a folder, whole or not at all. Later than asked for it
# removes what was left for it.
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
# In an interpreter of the program's own version. First from outside: private, seen on 3.14.
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
    """Ask the program's own interpreter, which reads it from outside or by sys.remote_exec."""
    try:
        program = Path(f"/proc/{process.pid}/exe").readlink()
    except OSError:
        return [], "it ends"
    if _namespace(process.pid) != _namespace("self"):
        return [], "its Python's remote hook is in a container"
    version = re.match(r"python3\.(\d+)", program.name)
    if version and int(version[1]) < _FIRST_WITH_HOOK:
        return [], _NO_HOOK_WORDS
    folder = Path(tempfile.mkdtemp(prefix="clusterddp-stacks-"))
    script, wanted, answer = folder / "hook.py", folder / "wanted", folder / "stacks"
    script.write_text(_HOOKED.format(folder=str(folder), most=_MOST_FRAMES))
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
        if patience.wait_until(answer.exists, patience.STACKS_ANSWER, every=patience.CHILD_PAUSE):
            is_asked = False
            return _py_spys(answer.read_text(errors="replace"), process.pid), ""
        return [], "its Python's remote hook waits until its main thread runs Python code"
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"its Python's remote hook: {error}"
    finally:
        wanted.unlink(missing_ok=True)
        if not is_asked:  # otherwise the program may still read the script, and removes it
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
