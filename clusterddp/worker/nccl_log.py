"""Log of NCCL's start on each node: its version, its network and its transports.

NCCL writes the lines of the node's first task to a file in memory, without an option of the run.
The task's small parent keeps the important ones in the attempt, a few kilobytes, and warns if NCCL
uses sockets although the node has a fast network. A program without NCCL makes no file. The lines
have the forms of NCCL 2.18 to 2.30 (init.cc, plugin/net.cc, transport/).
"""

import os
import random
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from pathlib import Path

from clusterddp import files, log
from clusterddp.formatting import clean
from clusterddp.processes import hardware
from clusterddp.processes.table import start_ticks
from clusterddp.ranks.dist_env import DistEnv
from clusterddp.ranks.variables import host_name
from clusterddp.run.attempt import Attempt
from clusterddp.run.records import SlowNetwork

FIRST_SECONDS, NEXT_SECONDS = 60.0, 300.0
"""Time until the lines are first kept, and then until NCCL has started; a fifth more or less."""
_LEFT_SECONDS = 600.0
"""Age from which the file of a process that is gone is removed."""
_OWN = ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS")
_NAME = "clusterddp-nccl-"
_MAX_BYTES, _MAX_LINES, _MAX_TEXT = 1 << 20, 60, 300
_MESSAGE = re.compile(r"NCCL (?:INFO |(WARN ))(.*)|(NCCL version .*)")
_MATTERS = re.compile(
    r"WARN |NCCL version|NET/|[Uu]sing network|NET plugin|network plugin|Bootstrap ?:"
    r"|set (?:by environment )?to|libibverbs|NVLS multicast|nNodes \d"
)
_VIA = re.compile(r"(?:Channel|CollNet) .* via (\S+)")
_STARTED = "Init COMPLETE"
_NODES = re.compile(r"nNodes (\d+)")
_NETWORK = re.compile(r"[Uu]sing network (.+)")
_INTERFACE = re.compile(r"NET/Socket ?: Using \[0\]([^\s:]+)")
_CHOICE = re.compile(
    r"(NCCL_(?:IB_DISABLE|IB_HCA|NET|NET_PLUGIN)) set (?:by environment )?to (\S+?)\.?$"
)
_REMEDIES = {
    hardware.EFA: "put the aws-ofi-nccl plugin (libnccl-net.so) on LD_LIBRARY_PATH",
    hardware.SLINGSHOT: "put the aws-ofi-nccl plugin (libnccl-net.so) on LD_LIBRARY_PATH",
}
_VERBS = "give the tasks libibverbs and /dev/infiniband, which a container may lack"


class NcclLog:
    """NCCL's log on this node, and its lines that are kept in the attempt."""

    def __init__(
        self,
        environ: MutableMapping[str, str],
        env: DistEnv,
        attempt: Attempt | None,
        root: Path = Path("/"),
    ) -> None:
        """Have NCCL log to files in this node's memory.

        environ: variables of the program, to which those for the log are added. attempt: None
        outside a run. root: root of the file system that has /sys.
        """
        self._env, self._host, self._root = env, host_name(environ), root
        self.prefix = Path(_expose(environ, env)) if attempt else Path()
        """Beginning of the files' names; no name if this task logs nothing."""
        outcomes = attempt.outcomes if attempt else Path()
        self._path = outcomes / f"nccl-{env.rank}.log"
        self._warning = outcomes / f"network-{env.rank}.json"
        self._text, self._has_warned = "", False
        self._ended, self._keeping = threading.Event(), threading.Lock()

    def began(self, *_: object) -> Callable[[], None]:
        """Keep the lines, in a thread, while the program runs; return `close`."""
        if self.prefix.name:
            _remove_left(self.prefix.parent)
            threading.Thread(target=self._run, name="nccl-log", daemon=True).start()
        return self.close

    def close(self) -> None:
        """Keep the last lines, and remove NCCL's files."""
        self._ended.set()
        if self.prefix.name:
            self._keep()
            for path in self._files():
                with suppress(OSError):
                    path.unlink()

    def _run(self) -> None:
        """Keep the lines after the first minute, and until NCCL has started."""
        seconds = FIRST_SECONDS
        while not self._ended.wait(seconds * random.uniform(0.8, 1.2)) and not self._keep():
            seconds = NEXT_SECONDS

    def _files(self) -> list[Path]:
        return sorted(self.prefix.parent.glob(f"{self.prefix.name}*"))

    def _keep(self) -> bool:
        """Write the lines if there are new ones; return whether NCCL has started."""
        with self._keeping:
            text = "\n".join([_head(path) for path in self._files()[:8]])
            lines = summarize(text)
            if not lines or lines == self._text:
                return _STARTED in text
            self._text = lines
            with suppress(OSError):  # a full disk: the lines are optional
                files.write_atomically(self._path, lines.encode(), sync=False)
            reason = slow_network(text, self._host, self._env.num_nodes, self._root)
            if reason and not self._has_warned:
                self._has_warned = True
                log.warning(f"{reason} [CD0910]")
                with suppress(OSError):
                    files.write_record(self._warning, SlowNetwork(self._host, reason), sync=False)
            return _STARTED in text


