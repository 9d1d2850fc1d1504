"""Hook of a COMMAND's Python: imports from the copy of the code, stack handler, signals, exit.

The directory of this file is first on a COMMAND's PYTHONPATH. The hook redirects entries of the
import path (an editable installation, PYTHONPATH) to the run's copy of the code, and installs the
handler of `clusterddp.processes.stacks` unless --no-stacks is given. Then it runs the
sitecustomize that it hides, and removes its directory from sys.path. At the end of the program it
waits for the threads of torch's gloo backend.
Any Python may run it, even 2.7: it imports only built-in modules, and its failures are ignored. If
the program handles the signal itself, the stack handler is removed.
"""
# No annotations: Python 2.7 may read it.
# mypy: ignore-errors

import os
import sys


def _arm():
    import _signal  # built in; `signal` itself would import more
    import faulthandler

    urgent = _signal.SIGURG
    if _signal.getsignal(urgent) is not _signal.SIG_DFL:  # already in use
        return
    file = os.memfd_create("clusterddp-stacks")
    faulthandler.register(urgent, file=file, all_threads=False)

    def disarm():
        try:  # without the file no reader sends the signal; the descriptor may have been reused
            held = os.readlink("/proc/self/fd/{}".format(file))  # noqa: PTH115, UP032
            if held.startswith("/memfd:clusterddp-stacks"):
                os.close(file)
        except OSError:
            pass
        faulthandler.unregister(urgent)

    def giving_way(function, position):
        def call(*args, **kwargs):
            asked = args[position] if len(args) > position else ()
            try:
                is_ours = asked == urgent or urgent in asked
            except TypeError:  # another signal, or an error that `function` will raise
                is_ours = False
            if is_ours:
                disarm()
            return function(*args, **kwargs)

        call.__name__, call.__doc__ = function.__name__, function.__doc__
        return call

    takers = {"signal": 0, "pthread_sigmask": 1, "sigwait": 0, "sigwaitinfo": 0, "sigtimedwait": 0}
    for name, position in takers.items():
        setattr(_signal, name, giving_way(getattr(_signal, name), position))


def _import_the_copy():
    copy, tree = os.environ.get("CLUSTERDDP_RUN_CODE"), os.environ.get("CLUSTERDDP_RUN_CODE_OF")
    if not copy or not tree:
        return
    trees = [tree, os.path.realpath(tree)]

    def turned(path):
        """Return the path's counterpart in the copy; unchanged if there is none inside the copy."""
        for top in trees:
            place = copy + path[len(top) :]
            is_below = path == top or path.startswith(top + "/")
            if is_below and any(map(os.path.exists, (place, place + ".py"))):
                real = os.path.realpath(place)
                if real == copy or real.startswith(copy + "/"):
                    return place
        return path

    sys.path[:] = [turned(entry) for entry in sys.path]
    # Tables of setuptools and hatchling (editables) for packages outside the import path.
    tables = [getattr(finder, "_redirections", None) for finder in sys.meta_path]
    for name, module in list(sys.modules.items()):
        if name.startswith("__editable__"):
            tables += [getattr(module, "MAPPING", None), getattr(module, "NAMESPACES", None)]
    for table in tables:
        for name, value in list(table.items()) if isinstance(table, dict) else ():
            many = isinstance(value, (list, tuple))
            table[name] = [turned(path) for path in value] if many else turned(value)


def _outlive_requests():
    """Have multiprocessing's fork server and resource tracker ignore Slurm's signals.

    Every process of a step receives them. With the fork server the workers of a DataLoader would
    end, and fail a rank that is about to save. A process that it forks does not ignore SIGTERM, by
    which multiprocessing ends it.
    """
    import _signal

    code = getattr(sys, "orig_argv", [""])[-1]
    if code.startswith("from multiprocessing.") and " import main" in code:
        for number in (_signal.SIGTERM, _signal.SIGHUP, _signal.SIGUSR1, _signal.SIGUSR2):
            _signal.signal(number, _signal.SIG_IGN)
        os.register_at_fork(after_in_child=lambda: _signal.signal(_signal.SIGTERM, _signal.SIG_DFL))


def _await_gloo():
    """Wait until gloo's threads are idle, for at most two seconds.

    After a collective such a thread still has to release its objects, for which it takes Python's
    lock. That ends a thread of an interpreter that exits, and here the process, by SIGABRT
    (pytorch/pytorch#190489). Before torch 2.11 the threads have the main thread's name.
    """
    import time

    try:
        version = [int(part) for part in sys.modules["torch"].__version__.split(".")[:2]]
        main, idle, deadline = os.readlink("/proc/self"), 0, time.monotonic() + 2.0  # noqa: PTH115
        with open("/proc/self/comm", "rb") as file:  # noqa: PTH123
            gloo = b"pt_gloo_runloop" if version >= [2, 11] else file.read().strip()
        while idle < 3 and time.monotonic() < deadline:
            time.sleep(0.001)  # without Python's lock, for a thread that waits for it
            idle += 1
            for task in set(os.listdir("/proc/self/task")) - {main}:  # noqa: PTH208
                try:
                    with open("/proc/self/task/" + task + "/stat", "rb") as file:  # noqa: PTH123
                        name, _, rest = file.read().partition(b" (")[2].rpartition(b") ")
                except OSError:  # it has ended
                    continue
                idle = 0 if name == gloo and rest[:1] != b"S" else idle
    except Exception:  # without torch, /proc or a free descriptor
        pass


try:
    import atexit

    if sys.platform.startswith("linux"):
        atexit.register(_await_gloo)  # the first one: it runs last
        _outlive_requests()
    if os.environ.get("CLUSTERDDP_RUN_STACKS") != "0":
        _arm()
except Exception:  # another system, an older Python
    pass

_folder = __file__.rpartition("/")[0]
sys.path[:] = [entry for entry in sys.path if entry != _folder]
try:
    _import_the_copy()
except Exception:  # a finder of another kind
    pass
_own = sys.modules.pop("sitecustomize")
try:
    import sitecustomize  # noqa: F401 -- the hidden one
except ImportError as error:
    if getattr(error, "name", "sitecustomize") != "sitecustomize":
        raise
    sys.modules["sitecustomize"] = _own
