"""Hardware of this machine: drivers, GPUs, networks, memory, file systems, process limits."""

import os
import re
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from clusterddp.formatting import count

_NVIDIA = Path("/proc/driver/nvidia")
NVIDIA_DRIVER = (_NVIDIA / "version", Path("/dev/nvidiactl"), Path("/usr/lib/wsl/lib/libcuda.so.1"))
"""Files that show an NVIDIA driver; any of them suffices. A sandbox such as gVisor may have only
the device, and WSL 2 only the library of the Windows driver."""
AMD_DEVICE = Path("/dev/kfd")
_CPUS = Path("/proc/cpuinfo")
_SIOCGIFADDR = 0x8915
MAX_FILES = 65536
"""Highest soft limit of open files that is set: some programs close every descriptor below it."""
SHARED_TYPES = (
    "nfs nfs4 lustre gpfs beegfs beegfs_nodev ceph fuse.ceph fuse.ceph-fuse cifs smb3 panfs wekafs "
    "glusterfs fuse.glusterfs orangefs pvfs2 gfs2 ocfs2 afs fuse.juicefs 9p virtiofs"
)
LOCAL_TYPES = (
    "ext2 ext3 ext4 xfs btrfs zfs f2fs jfs bcachefs tmpfs ramfs overlay vfat exfat squashfs"
)
"""File system types as in /proc/self/mountinfo, proc(5)."""
LOW_LOCKED_BYTES = 1 << 30
"""Locked memory below which InfiniBand's libraries may fail to register their buffers."""
INFINIBAND, ROCE, EFA, SLINGSHOT = "InfiniBand", "RoCE", "EFA", "Slingshot"
_FAST_ETHERNET = 100
"""Gb/s from which an Ethernet port with RDMA is meant for exchanges between GPUs."""
# Controller -> limit, usage, and a prefix in memory.stat
# (cgroups(7): the unified hierarchy has no controller's name in /proc/self/cgroup).
_FILES = {
    "": ("memory.max", "memory.current", ""),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
}
_CACHES = ("inactive_file", "active_file")
"""Reclaimable file cache in memory.stat, which the kernel counts in MemAvailable, too."""


def has_nvidia_driver() -> bool:
    """Return whether this host has an NVIDIA driver."""
    return any(path.exists() for path in NVIDIA_DRIVER)


def gpu_driver(root: Path = Path("/")) -> str:
    """Return the vendor of the GPU driver on this host: NVIDIA, AMD, Intel, or empty for none.

    root: file system root to search for AMD and Intel devices.
    """
    if has_nvidia_driver():
        return "NVIDIA"
    if (root / AMD_DEVICE.relative_to("/")).exists():
        return "AMD"
    for vendor in (root / "sys/class/drm").glob("renderD*/device/vendor"):
        with suppress(OSError):
            if vendor.read_text().strip() == "0x8086":  # Intel's PCI vendor id
                return "Intel"
    return ""


def visible_gpus() -> int:
    """Count the GPUs that torch sees, in a subprocess; 0 without a driver."""
    if not has_nvidia_driver():
        return 0
    command = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return int(answer) if answer.isdigit() else 0


def describe(kind: str) -> str:
    """Return `2 x Intel(R) Xeon(R) Gold 6330` for kind `cpu` or `cuda`; empty if unknown."""
    if kind == "cuda":
        infos = _NVIDIA.glob("gpus/*/information")
        return ", ".join(
            f"{count} x {name}" for name, count in Counter(map(_model, infos)).items() if name
        )
    name = _model(_CPUS)
    return f"{len(os.sched_getaffinity(0))} x {name}" if name else ""