def _expose(environ: MutableMapping[str, str], env: DistEnv) -> str:
    """Set NCCL's variables for its log; return the beginning of the files' names.

    Empty, and nothing is set, on the node's other tasks, for a single rank, if the user has set one
    of these variables, and without a directory for the files.
    """
    inherited = _NAME in environ.get("NCCL_DEBUG_FILE", "")  # from a run that started this one
    is_chosen = not inherited and any(environ.get(name) for name in _OWN)
    if env.local_rank or env.world_size == 1 or is_chosen:
        return ""
    for folder in ("/dev/shm", environ.get("TMPDIR", ""), "/tmp"):
        if folder and os.access(folder, os.W_OK | os.X_OK):
            prefix = f"{folder}/{_NAME}{secrets.token_hex(8)}-"
            # %p is the process. INIT has all lines on the choice of the network, ENV the reasons.
            values = ("INFO", prefix.replace("%", "%%") + "%p", "INIT,ENV")
            environ.update(zip(_OWN, values, strict=True))
            return prefix
    return ""


def _remove_left(folder: Path) -> None:
    """Remove this user's files of programs whose parent was killed.

    A process of another PID namespace seems to be gone, so a file that NCCL just wrote stays.
    """
    for path in folder.glob(f"{_NAME}*"):
        pid = path.name.rpartition("-")[2]
        with suppress(OSError):
            state = path.lstat()
            is_ours = state.st_uid == os.getuid() and pid.isdecimal()
            is_old = time.time() - state.st_mtime > _LEFT_SECONDS
            if is_ours and is_old and start_ticks(int(pid)) is None:
                path.unlink()


def _head(path: Path) -> str:
    with suppress(OSError), path.open("rb") as file:
        return file.read(_MAX_BYTES).decode(errors="replace")
    return ""


def summarize(text: str) -> str:
    """Return the lines of NCCL's log that matter, each once, and the number of channels by kind."""
    kept: dict[str, None] = {}
    channels = Counter[str]()
    for line in text.splitlines():
        found = _MESSAGE.search(line)
        if found is None:
            continue
        message = (found[1] or "") + (found[2] or found[3])
        if via := _VIA.match(message):
            channels[via[1]] += 1
        elif _MATTERS.search(message):
            kept.setdefault(clean(re.sub(r"comm 0x\w+ ", "", message))[:_MAX_TEXT])
    lines = list(kept)[:_MAX_LINES]
    lines += [clean(f"{count} channels via {via}") for via, count in channels.most_common(20)]
    return "".join(f"{line}\n" for line in lines)


def slow_network(text: str, host: str, nodes: int, root: Path) -> str:
    """Return a sentence if NCCL uses sockets between nodes that have a faster network; else empty.

    text: NCCL's log. nodes: number of the run's nodes, in case NCCL does not say it.
    """
    networks = _NETWORK.findall(text)
    if not networks or networks[-1].strip() != "Socket":
        return ""
    if max(map(int, _NODES.findall(text)), default=nodes) < 2:
        return ""
    devices = hardware.fast_networks(root)
    if not devices:
        return ""
    interface = _INTERFACE.search(text)
    over = f" over {clean(interface[1])}" if interface else ""
    has = ", ".join(f"{kind} ({', '.join(names[:4])})" for kind, names in devices.items())
    chosen = [found for line in text.splitlines() if (found := _CHOICE.search(line))]
    remedy = " or ".join(dict.fromkeys(_REMEDIES.get(kind, _VERBS) for kind in devices))
    if chosen:
        remedy = f"{clean(chosen[-1][1])}={clean(chosen[-1][2])} is set: unset it, or {remedy}"
    return (
        f"NCCL on {host} uses sockets{over} although the node has {has}: exchanges between nodes "
        f"can be ten times slower. To use it, {remedy}."
    )
