"""Runs Python programs in forks of a process that has imported torch: their start is not tested.

A fork costs a hundredth of the import. One server for each worker of pytest-xdist, begun with the
first program; it ends with the worker, and every program with the server.
"""

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from clusterddp.processes.signals import die_with_parent
from tests.waiting import PATIENCE

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torchvision", "clusterddp.training.loop"])


def run(
    *argv: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, as subprocess.run does: its output is captured, its input empty.

    `argv` is what would stand behind the interpreter's name: `-c` and the code, or a file, and
    its arguments. Torch has one thread there, and is imported before `env` is set.
    """
    words = [os.fspath(word) for word in argv]
    with tempfile.TemporaryDirectory() as folder:
        printed = [Path(folder, name) for name in ("out", "err")]
        where = (os.fspath(cwd or Path.cwd()), dict(os.environ if env is None else env))
        process = CONTEXT.Process(target=_become, args=(words, *where, printed))
        process.start()
        process.join(PATIENCE)
        code = process.exitcode
        if code is None:
            process.kill()
            process.join()
        out, err = (path.read_text() if path.exists() else "" for path in printed)
    assert code is not None, f"it has not ended: {out}{err}"
    return subprocess.CompletedProcess(words, code, out, err)


def _become(argv: list[str], cwd: str, env: dict[str, str], printed: list[Path]) -> None:
    import torch

    die_with_parent(os.getppid())
    for number, path in enumerate((Path(os.devnull), *printed)):
        opened = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin, sys.stdout, sys.stderr = map(os.fdopen, (0, 1, 2), ("r", "w", "w"))
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    torch.set_num_threads(1)
    code = _exit_code(argv)
    threading._shutdown()  # type: ignore[attr-defined] # as an interpreter ends
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _exit_code(argv: list[str]) -> int:
    try:
        if argv[0] == "-c":
            sys.path.insert(0, "")
            sys.argv = ["-c", *argv[2:]]
            sys.modules["__main__"] = ModuleType("__main__")
            exec(compile(argv[1], "<string>", "exec"), sys.modules["__main__"].__dict__)
        else:
            sys.path.insert(0, str(Path(argv[0]).absolute().parent))
            sys.argv = argv
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as left:
        if left.code is None or isinstance(left.code, int):
            return left.code or 0
        print(left.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
