"""Arms the handler of `clusterddp.processes.stacks` in a COMMAND's Python, as it starts.

Its folder stands first on a COMMAND's PYTHONPATH, unless --no-arm-stacks forbids it. Any Python may
run it, 2.7 included: it imports nothing but built-in modules, and what keeps it from arming costs
the program nothing. A program that takes the signal itself has it: the handler goes then. At last
the sitecustomize that this one hides has its turn, and the folder leaves sys.path.
"""
# No annotations, for Python 2.7 may read it.
# mypy: ignore-errors

import sys


def _arm():
    import _signal  # built in; `signal` itself would import more
    import faulthandler
    import os

    urgent = _signal.SIGURG
    if _signal.getsignal(urgent) is not _signal.SIG_DFL:  # somebody's already
        return
    file = os.memfd_create("clusterddp-stacks")
    faulthandler.register(urgent, file=file, all_threads=False)

    def disarm():
        try:  # without its file no look sends the signal; the number may be another's by now
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
            except TypeError:  # for `function` to refuse, or another signal
                is_ours = False
            if is_ours:
                disarm()
            return function(*args, **kwargs)

        call.__name__, call.__doc__ = function.__name__, function.__doc__
        return call

    takers = {"signal": 0, "pthread_sigmask": 1, "sigwait": 0, "sigwaitinfo": 0, "sigtimedwait": 0}
    for name, position in takers.items():
        setattr(_signal, name, giving_way(getattr(_signal, name), position))


try:
    _arm()
except Exception:  # another system, an older Python
    pass

_folder = __file__.rpartition("/")[0]
sys.path[:] = [entry for entry in sys.path if entry != _folder]
_own = sys.modules.pop("sitecustomize")
try:
    import sitecustomize  # noqa: F401 -- the one that this one hides
except ImportError as error:
    if getattr(error, "name", "sitecustomize") != "sitecustomize":
        raise
    sys.modules["sitecustomize"] = _own
