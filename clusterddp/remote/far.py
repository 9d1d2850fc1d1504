"""The end of a session on the cluster: it runs one command for a user elsewhere.

A parent process reads and writes frames. The command is its child, with pipes, or with terminals if
the user has them. A lost connection ends a command that only shows something. One that changes
something continues, and its output is dropped.
"""

import contextlib
import json
import os
import pty
import select
import signal
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from clusterddp.remote import frames

_SUBMITS = ("submit", "resume")
_CHANGES = (
    *("stop", "cancel", "clean", "rm", "data", "bad-nodes", "site", "templates", "hold", "release"),
    "env",
    *_SUBMITS,
)
"""Commands that continue without a connection; a submission that waits, until it is made."""


def main(run: Callable[[], NoReturn]) -> NoReturn:
    """Take a header from stdin, run its command and exit.

    run: the command's own main function, which reads sys.argv.
    """
    near = frames.Reader(0)
    first = near.next()
    if first is None:
        sys.exit(1)  # nothing has begun
    header = json.loads(first[1])
    place = folder = Path.cwd()
    environ = {name: _text(value) for name, value in header["environ"].items()}
    environ["CLUSTERDDP_RUNS_DIR"] = str(folder / environ.get("CLUSTERDDP_RUNS_DIR", "jobs"))
    if header["tree"]:
        top = _tree(near, folder / "trees", header["tree"])
        if top is None:
            sys.exit(1)
        environ |= {"CLUSTERDDP_TREE": str(top), "CLUSTERDDP_TREE_COMMIT": header["commit"]}
        folder = top / _text(header["workdir"])
        folder.mkdir(parents=True, exist_ok=True)  # git has no empty directories
        if (place / "envs").is_dir():
            from clusterddp.remote import environment

            if python := environment.find(place / "envs", folder, top):
                environ["CLUSTERDDP_PYTHON"] = python
    argv = [_text(word) for word in header["argv"]]
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    try:  # before it begins, so that the user knows whether it has
        frames.write(1, frames.frame(frames.BEGUN))
    except OSError:
        sys.exit(1)
    ours, theirs = zip(*map(_ends, range(3), header["terminals"]), strict=True)
    child = os.fork()
    if not child:
        _become(argv, folder, environ, theirs)
        run()
    os.setpgid(child, child)  # here, too: a signal may come at once
    for descriptor in theirs:
        os.close(descriptor)
    command = argv[0] if argv else ""
    waits = command in _SUBMITS and "--wait" in argv[: [*argv, "--"].index("--")]
    _serve(near, child, woken, ours, continues=command in _CHANGES and not waits, waits=waits)


def _text(word: str) -> str:
    """Return a word whose bytes are carried as latin-1."""
    return os.fsdecode(word.encode("latin-1"))


def _tree(near: frames.Reader, trees: Path, digest: str) -> Path | None:
    """Return the path of a tree, which is asked for if it is missing; None if that is cut off."""
    manifest = trees / f"{digest}.json"
    if (trees / digest).is_dir() and manifest.is_file():
        os.utime(manifest)  # it is in use
        return trees / digest
    from clusterddp.remote import tree  # an unchanged tree needs none of it

    frames.write(1, frames.frame(frames.TREE))

    def ask(wanted: list[str]) -> None:
        frames.write(1, frames.frame(frames.WANTED, json.dumps(wanted).encode()))

    def answer() -> bytes:
        while (got := near.next()) and got[0] == frames.BEAT:
            pass
        if got is None:
            raise EOFError
        return got[1]

    try:
        tree.receive(trees, digest, answer(), ask, answer)
    except EOFError:
        return None
    return trees / digest


def _ends(target: int, is_terminal: bool) -> tuple[int, int]:
    """Return the parent's and the command's end of a pipe, or of a raw terminal."""
    if not is_terminal:
        reading, writing = os.pipe()
        return (reading, writing) if target else (writing, reading)
    ours, theirs = pty.openpty()
    mode = termios.tcgetattr(theirs)
    mode[1] &= ~termios.OPOST
    mode[3] &= ~termios.ECHO
    termios.tcsetattr(theirs, termios.TCSANOW, mode)
    return ours, theirs