def _model(path: Path) -> str:
    """Read the first `model name : …` or `Model: …` in a file of /proc."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        key, colon, value = line.partition(":")
        if colon and key.strip() in ("model name", "Model"):
            return value.strip()
    return ""


def free_bytes(root: Path = Path("/")) -> int | None:
    """Return the host's available bytes, or fewer if a cgroup limits them.

    None if unknown (not on Linux). root: root of the file system to read.
    """
    available = _number(root / "proc/meminfo", "MemAvailable:")
    if available is None:
        return None
    return min([available * 1024, *_left_in_cgroups(root)])


def _left_in_cgroups(root: Path) -> list[int]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    left = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        controller = "memory" if "memory" in controllers.split(",") else controllers
        if controller not in _FILES:
            continue
        top = root / "sys/fs/cgroup" / controller
        group = top / path.lstrip("/")
        limit, usage, prefix = _FILES[controller]
        for folder in (group, *group.parents):
            if not folder.is_relative_to(top):
                break
            allowed, used = _number(folder / limit), _number(folder / usage)
            if allowed is not None and used is not None:
                stat = folder / "memory.stat"
                cached = sum(_number(stat, f"{prefix}{cache}") or 0 for cache in _CACHES)
                left.append(max(allowed - used + cached, 0))
    return left


def _number(path: Path, name: str = "") -> int | None:
    """Read the number after `name` in a file, or the file's only number; None for `max`."""
    try:
        words = path.read_text().split()
        return int(words[words.index(name) + 1 if name else 0])
    except (OSError, ValueError, IndexError):
        return None


def fast_networks(root: Path = Path("/")) -> dict[str, list[str]]:
    """Return the node's devices with an active port for exchanges between nodes, by kind.

    root: root of the file system to read (the kernel's ABI/stable/sysfs-class-infiniband).
    """
    found: dict[str, list[str]] = {}
    for device in sorted((root / "sys/class/infiniband").glob("*")):
        ports = [kind for port in sorted(device.glob("ports/*")) if (kind := _port_kind(port))]
        if ports:
            is_efa = (device / "device/driver").resolve().name == "efa"
            found.setdefault(EFA if is_efa else ports[0], []).append(device.name)
    if names := sorted(device.name for device in (root / "sys/class/cxi").glob("*")):
        found[SLINGSHOT] = names
    return found


def _port_kind(port: Path) -> str:
    """Return `InfiniBand` or `RoCE` for an active port; empty for one that is down or slow."""
    try:
        state, layer, rate = (
            (port / name).read_text().strip() for name in ("state", "link_layer", "rate")
        )
        if "ACTIVE" not in state.split():
            return ""
        slow = layer == "Ethernet" and float(rate.split()[0]) < _FAST_ETHERNET
    except (OSError, ValueError, IndexError):
        return ""
    return "" if slow else ROCE if layer == "Ethernet" else INFINIBAND


def address_of(interface: str) -> str:
    """Return the IPv4 address of a network interface, or an empty text (netdevice(7))."""
    import fcntl  # seldom needed
    import socket
    import struct

    request = struct.pack("256s", interface.encode(errors="surrogateescape")[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def open_files() -> int:
    """Return the hard limit of open files, to which a task raises its own; at most MAX_FILES."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)


def locked_bytes() -> int:
    """Return the soft limit of locked memory, `ulimit -l` in bytes; -1 without a limit."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return -1 if soft == resource.RLIM_INFINITY else soft


def too_few_files(limit: float, ranks: int) -> str:
    """Return a sentence if a job's first rank needs more open files than `limit`; else empty."""
    needed = 2 * ranks + 200
    if not 0 <= limit < min(needed, MAX_FILES):
        return ""
    return (
        f"hard limit of {limit:,.0f} open files (ulimit -Hn), but {count(ranks, 'rank')} may need "
        f"{needed:,}"
    )


def too_little_locked(limit: float) -> str:
    """Return a sentence if so little memory may be locked that InfiniBand may fail; else empty."""
    if not 0 <= limit < LOW_LOCKED_BYTES:
        return ""
    return f"limit of {limit / 1024:,.0f} KiB of locked memory (ulimit -l): InfiniBand may fail"


def mounts() -> list[str]:
    """Return the lines of /proc/self/mountinfo, proc(5). Raises OSError."""
    return Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()


def file_system_type(path: str, mountinfo: Iterable[str]) -> str:
    """Return the file system type of an absolute path, from lines of /proc/self/mountinfo, proc(5).

    If several file systems are mounted at one place, the last one counts.
    """
    kind, longest = "unknown", -1
    for mount in mountinfo:
        before, dash, rest = mount.partition(" - ")
        fields = before.split(" ")
        if not dash or len(fields) < 5:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
        is_below = path == point or path.startswith(f"{point.rstrip('/')}/")
        if is_below and len(point) >= longest:
            kind, longest = rest.split(" ")[0], len(point)
    return kind
