"""TensorBoard for a run: served on the machine that has its files, reached from the user's."""

import contextlib
import os
import re
import secrets
import shlex
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from clusterddp.errors import EXIT_INTERRUPTED, RequestError
from clusterddp.remote import cluster, session

_PORT = 6006
"""TensorBoard's usual port."""
_END_SECONDS = 5.0
"""How long the cluster's part may take to end."""
# Its words are not on the command line, which other users of a login node can read.
_PROGRAM = """\
import sys
sys.path[:] = filter(None, sys.path)
sys.argv[1:] = sys.stdin.read().split("\\0")
from tensorboard.main import run_main
run_main()
"""
_URL = re.compile(r"http://127\.0\.0\.1:(\d+)(/\S*)")


def serve(folder: Path, python: str, port: int, show: Callable[[str], None]) -> int:
    """Serve what is below a directory until Ctrl-C; return TensorBoard's exit code.

    The address has a random path, without which every request is refused. port: 0 for a
    free one. show: prints the URL. Raises RequestError if TensorBoard does not start.
    """
    # Its data server would have a port without the secret.
    words = [f"--logdir={folder}", "--host=127.0.0.1", f"--port={port}", "--load_fast=false"]
    words.append(f"--path_prefix=/{secrets.token_urlsafe(16)}")
    said = ""
    with (
        # It writes its address to a file in TMPDIR, which others could read.
        tempfile.TemporaryDirectory(prefix="ddp-") as own,
        subprocess.Popen(
            [python, "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, errors="replace", env={**os.environ, "TMPDIR": own},
        ) as process,
    ):  # fmt: skip
        assert process.stdin and process.stderr
        try:
            with contextlib.suppress(BrokenPipeError), process.stdin:
                process.stdin.write("\0".join(words))
            for line in process.stderr:
                said = line.strip() or said
                if found := _URL.search(line):
                    show(found[0])
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
        finally:
            process.terminate()
    if "No module named 'tensorboard'" in said:
        raise RequestError(
            f"TensorBoard is not installed for {python}. Install it there: {shlex.quote(python)} "
            "-m pip install tensorboard. [CD0803]"
        )
    if process.returncode > 0:
        raise RequestError(f"TensorBoard ended: {said} [CD0803]")
    return EXIT_INTERRUPTED


def forward(
    on: str, run: str, options: Sequence[str], port: int | None, show: Callable[[str], None]
) -> int:
    """Serve a run on its cluster, on a port of this machine, until Ctrl-C; return the exit code.

    options: further ones for the cluster. port: None for TensorBoard's usual one, or a free one.
    Raises RequestError, ConnectionError.
    """
    own = session.command(on, ["tensorboard", "--serve", "--port=0", *options, "--", run])
    host = cluster.find(on, os.environ, Path.cwd()).host
    here = free_port(port)
    with subprocess.Popen(own, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as far:
        assert far.stdout
        try:
            if not (found := next(filter(None, map(_URL.search, far.stdout)), None)):
                return far.wait()  # it has said why
            with _forwarded(host, f"127.0.0.1:{here}:127.0.0.1:{found[1]}"):
                show(f"http://127.0.0.1:{here}{found[2]}")
                return far.wait()
        except KeyboardInterrupt:  # the terminal has sent it to the session, too
            with contextlib.suppress(subprocess.TimeoutExpired):
                far.wait(_END_SECONDS)
            return EXIT_INTERRUPTED
        finally:
            far.terminate()


def free_port(port: int | None) -> int:
    """Return an unused port of this machine. Raises RequestError for one in use."""
    for each in (_PORT, 0) if port is None else (port,):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", each)) as server:
            free: int = server.getsockname()[1]
            return free
    raise RequestError(f"--port {port} cannot be used on this machine. Leave it out. [CD1401]")


@contextlib.contextmanager
def _forwarded(host: str, where: str) -> Iterator[None]:
    """Forward a port through the shared connection, or one more. Raises ConnectionError.

    The forwards of the user's own configuration are not touched: -O changes all that it reads.
    """
    none = subprocess.DEVNULL

    def control(path: str, change: str) -> bool:
        argv = ["ssh", "-F", "none", "-S", path, f"-L{where}", f"-O{change}", "--", host]
        return not subprocess.call(argv, stdin=none, stderr=none)

    with tempfile.TemporaryDirectory(prefix="ddp-") as folder:
        path, last = session.control_path(host), "cancel"
        try:
            if not (path and control(path, "forward")):
                path, last = f"{folder}/s", "exit"
                own = ["ControlMaster=yes", "ControlPersist=no", "ClearAllForwardings=yes"]
                options = [f"-o{each}" for each in (f"ControlPath={path}", *own)]
                new = ["ssh", *options, *session.options_for(host), "-fNTx", "--", host]
                if subprocess.call(new, stdin=none) or not control(path, "forward"):
                    raise session.ConnectionError(
                        f"ssh {host} does not forward a port. Does its sshd allow it?"
                    )
            yield
        finally:
            control(path, last)
