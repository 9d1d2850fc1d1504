"""Arms the handler of `clusterddp.processes.stacks` in a COMMAND's Python, as it starts.

Its folder stands first on a COMMAND's PYTHONPATH, unless --no-arm-stacks was asked for. It runs
under any Python 3 and imports nothing of ours; what keeps it from arming costs the program nothing.
Then the sitecustomize that this one hides has its turn, and the folder leaves sys.path.
"""

import sys

try:
    import faulthandler
    import os
    import signal

    faulthandler.register(
        signal.SIGURG, file=os.memfd_create("clusterddp-stacks"), all_threads=False
    )
except Exception:  # another system, an older Python
    pass

_folder = __file__.rpartition("/")[0]
sys.path[:] = [entry for entry in sys.path if entry != _folder]

from importlib.machinery import PathFinder  # noqa: E402

_hidden = PathFinder.find_spec("sitecustomize")
if _hidden is not None and _hidden.loader is not None:
    _module = type(sys)("sitecustomize")
    _module.__spec__, _module.__loader__ = _hidden, _hidden.loader
    _module.__file__ = _hidden.origin
    sys.modules["sitecustomize"] = _module
    _hidden.loader.exec_module(_module)
