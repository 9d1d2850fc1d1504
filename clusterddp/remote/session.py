"""A session on a cluster: one ssh whose stdin carries a script, then frames.

The user's words are not on ssh's command line, so that neither a login shell nor `ps` sees them.
The user's configuration of ssh applies: keys, ProxyJump, ControlMaster. Nothing is sent twice
unless it is known not to have begun.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import secrets
import select
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from clusterddp import log
from clusterddp.errors import ClusterDDPError, RequestError
from clusterddp.remote import client, frames
from clusterddp.remote import cluster as clusters
from clusterddp.remote.cluster import Cluster

if TYPE_CHECKING:
    from clusterddp.remote.tree import Tree

_START = Path(__file__).with_name("start.sh")
# One byte at a time: dash before 0.5.13 would read beyond its script, and head may, too.
_COMMAND = "exec /bin/sh -c 'eval \"$(dd bs=1 count={} 2>/dev/null)\"'"
_NEEDS_TREE = frozenset({"submit", "resume", "check", "import", "templates"})
_TRAINS = frozenset({"debug", "train", "compare", "exec"})
_ASKS = frozenset({"cancel", "clean", "rm"})
"""Commands that ask a question on the terminal."""
_SUGGESTING = ("submit", "resume", "status", "doctor")
"""Commands whose output, not only their messages, suggests others."""
_SUGGESTED = re.compile(
    rb"\bclusterddp( (?:status|logs|cancel|stop|resume|stacks|report|checkpoints|runs|submit|hold"
    rb"|release|clean|rm|data|doctor|bad-nodes)\b)"
)
_PASSED_ON = ("COLUMNS", "LINES", "NO_COLOR", "LANG", "LC_ALL", "TZ")


class ConnectionError(ClusterDDPError):
    """The cluster was not reached, or the connection was lost."""

    code = "CD1402"


def run(name: str, argv: Sequence[str]) -> int:
    """Run a command on a cluster as if it were typed there; return its exit code.

    Raises RequestError, or ConnectionError.
    """
    here = Path.cwd()
    cluster = clusters.find(name, os.environ, here)
    _refuse(name, argv)
    session = _Session(cluster, argv, here)
    try:
        return session.run()
    except (ConnectionError, KeyboardInterrupt) as error:
        if argv[:1] != ["submit"] or not session.is_sent:
            raise
        run_name = shlex.quote(_typed(session.words, "--run-name")[-1])
        how = (
            f"To see whether the run exists: clusterddp --on {shlex.quote(name)} status {run_name}"
        )
        if isinstance(error, KeyboardInterrupt):
            log.info(how)
            raise
        raise ConnectionError(f"{error} {how}") from None


def reach(host: str) -> list[str]:
    """Return the command that logs in and does nothing; it asks for no password."""
    return ["ssh", *options_for(host), "-oBatchMode=yes", "-T", "-x", "--", host, "true"]


def command(on: str, argv: Sequence[str]) -> list[str]:
    """Return the command that runs another session; no module of the directory shadows ours."""
    paths = "import sys; sys.path[:] = [sys.argv.pop(1), *filter(None, sys.path)]"
    start = f"{paths}; from clusterddp.__main__ import main; main()"
    return [sys.executable, "-c", start, str(Path(__file__).parents[2]), f"--on={on}", *argv]


def _refuse(name: str, words: Sequence[str]) -> None:
    """Raise RequestError for what a login node that was only lent clusterddp cannot do."""
    if "--no-snapshot" in _options(words):
        raise RequestError(
            f"--no-snapshot: with --on {name} a run works in its own copy of the code. [CD1401]"
        )
    command = next(iter(words), "")
    if command in _TRAINS or "local" in _typed(words, "--launcher"):
        raise RequestError(
            f"--on {name}: {command} would train on the login node. Type it on this machine, or "
            "use submit without --launcher local. [CD1401]"
        )


def _options(words: Sequence[str]) -> Sequence[str]:
    """Return the words before COMMAND."""
    return words[: [*words, "--"].index("--")]


def _file_here(words: Sequence[str]) -> tuple[list[str], str, str]:
    """Let a report be printed; return its words, and the option and file that name it here.

    Raises RequestError for a file that cannot be written.
    """
    typed = [(flag, _typed(words, flag)) for flag in ("--html", "--csv") if words[:1] == ["report"]]
    for flag, names in typed:
        if names and names[-1] != "-":
            from clusterddp.reporting.plots import check_file

            check_file(flag, names[-1], formats=())
            end = len(_options(words))
            return [*words[:end], f"{flag}=-", *words[end:]], flag, names[-1]
    return [*words], "", ""


def _typed(words: Sequence[str], flag: str) -> list[str]:
    """Return the values of a flag, as typed."""
    return [
        word.partition("=")[2] if word.startswith(f"{flag}=") else following
        for word, following in itertools.pairwise([*_options(words), ""])
        if word == flag or word.startswith(f"{flag}=")
    ]


def _limit_mb(words: Sequence[str], variables: Mapping[str, str]) -> float:
    from clusterddp.submission.snapshot import LIMIT_MB

    name = "CLUSTERDDP_SNAPSHOT_LIMIT"
    sites = variables.get(name, os.environ.get(name, str(LIMIT_MB)))
    with contextlib.suppress(ValueError):
        return float([sites, *_typed(words, "--snapshot-limit")][-1])
    return LIMIT_MB  # the cluster's command refuses it


def _environ(words: Sequence[str]) -> dict[str, str]:
    """Return the variables to send: the terminal's, and each NAME of `--env NAME`."""
    names = (*_PASSED_ON, *_typed(words, "--env"))
    size = shutil.get_terminal_size()
    shown = {"COLUMNS": str(size.columns), "LINES": str(size.lines)} if _is_shown() else {}
    return shown | {n: os.environ[n] for n in names if n in os.environ}