def _become(argv: list[str], folder: Path, environ: Mapping[str, str], ends: Sequence[int]) -> None:
    """Make this process that of the command."""
    from clusterddp.processes import change_environment

    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with contextlib.suppress(PermissionError):  # the parent has done it
        os.setpgid(0, 0)
    for target, end in enumerate(ends):
        os.dup2(end, target)
    os.closerange(3, max(ends) + 8)
    change_environment(environ)
    os.chdir(folder)
    sys.argv = ["clusterddp", *argv]


def _serve(
    near: frames.Reader,
    child: int,
    woken: int,
    ends: Sequence[int],
    *,
    continues: bool,
    waits: bool,
) -> NoReturn:
    """Pass input, output and signals on until the command ends; report its exit code.

    continues: the command is not ended for a lost connection. waits: it is, once it has printed.
    """
    stdin, *outputs = ends
    kinds = dict(zip(outputs, (frames.OUT, frames.ERR), strict=True))
    is_lost, shown, silent, ended, kills_at = False, not waits, 0.0, False, 0.0
    for descriptor in outputs:
        os.set_blocking(descriptor, False)
    while not ended:
        watched = [woken, *kinds, *([] if is_lost else [0])]
        ready = select.select(watched, [], [], frames.BEAT_SECONDS)[0]
        for descriptor in [each for each in ready if each in kinds]:
            chunk, kind = _read(descriptor), kinds[descriptor]
            shown |= bool(chunk) and kind == frames.OUT
            if not chunk:
                del kinds[descriptor]
            is_lost = is_lost or not _send(kind, chunk)
        silent = silent + frames.BEAT_SECONDS if not ready else 0.0 if 0 in ready else silent
        is_lost = is_lost or (0 in ready and not near.fill()) or silent > frames.LOST_SECONDS
        while got := near.ready():
            _obey(got, child, stdin)
        if is_lost and stdin >= 0:  # a question gets no answer any more
            with contextlib.suppress(OSError):
                os.close(stdin)
            stdin = -1
        if is_lost and shown and not continues and not kills_at:
            _interrupt(child)
            kills_at = time.monotonic() + frames.BEAT_SECONDS
        elif kills_at and time.monotonic() > kills_at:
            _interrupt(child, signal.SIGKILL)
        if woken in ready:
            os.read(woken, 1 << 10)
            pid, status = os.waitpid(child, os.WNOHANG)
            ended = pid == child
    for descriptor, kind in kinds.items():
        while chunk := _read(descriptor):
            is_lost = is_lost or not _send(kind, chunk)
    code = os.waitstatus_to_exitcode(status)
    _send(frames.EXIT, str(128 - code if code < 0 else code).encode())
    os._exit(0)


def _read(descriptor: int) -> bytes:
    """Read what is there; empty at the end, which is an error of a terminal, and for nothing."""
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:
        return b""


def _send(kind: bytes, content: bytes) -> bool:
    """Send a frame; return whether the connection has taken it."""
    try:
        frames.write(1, frames.frame(kind, content))
    except OSError:
        return False
    return True


def _obey(got: tuple[bytes, bytes], child: int, stdin: int) -> None:
    kind, content = got
    if kind == frames.INTERRUPT:
        _interrupt(child)
    elif kind == frames.INPUT:
        with contextlib.suppress(OSError):  # it no longer reads
            if content:
                frames.write(stdin, content)
            elif os.isatty(stdin):
                frames.write(stdin, b"\x04")  # Ctrl-D
            else:
                os.close(stdin)


def _interrupt(child: int, number: int = signal.SIGINT) -> None:
    """Signal the command and what it has started, as Ctrl-C does."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, number)
