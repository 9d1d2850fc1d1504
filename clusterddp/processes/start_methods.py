"""Start methods of a task group's processes, through Python's multiprocessing.

`exec` runs a program in a fresh interpreter. `fork`, `spawn` and `forkserver` run a function, in
the sense of `torch.multiprocessing`: in a copy of this process, in a fresh interpreter, or in a
copy of an idle server process. Only `fork` can run a function defined in a notebook cell; it is
refused if the copies could not use CUDA.
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
from clusterddp.processes.hardware import has_nvidia_driver
from clusterddp.processes.signals import die_with_parent

if any("multiprocessing.forkserver" in word and __name__ in word for word in sys.orig_argv):
    # This process is the fork server, which imports this module first. Its children die with it, so
    # terminal signals must not reach it either.
    os.setsid()

_HARD = 2  # omp_pause_hard (OpenMP 5.0, omp_pause_resource_all)
_FROZEN_AT_IMPORT = gc.get_freeze_count()  # Python 3.12 starts with a few hundred objects


def get_ready(method: str) -> None:
    """Prepare this process to start a group; call it once per group.

    Raises RequestError for `fork` if this process has used CUDA.
    """
    if method == "fork":
        _refuse_cuda()
        _end_openmp_threads()
    elif method in ("spawn", "forkserver"):
        # Before signals are held back: its start resets the mask of SIGINT and SIGTERM.
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
    """Start a process that calls the function in a new session, as for a program.

    env: its whole environment. output: its stdout and stderr; inherited if None.
    Its stdin is empty, no signal is blocked or handled, and it dies with this process.
    Raises whatever pickling the function or the arguments raises; `fork` pickles nothing.
    """
    context = multiprocessing.get_context(method)
    process: multiprocessing.process.BaseProcess = context.Process(  # type: ignore[attr-defined]
        target=_become, args=(dict(env), output, function, arguments)
    )
    with warnings.catch_warnings():
        # Python 3.12 warns about a fork while threads run, as in a notebook. Python and the C
        # library reset the locks that threads may hold; `get_ready` handles the rest.
        warnings.simplefilter("ignore", DeprecationWarning)
        with _forking() if method == "fork" else contextlib.nullcontext():
            process.start()
    return process


@contextlib.contextmanager
def _forking() -> Iterator[None]:
    """Fork with signals blocked and this process's objects exempt from garbage collection.

    Until the copy has its own handlers, a signal would run this process's handlers and be lost.
    A copy has crashed in a collection: objects that join C++ threads when collected find no such
    threads in the copy. Python's gc documentation recommends gc.freeze.
    """
    frozen = gc.get_freeze_count()
    gc.freeze()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if frozen <= _FROZEN_AT_IMPORT:  # unless other code has frozen objects
            gc.unfreeze()


def _become(
    env: dict[str, str],
    output: Connection | None,
    function: Callable[..., None],
    arguments: tuple[object, ...],
) -> None:
    """Reset the new process to the state of a fresh program, and call the function."""
    signal.set_wakeup_fd(-1)  # belongs to the parent's event loop
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):  # as exec does; ignored ones stay so
            usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, usual)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # A fork server ignores the sys.path that it is given and finds no module of a bundle. Its
    # child has then imported this module itself and leads a session already.
    if os.getsid(0) != os.getpid():
        os.setsid()
    _let_fork_server_go()
    die_with_parent(os.getppid())
    starter = multiprocessing.process.parent_process()
    if starter and not starter.is_alive():  # with forkserver, the starter is not the parent
        os._exit(128 + signal.SIGKILL)
    replace_environment(env)
    _redirect(output)
    function(*arguments)


def _let_fork_server_go() -> None:
    """Close the pipe that keeps the fork server alive, so that it ends with its starter.

    Every child inherits a copy of the pipe. If another Python version stores it under another name
    than 3.11, the server only stays a while longer.
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
    # A notebook's streams send to its page from threads that a copy lacks.
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = open(  # noqa: SIM115 -- it stays open as long as the process
            descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
        )
        setattr(sys, name, stream)


def _refuse_cuda() -> None:
    """Raise RequestError if this process has initialized CUDA: its copies could not use it."""
    torch = sys.modules.get("torch")
    if torch is None or not has_nvidia_driver():
        return
    if torch.cuda.is_initialized() or _fork_loses_cuda(torch):
        raise RequestError(
            "start method fork: this process has already used CUDA (a tensor on a GPU, or just "
            "torch.cuda.is_available()), so a forked copy cannot. Restart the notebook kernel and "
            "use CUDA only in the ranks, or use start_method='spawn' with a function of a "
            "module. [CD0817]"
        )


def _fork_loses_cuda(torch: ModuleType) -> bool:
    """Return whether torch would refuse CUDA in a copy of this process; tested in a copy.

    False for a torch without the test function (2.15 has it): the copy then gets torch's own error.
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
    """End OpenMP's idle threads; it restarts them when it needs them.

    GNU's OpenMP, which torch ships, keeps them for the next computation. A forked copy would wait
    forever for threads that it does not have (gomp_team_start of libgomp).
    """
    lines = Path("/proc/self/maps").read_text().splitlines()
    for path in {line.split(maxsplit=5)[-1] for line in lines if "libgomp" in line}:
        with contextlib.suppress(OSError, AttributeError):  # added in gcc 9
            ctypes.CDLL(path).omp_pause_resource_all(_HARD)