def _is_shown() -> bool:
    return os.isatty(1) or os.isatty(2)


class _Session:
    """One command on a cluster."""

    def __init__(self, cluster: Cluster, argv: Sequence[str], here: Path) -> None:
        self._cluster, self._here = cluster, here
        self.words, self._flag, self._file = _file_here(argv)
        self._kept = bytearray()
        self._command = next(iter(argv), "")
        self._marker = f"clusterddp-{secrets.token_hex(8)}"
        self._tree: Tree | None = None
        self._reads = "-" in _options(argv) or (self._command in _ASKS and os.isatty(0))
        self._is_verbatim = self._command not in _SUGGESTING or "--dry-run" in argv
        self._begun = self.is_sent = False

    def run(self) -> int:
        """Run it, and carry the client if the cluster lacks it; return the exit code.

        The command is sent only when the other side is ready: before, nothing can begin.
        """
        script = _script(self._cluster, self._marker)
        with _ssh(self._cluster.host, _COMMAND.format(len(script))) as ssh:
            assert ssh.stdin and ssh.stdout
            to, reader = ssh.stdin.fileno(), frames.Reader(ssh.stdout.fileno())
            _write(to, script)
            header = self._prepared()
            said = self._hear(reader)
            if said == "client":
                content = client.archive()
                log.info(f"carrying clusterddp to {self._cluster.host}")
                _write(to, f"{len(content)}\n".encode() + content)
                said = self._hear(reader)
            if said == "ready":
                self.is_sent = True
                _write(to, frames.frame(frames.HEADER, header))
                return self._follow(ssh, to, reader)
            if said:
                raise _start_error(self._cluster, said)
            _close(ssh.stdin)
            code = ssh.wait()
        raise ConnectionError(
            f"ssh {self._cluster.host} ended with exit code {code} before the command began. "
            f"Nothing was done there. Check: ssh {shlex.quote(self._cluster.host)} true"
            + (f", or use --on {self._cluster.similar}" if self._cluster.similar else "")
        )

    def _prepared(self) -> bytes:
        """List the tree and name the run while ssh connects; return the header."""
        if self._command in _NEEDS_TREE or self.words[:2] == ["env", "create"]:
            from clusterddp.remote import tree

            self._tree = tree.of(self._here, _limit_mb(self.words, self._cluster.variables))
        if self._command == "submit":
            from clusterddp.submission.fields import generate_name

            self.words.insert(1, f"--run-name={generate_name('run')}")  # a typed one wins
        environ = {**self._cluster.variables, **_environ(self.words)}
        return json.dumps(
            {
                "argv": [_bytes(word) for word in self.words],
                "environ": {name: _bytes(value) for name, value in environ.items()},
                "terminals": [os.isatty(n) and not (n == 1 and self._file) for n in range(3)],
                "tree": self._tree.digest if self._tree else "",
                "workdir": _bytes(self._tree.workdir) if self._tree else "",
                "commit": self._tree.commit if self._tree else "",
            }
        ).encode()

    def _hear(self, reader: frames.Reader) -> str:
        return (reader.after_line(self._marker.encode()) or b"").decode(errors="replace")

    def _follow(self, ssh: subprocess.Popen[bytes], to: int, reader: frames.Reader) -> int:
        """Pass frames on until the command ends. Raises ConnectionError if they end before."""
        for got in self._frames(ssh, to, reader):
            kind, content = got
            if kind in (frames.OUT, frames.ERR):
                is_out = kind == frames.OUT
                shown = content if is_out and self._is_verbatim else self._named(content)
                if is_out and self._file:
                    self._kept += content
                else:
                    frames.write(1 if is_out else 2, shown)
            elif kind == frames.TREE and self._tree:
                _write(to, frames.frame(frames.MANIFEST, self._tree.content))
            elif kind == frames.WANTED and self._tree:
                self._carry(to, json.loads(content))
            elif kind == frames.BEGUN:
                self._begun = True
                if not self._reads:
                    _write(to, frames.frame(frames.INPUT))
            elif kind == frames.EXIT:
                if self._file and content == b"0":
                    from clusterddp.reporting.plots import write_file

                    said = write_file(self._flag, self._file, bytes(self._kept))
                    frames.write(1, os.fsencode(f"{said}\n"))
                return int(content)
        words = "The command continues there unless it only shows something."
        raise ConnectionError(
            f"the connection to {self._cluster.host} was lost. "
            + (words if self._begun else "The command may have begun.")
        )

    def _named(self, content: bytes) -> bytes:
        """Return a message with this cluster in the commands that it suggests."""
        here = f"clusterddp --on {shlex.quote(self._cluster.name)}".encode()
        return _SUGGESTED.sub(lambda found: here + found[1], content)

    def _frames(
        self, ssh: subprocess.Popen[bytes], to: int, reader: frames.Reader
    ) -> Iterator[tuple[bytes, bytes]]:
        """Yield frames; meanwhile send beats, the user's input and Ctrl-C."""
        assert ssh.stdout
        interrupts, out = 0, ssh.stdout.fileno()
        while True:
            try:
                while got := reader.ready():
                    yield got
                reads = [0] if self._begun and self._reads else []
                ready = select.select([out, *reads], [], [], frames.BEAT_SECONDS)[0]
                if not ready:
                    _write(to, frames.frame(frames.BEAT))
                if 0 in ready:
                    chunk = os.read(0, 1 << 16)
                    self._reads = bool(chunk)
                    _write(to, frames.frame(frames.INPUT, chunk))
                if out in ready and not reader.fill():
                    return
            except KeyboardInterrupt:
                interrupts += 1
                if interrupts > 1 or not self._begun:
                    ssh.terminate()
                    raise
                _write(to, frames.frame(frames.INTERRUPT))

    def _carry(self, to: int, wanted: list[str]) -> None:
        assert self._tree
        size = 0
        for content in self._tree.files(wanted):
            size += len(content)
            _write(to, frames.frame(frames.DATA, content))
        if wanted:
            log.info(f"carried {len(wanted)} files ({size / 1e6:.1f} MB) to {self._cluster.host}")


