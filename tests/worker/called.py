"""Functions for processes that multiprocessing starts, which import them from here."""

import gc
import os
import signal
import subprocess
import sys
import threading


def report() -> None:
    """Says what it was given, on each stream."""
    session = os.getsid(0) == os.getpid()
    held = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    usual = signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    print(os.environ["NAME"], repr(sys.stdin.read()), os.read(0, 1), session, set(held), usual)
    sys.stdout.flush()
    os.write(2, b"to descriptor 2\n")
    print("é", file=sys.stderr)


def ends(how: int) -> None:
    """Exits with that code, or by the signal of which it is the negative."""
    if how < 0:
        os.kill(os.getpid(), -how)
    sys.exit(how)


def stays() -> None:
    """Says its process id, and waits for ever."""
    print(os.getpid(), flush=True)
    threading.Event().wait()


def leaves_one_behind() -> None:
    """Starts a program, says its process id, and ends well."""
    code = "import signal; signal.pause()"
    print(subprocess.Popen([sys.executable, "-c", code]).pid, flush=True)


def collects() -> None:
    """Collects what is garbage in its process."""
    gc.collect()


def rank_and_sum(more: int) -> tuple[str, int]:
    return os.environ["RANK"], int(os.environ["WORLD_SIZE"]) + more


def fails_second() -> None:
    """Rank 1 fails, after which rank 0 would fail too."""
    if os.environ["RANK"] == "1":
        raise ValueError("boom")
    threading.Event().wait()


def dies() -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()


def leaves(code: object) -> None:
    sys.exit(code)  # type: ignore[arg-type]


def returns_a_lambda() -> object:
    return lambda: 0


class Unreadable:
    """What can be pickled, and not be unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return int, ("none",)


def returns_what_cannot_be_read() -> object:
    return Unreadable()
