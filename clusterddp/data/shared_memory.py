"""Shares one copy of the dataset on each node: its first rank reads the files, the others map them.

The copy lies in anonymous memory (memfd_create(2)), sealed against changes. It has no name in any
file system, so nothing is left behind whichever process is killed. The others open it through the
first rank's /proc entry, which only the same user can. Reading begins before torch is imported.
"""

import fcntl
import hashlib
import itertools
import mmap
import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from clusterddp.data import mnist
from clusterddp.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

_HEADER_BYTES = {True: 16, False: 8}  # in a file of images, of labels


@dataclass(frozen=True)
class Offer:
    """Place of a dataset in the memory of another process of this node."""

    pid: int
    handle: int
    """Descriptor of the memory in that process."""
    file: tuple[int, ...]
    """Device and inode, by which the memory is recognised."""
    sizes: tuple[int, ...]


@dataclass
class Held:
    """The four files in memory, one after the other."""

    memory: "mmap.mmap | bytearray"
    sizes: tuple[int, ...]
    """Bytes of each file, in the order of mnist.FILES."""
    handle: int | None = None
    """Descriptor of the memory, where others can map it."""

    def tensors(self, *, train: bool) -> tuple["Tensor", "Tensor"]:
        """Return pixels (N, 28, 28) of 0 to 255, uint8, in this memory; labels (N,), int64."""
        import torch

        tensors = []
        for name in mnist.TRAIN_FILES if train else mnist.TEST_FILES:
            place = mnist.FILES.index(name)
            header = _HEADER_BYTES["images" in name]
            begin, count = sum(self.sizes[:place]) + header, self.sizes[place] - header
            tensors.append(
                torch.frombuffer(self.memory, dtype=torch.uint8, offset=begin, count=count)
            )
        pixels, labels = tensors
        return pixels.view(-1, mnist.SIDE, mnist.SIDE), labels.long()

    def digest(self) -> str:
        """Return what `mnist.fingerprint` does of the files."""
        content, ends = memoryview(self.memory), itertools.accumulate(self.sizes)
        files = (content[end - size : end] for size, end in zip(self.sizes, ends, strict=True))
        digests = "".join(hashlib.sha256(file).hexdigest() for file in files)
        return hashlib.sha256(digests.encode()).hexdigest()

    def offer(self) -> Offer | None:
        """Return what another rank of this node needs to map it; None where it cannot."""
        if self.handle is None:
            return None
        status = os.fstat(self.handle)
        return Offer(os.getpid(), self.handle, (status.st_dev, status.st_ino), self.sizes)

    def close(self) -> None:
        """Withdraw the offer; tensors keep the memory that they need."""
        if self.handle is not None:
            os.close(self.handle)
            self.handle = None


class Reading:
    """Reads a dataset in a background thread."""

    def __init__(self, dataset: str, data_dir: str, *, digest: bool) -> None:
        """digest: whether this rank will ask for the fingerprint."""
        self._dataset, self._data_dir = dataset, data_dir
        self._held: Held | None = None
        self._sha256 = ""
        self._wants_digest = digest
        self._thread = threading.Thread(target=self._run, name="dataset", daemon=True)
        self._thread.start()

    def held(self) -> Held:
        """Wait for the dataset; where reading it failed, read again, as it may be there now.

        Raises DataError as `read` does.
        """
        self._thread.join()
        if self._held is None:
            self._held = read(self._dataset, self._data_dir)
        return self._held

    def fingerprint(self) -> str:
        """Return the `mnist.fingerprint` of the bytes that are trained on. Raises DataError."""
        held = self.held()
        self._sha256 = self._sha256 or held.digest()
        return self._sha256

    def _run(self) -> None:
        # An error here is raised again, and then reported, by `held`.
        with suppress(DataError, OSError, MemoryError):
            if not mnist.missing_files(mnist.folder(self._dataset, self._data_dir)):
                self._held = read(self._dataset, self._data_dir)
                if self._wants_digest:
                    self._sha256 = self._held.digest()


def read(dataset: str, data_dir: str) -> Held:
    """Read the set in place. Raises DataError when it is missing, damaged or unreadable."""
    raw = mnist.check(dataset, data_dir, checksums=False).root / mnist.RAW
    try:
        return _read_to_share(raw) or _read(raw)
    except OSError as error:
        raise mnist.unreadable(raw, error) from None


def take(offer: Offer | None) -> Held:
    """Map what another rank of this node offers; raises OSError or ValueError where it cannot."""
    if offer is None:
        raise ValueError("it could not be put into memory that ranks can share")
    # The descriptor of another process can be anything, even a pipe that nobody writes to.
    handle = os.open(f"/proc/{offer.pid}/fd/{offer.handle}", os.O_RDONLY | os.O_NONBLOCK)
    try:
        status = os.fstat(handle)
        # In a PID namespace of this task's own the number names another process.
        is_it = (status.st_dev, status.st_ino) == offer.file
        if not is_it or status.st_size != sum(offer.sizes):
            raise ValueError("its process id is another process's here")
        return Held(_mapped(handle, status.st_size), offer.sizes)
    finally:
        os.close(handle)


def _read_to_share(raw: Path) -> Held | None:
    """Into memory that others can map; None where the system has none, or not enough."""
    try:
        handle = os.memfd_create("clusterddp-data", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError):
        return None
    try:
        sizes = tuple(_append(handle, raw / name) for name in mnist.FILES)
        everything = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
        fcntl.fcntl(handle, fcntl.F_ADD_SEALS, everything | fcntl.F_SEAL_SEAL)
        return Held(_mapped(handle, sum(sizes)), sizes, handle)
    except OSError:  # the files' own errors come again in `_read`
        os.close(handle)
        return None


def _append(handle: int, path: Path) -> int:
    """Copy a file to the end of the memory; returns its bytes."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        place = 0
        while place < size:
            sent = os.sendfile(handle, file.fileno(), place, size - place)
            if not sent:
                raise OSError("the file has become shorter")
            place += sent
    return size


def _mapped(handle: int, size: int) -> mmap.mmap:
    # Private, as torch wants writable memory and a sealed file allows no other writable mapping.
    return mmap.mmap(handle, size, access=mmap.ACCESS_COPY)


def _read(raw: Path) -> Held:
    contents = [(raw / name).read_bytes() for name in mnist.FILES]
    return Held(bytearray().join(contents), tuple(map(len, contents)))
