"""Starts the processes of a task group by Python's multiprocessing.

`exec` runs a program in a fresh interpreter. `fork`, `spawn` and `forkserver` run a function, as
`torch.multiprocessing` means these words: in a copy of this process, in a fresh interpreter, and in
a copy of a process that has done nothing yet. `fork` alone takes what only this process knows, a
function of a notebook's cell say; it is refused where the copies could not compute.
"""

import contextlib
import ctypes
import gc
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.process
import multiprocessing.resource_tracker
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType

from clusterddp.errors import RequestError
from clusterddp.processes import replace_environment
from clusterddp.processes.processors import has_nvidia_driver
from clusterddp.processes.signals import die_with_parent

if any("multiprocessing.forkserver" in word and __name__ in word for word in sys.orig_argv):
    # This is our fork server, which imports this first: its processes die with it, so what ends a
    # terminal's programs must reach it as little as them.
    os.setsid()

_HARD = 2  # omp_pause_hard (OpenMP 5.0, omp_pause_resource_all)
_FROZEN_AT_IMPORT = gc.get_freeze_count()  # Python 3.12 begins with some hundred objects


def get_ready(method: str) -> None:
    """Prepare this process for a group's first process, once a group.

    Raises RequestError where it cannot be forked, because it has used CUDA.
    """
    if method == "fork":
        _refuse_cuda()
        _end_openmp_threads()
    elif method in ("spawn", "forkserver"):
        # Before anybody holds signals back: its start sets the mask of SIGINT and SIGTERM anew.
        multiprocessing.resource_tracker.ensure_running()
    if method == "forkserver":
        multiprocessing.set_forkserver_preload([__name__])
        multiprocessing.forkserver.ensure_running()


def begin(
    method: str,
    function: Callable[..., None],
    arguments: tuple[object, ...],
    env: Mapping[str, str],
    output: Connection | None,
) -> "multiprocessing.process.BaseProcess":
    """Start a process that calls the function in a session of its own, as a program's would be.

    env: all of its environment. output: where it prints to, stderr included; None for where this
    process does. Its stdin is empty, no signal is blocked or handled; it dies with this process.
    Raises what pickling the function or the arguments raises; `fork` pickles nothing.
    """
    context = multiprocessing.get_context(method)
    process: multiprocessing.process.BaseProcess = context.Process(  # type: ignore[attr-defined]
        target=_become, args=(dict(env), output, function, arguments)
    )
    with warnings.catch_warnings():
        # Python 3.12 warns of a fork where threads run, a notebook's for one. What they may hold
        # is renewed by Python and the C library; `get_ready` sees to what is not.
        warnings.simplefilter("ignore", DeprecationWarning)
        with _forking() if method == "fork" else contextlib.nullcontext():
            process.start()
    return process


@contextlib.contextmanager
def _forking() -> Iterator[None]:
    """Have a forked copy begin with signals blocked, and leave this process's garbage alone.

    Until it has handlers of its own, a signal would come to those of this process, and be lost. And
    a copy was seen to crash in a collection: what ends threads of C++ when it is collected finds
    none of them there. Python's documentation of gc advises gc.freeze.
    """
    frozen = gc.get_freeze_count()
    gc.freeze()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if frozen <= _FROZEN_AT_IMPORT:  # what somebody has frozen since stays so
            gc.unfreeze()


def _become(
    env: dict[str, str],
    output: Connection | None,
    function: Callable[..., None],
    arguments: tuple[object, ...],
) -> None:
    """Make the new process what a fresh program would be, and call the function."""
    signal.set_wakeup_fd(-1)  # an event loop's, which is the parent's
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):  # as exec does; ignored ones stay so
            usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, usual)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # A fork server finds no module of a bundle, as it does not use the sys.path that it is given:
    # its process has imported this one by itself, and leads a session since.
    if os.getsid(0) != os.getpid():
        os.setsid()
    _let_fork_server_go()
    die_with_parent(os.getppid())
    starter = multiprocessing.process.parent_process()
    if starter and not starter.is_alive():  # it is not the parent of a fork server's process
        os._exit(128 + signal.SIGKILL)
    replace_environment(env)
    _redirect(output)
    function(*arguments)


def _let_fork_server_go() -> None:
    """Have the fork server end, and its processes with it, when the process that started it does.

    It stays as long as anybody holds its pipe, and each of its processes is given an end. Where
    a Python keeps that elsewhere than 3.11 does, the server stays a while longer.
    """
    server = getattr(multiprocessing.forkserver, "_forkserver", None)
    pipe = getattr(server, "_forkserver_alive_fd", None)
    if server and pipe is not None:
        os.close(pipe)
        server._forkserver_alive_fd = None


def _redirect(output: Connection | None) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    if output is None:
        return
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    output.close()
    # A notebook's own streams send to its page from threads that are not here.
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = open(  # noqa: SIM115 -- it stays open as long as the process
            descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
        )
        setattr(sys, name, stream)


def _refuse_cuda() -> None:
    """Raise RequestError where this process has begun to use CUDA, which its copies cannot."""
    torch = sys.modules.get("torch")
    if torch is None or not has_nvidia_driver():
        return
    if torch.cuda.is_initialized() or _spoils_its_copies(torch):
        raise RequestError(
            "start method fork: this process has used CUDA already (a tensor on a GPU, or just "
            "torch.cuda.is_available()), and no copy of it can. Restart the notebook's kernel and "
            "leave CUDA to the ranks, or use start_method='spawn' with a function of a "
            "module. [CD0817]"
        )


def _spoils_its_copies(torch: ModuleType) -> bool:
    """Return whether torch would refuse CUDA in a copy of this process; only a copy can tell.

    A torch without that function, which 2.15 has, refuses CUDA there in its own words.
    """
    if not hasattr(torch.cuda, "_is_in_bad_fork"):
        return False
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = int(torch.cuda._is_in_bad_fork())
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0


def _end_openmp_threads() -> None:
    """Have OpenMP end the threads with which this thread has computed, until it computes again.

    GNU's OpenMP, which torch brings along, keeps them for the next computation. A copy of this
    process would wait for ever for those threads, which it has not (gomp_team_start of libgomp).
    """
    lines = Path("/proc/self/maps").read_text().splitlines()
    for path in {line.split(maxsplit=5)[-1] for line in lines if "libgomp" in line}:
        with contextlib.suppress(OSError, AttributeError):  # it is there from gcc 9 on
            ctypes.CDLL(path).omp_pause_resource_all(_HARD)