def _write(to: int, content: bytes) -> None:
    """Write to ssh. If it has ended, its end of stdout shows that to the reader."""
    with contextlib.suppress(BrokenPipeError):
        frames.write(to, content)


def _bytes(word: str) -> str:
    """Return a word's bytes as latin-1, which JSON carries whatever the locales are."""
    return os.fsencode(word).decode("latin-1")


def _script(cluster: Cluster, marker: str) -> bytes:
    """Return the script of the other side, its values quoted."""
    start, rest = cluster.folder_parts
    values = {
        "marker": marker, "version": client.version(),
        "python": cluster.python, "unpack": client.UNPACK,
    }  # fmt: skip
    lines = [f"{name}={shlex.quote(value)}" for name, value in values.items()]
    lines.append(f'folder="{start}"{shlex.quote(rest)}')
    lines.append(f"before() {{ :\n{cluster.before}\n}}")
    return os.fsencode("\n".join([*lines, _START.read_text()]))


@contextlib.contextmanager
def _ssh(host: str, command: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start ssh; it shares a connection for some minutes, so that one login is enough.

    Ctrl-C is for the command, not for ssh. Raises ConnectionError without an ssh.
    """
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = subprocess.Popen(
            ["ssh", *options_for(host), "-T", "-x", "--", host, command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
    except FileNotFoundError:
        raise ConnectionError("there is no 'ssh' on the PATH. Install OpenSSH.") from None
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        yield process
    except BaseException:
        process.terminate()
        raise
    finally:
        for stream in (process.stdin, process.stdout):
            _close(stream)
        process.wait()


def _close(stream: IO[bytes] | None) -> None:
    with contextlib.suppress(BrokenPipeError):
        if stream:
            stream.close()


def options_for(host: str) -> list[str]:
    """Return options for what the person's own configuration of ssh leaves open."""
    own, options = _configuration(host, ()), []
    if own.get("serveraliveinterval", "0") == "0":
        options += ["-oServerAliveInterval=15", "-oServerAliveCountMax=4"]
    if own.get("connecttimeout", "none") == "none":
        options += ["-oConnectTimeout=20"]
    if own.get("controlpath", "none") == "none":
        folder = Path.home() / ".ssh"
        folder.mkdir(mode=0o700, exist_ok=True)
        if len(os.fsencode(folder)) < 30:  # a socket's path has at most 104 bytes
            path = f"{folder}/ddp-%C".replace('"', "")
            options += ["-oControlMaster=auto", f"-oControlPath={path}", "-oControlPersist=600"]
    return options


def control_path(host: str) -> str:
    """Return the socket of the connection that sessions share; empty if they share none."""
    path = _configuration(host, options_for(host)).get("controlpath", "none")
    return "" if path == "none" else path


def _configuration(host: str, options: Sequence[str]) -> dict[str, str]:
    argv = ["ssh", "-G", *options, "--", host]
    answer = subprocess.run(argv, capture_output=True, text=True, errors="replace", check=False)
    return dict(line.split(" ", 1) for line in answer.stdout.splitlines() if " " in line)


def _start_error(cluster: Cluster, said: str) -> ClusterDDPError:
    kind, _, what = said.partition(" ")
    if kind == "folder":
        return RequestError(
            f"{cluster.host}: cannot use the directory {what}. Set folder = DIR in "
            f"[cluster:{cluster.name}] of site.cfg. [CD1403]"
        )
    return RequestError(
        f"{cluster.host} has no Python from 3.10 on: {what or 'none was found'}. Set python = PATH "
        f"in [cluster:{cluster.name}] of site.cfg, or load one by its before line. [CD1403]"
    )
