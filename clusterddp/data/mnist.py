"""Locates, checks and shares a dataset in MNIST's format, and installs a new one atomically.

A set is four IDX files. Checks are plain Python: milliseconds on a login node, without torch or
numpy. `download` and `synthetic` create a set in a draft directory next to its final place, check
it and rename it, so that an interrupted or concurrent writer never leaves a partial set.
On each node the first rank reads the files, and the others map its copy: sealed anonymous memory
(memfd_create(2)) without a name in a file system, so that no killed process leaves files. The
others open it through the first rank's /proc entry, which requires the same user. Reading begins
before torch is imported.
The format: http://yann.lecun.com/exdb/mnist/, "FILE FORMATS FOR THE MNIST DATABASE".
"""

import fcntl
import hashlib
import itertools
import mmap
import os
import re
import shlex
import shutil
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterddp.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

_HEADER_BYTES = {True: 16, False: 8}  # in a file of images, of labels
RAW = Path("MNIST", "raw")
"""Directory of the files below the root of torchvision's MNIST class."""
TRAIN_IMAGES = "train-images-idx3-ubyte"
TRAIN_LABELS = "train-labels-idx1-ubyte"
TEST_IMAGES = "t10k-images-idx3-ubyte"
TEST_LABELS = "t10k-labels-idx1-ubyte"
TRAIN_FILES = (TRAIN_IMAGES, TRAIN_LABELS)
TEST_FILES = (TEST_IMAGES, TEST_LABELS)
FILES = (*TRAIN_FILES, *TEST_FILES)
SUMS = "SHA256SUMS"
"""Digests of a set that clusterddp put into place, in the form of sha256sum(1)."""

SIDE = 28
"""Height and width of an image, pixels."""
CLASSES = 10

_IMAGES_MAGIC = 0x00000803  # unsigned bytes in three dimensions
_LABELS_MAGIC = 0x00000801  # unsigned bytes in one dimension
_GZIP_MAGIC = b"\x1f\x8b"
_KNOWN_FORMS = re.compile(r"(train|t10k)-(images[-.]idx3|labels[-.]idx1)-ubyte(\.gz)?")
_SUM_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")


def image_header(count: int) -> bytes:
    return struct.pack(">4I", _IMAGES_MAGIC, count, SIDE, SIDE)


def label_header(count: int) -> bytes:
    return struct.pack(">2I", _LABELS_MAGIC, count)


def standard_name(name: str) -> str | None:
    """Map the name of a plain, gzipped or `images.idx3` file to the one in FILES, or None."""
    if not _KNOWN_FORMS.fullmatch(name):
        return None
    return name.removesuffix(".gz").replace(".idx", "-idx")


def inspect(raw: Path) -> tuple[int, int, int]:
    """Check each file's header against its size, and the files against each other.

    Reads 16 bytes of each file. Returns the numbers of training and test images, and the bytes of
    all files. Raises DataError for a fault and OSError for an unreadable file.
    """
    counts = {name: _count_in(raw / name) for name in FILES}
    for images, labels in ((TRAIN_IMAGES, TRAIN_LABELS), (TEST_IMAGES, TEST_LABELS)):
        if counts[images] != counts[labels]:
            raise DataError(
                f"{images} holds {counts[images]:,} images, but {labels} {counts[labels]:,} "
                "labels; they do not belong together."
            )
    size = sum((raw / name).stat().st_size for name in FILES)
    return counts[TRAIN_IMAGES], counts[TEST_IMAGES], size


def _count_in(path: Path) -> int:
    """Count the images or labels in one file, once its header and its size agree."""
    kind, magic, length, item = "labels", _LABELS_MAGIC, 8, 1
    if "images" in path.name:
        kind, magic, length, item = "images", _IMAGES_MAGIC, 16, SIDE * SIDE
    size = path.stat().st_size
    with path.open("rb") as file:
        header = file.read(length)
    if header.startswith(_GZIP_MAGIC):
        raise DataError(f"{path.name} is still compressed: it has the header of a gzip file.")
    if len(header) < length:
        raise DataError(f"{path.name} is truncated: {size} bytes, but the header has {length}.")
    first, count, *shape = struct.unpack(f">{length // 4}I", header)
    if first != magic:
        raise DataError(
            f"{path.name} starts with {first:#010x}; an IDX file of {kind} starts with "
            f"{magic:#010x}."
        )
    if kind == "images" and shape != [SIDE, SIDE]:
        raise DataError(
            f"{path.name} holds images of {shape[0]}x{shape[1]} pixels; "
            f"the models take {SIDE}x{SIDE}."
        )
    if count == 0:
        raise DataError(f"{path.name} is empty: its header says 0 {kind}.")
    expected: int = length + count * item
    if size != expected:
        raise DataError(
            f"{path.name} is {'truncated' if size < expected else 'too long'}: {size:,} bytes, "
            f"but {expected:,} are expected for the {count:,} {kind} in its header."
        )
    return int(count)


def check_labels(raw: Path) -> None:
    """Raise DataError unless every label of files that `inspect` has passed is a digit."""
    for name in (TRAIN_LABELS, TEST_LABELS):
        labels = (raw / name).read_bytes()[8:]
        if max(labels) >= CLASSES:
            index = next(i for i, label in enumerate(labels) if label >= CLASSES)
            raise DataError(
                f"{name} has the label {labels[index]} at image {index}; "
                f"labels are 0 to {CLASSES - 1}."
            )


def digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hex."""
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            sha256.update(block)
    return sha256.hexdigest()


def read_sums(raw: Path) -> dict[str, str]:
    """Return the recorded digests by file name; empty without a record."""
    matches = (_SUM_LINE.fullmatch(line.strip()) for line in _record(raw))
    return {match[2]: match[1] for match in matches if match and match[2] in FILES}


def write_sums(raw: Path, comment: str) -> None:
    """Record the digests of the four files, below a comment that names their origin."""
    lines = [f"# {comment}", *(f"{digest(raw / name)}  {name}" for name in FILES)]
    (raw / SUMS).write_text("\n".join(lines) + "\n")


def read_comment(raw: Path) -> str:
    """Return the comment that `write_sums` left, or an empty one."""
    first = next(iter(_record(raw)), "")
    return first.removeprefix("# ") if first.startswith("# ") else ""


def _record(raw: Path) -> list[str]:
    """Read the lines that `write_sums` left, or none."""
    try:
        return (raw / SUMS).read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return []


PUBLISHED = {
    TRAIN_IMAGES: "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    TRAIN_LABELS: "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    TEST_IMAGES: "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    TEST_LABELS: "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
"""SHA-256 of the four files of MNIST as LeCun, Cortes and Burges published them, uncompressed."""

DRAFT_PREFIX = ".draft-"

# Mean and standard deviation of MNIST's training pixels, on a scale of 0 to 1.
PIXEL_MEAN, PIXEL_STD = 0.1307, 0.3081


@dataclass(frozen=True)
class DatasetInfo:
    """A complete dataset."""

    name: str
    root: Path
    """Root of torchvision's MNIST class; the files are in MNIST/raw below it."""
    train_images: int
    test_images: int
    bytes: int
    checksums_verified: bool
    published: bool = False
    """True if the verified digests are the published ones of MNIST."""

    def describe(self) -> str:
        """Describe name, location and size in one line."""
        return (
            f"{self.name} at {self.root / RAW}, {self.train_images:,} training and "
            f"{self.test_images:,} test images"
        )


def dataset_root(dataset: str, data_dir: str) -> Path:
    """Return the root of torchvision's MNIST class."""
    root = Path(data_dir).expanduser()
    return root / "synthetic" if dataset == "synthetic" else root


def ensure(
    dataset: str, data_dir: str, sources: Mapping[str, Callable[[str], object]]
) -> DatasetInfo:
    """Check the dataset; if it is missing and has a source, get it first.

    sources: for a dataset's name, a function that installs it in data_dir, checked and complete;
        if several processes call it, the first one's stays. A damaged set is never replaced.
    Raises DataError if there is no complete set afterwards.
    """
    root = dataset_root(dataset, data_dir)
    absent = len(missing_files(root)) == len(FILES) and not under_other_names(root)
    if absent and dataset in sources:
        sources[dataset](data_dir)
    return check(dataset, data_dir, checksums=False)


def check(dataset: str, data_dir: str, *, checksums: bool) -> DatasetInfo:
    """Check headers and sizes, with `checksums` also every byte and label; change nothing.

    Expected digests come from the set's SHA256SUMS (imported and synthetic sets have one), or else
    are the published ones of MNIST. Raises DataError with cause and remedy if the set is missing,
    damaged or unreadable.
    """
    root = dataset_root(dataset, data_dir)
    missing = missing_files(root)
    packed = under_other_names(root) if missing else None
    if packed or len(missing) == len(FILES):
        raise DataError(_absence(dataset, data_dir, packed), code="CD0601")
    try:
        if missing:
            raise DataError(f"{', '.join(missing)} missing; the other files exist. [CD0601]")
        return check_at(dataset, root, checksums=checksums)
    except DataError as fault:
        raise DataError(
            f"the {dataset} dataset at {root / RAW} is damaged: {fault}\n"
            f"Move that directory away, then get the set again:\n{list_sources(dataset, data_dir)}",
            code=fault.code,
        ) from None
    except OSError as error:
        raise unreadable(root / RAW, error) from None


def check_at(dataset: str, root: Path, *, checksums: bool) -> DatasetInfo:
    """Check a root that has all four files, like `check`; messages only name the file.

    Raises DataError for a damaged file and OSError for an unreadable one.
    """
    raw = root / RAW
    counts = inspect(raw)
    published = False
    if checksums:
        check_labels(raw)
        recorded = read_sums(raw)
        expected = {**(PUBLISHED if dataset == "mnist" else {}), **recorded}
        for name in FILES:
            actual = digest(raw / name)
            if name not in expected:
                raise DataError(f"{SUMS} has no digest of {name}, so it cannot be verified.")
            if actual != expected[name]:
                source = f"{SUMS} records" if name in recorded else "MNIST was published with"
                raise DataError(
                    f"{name} has the SHA-256 digest {actual}, but {source} {expected[name]}; "
                    "it was changed, or belongs to another dataset."
                )
        published = expected == PUBLISHED
    return DatasetInfo(dataset, root, *counts, checksums_verified=checksums, published=published)


def fingerprint(dataset: str, data_dir: str) -> str:
    """Return one SHA-256 over the set's four files, by which a run detects a changed set.

    Raises DataError if a file cannot be read.
    """
    raw = dataset_root(dataset, data_dir) / RAW
    try:
        digests = [digest(raw / name) for name in FILES]
    except OSError as error:
        raise unreadable(raw, error) from None
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def rendered_by(dataset: str, data_dir: str) -> str:
    """Name the generator of the existing synthetic set, for a message about different digits."""
    if dataset != "synthetic":
        return ""
    origin = read_comment(dataset_root(dataset, data_dir) / RAW) or "a set of unknown origin"
    return f" The directory holds {origin}."


def torchvision_set(dataset: str, data_dir: str, *, train: bool) -> Any:
    """Return torchvision's MNIST for the existing set: normalised (1, 28, 28) tensors, labels.

    Raises DataError like `check`, and if torchvision is missing.
    """
    root = check(dataset, data_dir, checksums=False).root
    legacy = root / "MNIST" / "processed"
    if (legacy / "training.pt").exists() and (legacy / "test.pt").exists():
        # torchvision.datasets.MNIST prefers what torchvision before 0.9 cached there.
        raise DataError(
            f"{legacy} holds a cache of an old torchvision, which would be read in place of the "
            f"checked files in {root / RAW}. Move that directory away. [CD0608]"
        )
    try:
        from torchvision import datasets, transforms
    except ImportError as error:
        raise DataError(
            f"--data-pipeline loader needs torchvision, which cannot be imported: {error}. Install "
            "it (python -m pip install torchvision), or use --data-pipeline memory. [CD0803]"
        ) from None
    steps = [transforms.ToTensor(), transforms.Normalize((PIXEL_MEAN,), (PIXEL_STD,))]
    return datasets.MNIST(str(root), train=train, transform=transforms.Compose(steps))


def list_sources(dataset: str, data_dir: str, *, may_fetch: bool = True) -> str:
    """List the ways to get the dataset or a replacement, one per line."""
    place = f"--data-dir {shlex.quote(data_dir)}"
    fetch = (f"clusterddp data fetch {place}", "downloads it")
    import_ = (f"clusterddp data import FILE {place}", "takes it from a directory or tar archive")
    render = (f"clusterddp data generate {place}", "renders digits for --dataset synthetic")
    elsewhere = ("--data-dir DIR", "if you already have it elsewhere")
    rows = [render, elsewhere]
    if dataset == "mnist":
        rows = [*([fetch] if may_fetch else []), import_, elsewhere, render]
    width = max(len(command) for command, _ in rows)
    return "\n".join(f"  {command:{width}}  {effect}" for command, effect in rows)


def missing_files(root: Path) -> list[str]:
    """Return which of the four files are missing; raise DataError for an unreadable directory."""
    missing = []
    for name in FILES:
        try:
            (root / RAW / name).stat()
        except (FileNotFoundError, NotADirectoryError):
            missing.append(name)
        except OSError as error:
            raise unreadable(root / RAW, error) from None
    return missing


def under_other_names(root: Path) -> Path | None:
    """Find a nearby directory with all four files in a form that `data import` takes."""
    for place in (root / RAW, root / "MNIST", root):
        try:
            names = {standard_name(path.name) for path in place.iterdir()}
        except OSError:
            continue
        if names >= set(FILES):
            return place
    return None


def _absence(dataset: str, data_dir: str, packed: Path | None) -> str:
    if packed and dataset == "mnist":
        return (
            f"the mnist dataset is not unpacked: {packed} holds its files compressed, renamed or "
            f"not in {RAW}. Unpack them into place:\n"
            f"  clusterddp data import {shlex.quote(str(packed))} "
            f"--data-dir {shlex.quote(data_dir)}"
        )
    return (
        f"the {dataset} dataset is missing: {dataset_root(dataset, data_dir) / RAW} does not "
        f"contain {TRAIN_IMAGES} and the other three files. Get it before you submit:\n"
        f"{list_sources(dataset, data_dir)}"
    )


def unreadable(raw: Path, error: OSError) -> DataError:
    """Build the error for a dataset whose files cannot be read."""
    return DataError(
        f"the dataset at {raw} cannot be read: {error.filename or raw}: {error.strerror}. "
        "Ask its owner for read permission, or choose another directory with --data-dir. [CD0607]"
    )


@contextmanager
def draft_beside(root: Path) -> Iterator[Path]:
    """Create a temporary root with an empty MNIST/raw, on the file system of the final place.

    Raises DataError if the directory cannot be created or written.
    """
    home = root / "MNIST"
    made_root = not root.exists()
    draft = None
    try:
        draft = _make_draft(home)
        (draft / RAW).mkdir(parents=True)
        yield draft
    except OSError as error:
        raise DataError(
            f"cannot write the dataset to {root}: {error.strerror or error}. Use --data-dir to "
            "choose a writable directory with free space. [CD0607]"
        ) from None
    finally:
        if draft:
            shutil.rmtree(draft, ignore_errors=True)
        for place in (home, *([root] if made_root else [])):
            with suppress(OSError):
                place.rmdir()  # only if empty, after a failure


def _make_draft(home: Path) -> Path:
    for _ in range(100):
        home.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # another process failed and removed it while empty
            return Path(tempfile.mkdtemp(prefix=DRAFT_PREFIX, dir=home))
    raise OSError(f"{home} is removed each time it is created")


def put_into_place(draft: Path, root: Path) -> None:
    """Move a complete set from its draft into place; an existing set stays.

    Raises DataError if the existing files differ from the draft's: nothing is overwritten.
    """
    source, target = draft / RAW, root / RAW
    for path in source.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    try:
        os.rename(source, target)  # noqa: PTH104 -- must fail for a non-empty target
        return
    except OSError:
        if not target.is_dir():
            raise
    # It exists: another process was faster, or it holds archives or a part of the set.
    recorded = read_sums(target)
    for name in FILES:
        new = digest(source / name)
        old = digest(target / name) if (target / name).exists() else new
        if old != new or recorded.get(name, new) != new:
            raise DataError(
                f"{target} already contains another or a damaged dataset: its {name} differs. "
                "Nothing was changed. Move it away, or choose another --data-dir. [CD0608]"
            )
    for name in (*FILES, SUMS):
        if not (target / name).exists():
            (source / name).replace(target / name)


@dataclass(frozen=True)
class SharedRef:
    """Location of a dataset in the memory of another process of this node."""

    pid: int
    handle: int
    """Descriptor of the memory in that process."""
    file: tuple[int, ...]
    """Device and inode, which identify the memory."""
    sizes: tuple[int, ...]


@dataclass
class SharedDataset:
    """The four files in memory, concatenated."""

    memory: "mmap.mmap | bytearray"
    sizes: tuple[int, ...]
    """Bytes of each file, in the order of FILES."""
    handle: int | None = None
    """Descriptor of the memory; None if others cannot map it."""

    def tensors(self, *, train: bool) -> tuple["Tensor", "Tensor"]:
        """Return pixels (N, 28, 28) of 0 to 255, uint8, in this memory; labels (N,), int64."""
        import torch

        tensors = []
        for name in TRAIN_FILES if train else TEST_FILES:
            place = FILES.index(name)
            header = _HEADER_BYTES["images" in name]
            begin, count = sum(self.sizes[:place]) + header, self.sizes[place] - header
            tensors.append(
                torch.frombuffer(self.memory, dtype=torch.uint8, offset=begin, count=count)
            )
        pixels, labels = tensors
        return pixels.view(-1, SIDE, SIDE), labels.long()

    def digest(self) -> str:
        """Return the same digest as `fingerprint`."""
        content, ends = memoryview(self.memory), itertools.accumulate(self.sizes)
        files = (content[end - size : end] for size, end in zip(self.sizes, ends, strict=True))
        digests = "".join(hashlib.sha256(file).hexdigest() for file in files)
        return hashlib.sha256(digests.encode()).hexdigest()

    def ref(self) -> SharedRef | None:
        """Return what another rank of this node needs to map it; None if it cannot."""
        if self.handle is None:
            return None
        status = os.fstat(self.handle)
        return SharedRef(os.getpid(), self.handle, (status.st_dev, status.st_ino), self.sizes)

    def close(self) -> None:
        """Stop sharing; tensors keep the memory that they need."""
        if self.handle is not None:
            os.close(self.handle)
            self.handle = None


class Reading:
    """Reads a dataset in a background thread."""

    def __init__(self, dataset: str, data_dir: str, *, digest: bool) -> None:
        """digest: whether this rank will ask for the fingerprint."""
        self._dataset, self._data_dir = dataset, data_dir
        self._shared: SharedDataset | None = None
        self._sha256 = ""
        self._wants_digest = digest
        self._thread = threading.Thread(target=self._run, name="dataset", daemon=True)
        self._thread.start()

    def wait(self) -> SharedDataset:
        """Wait for the dataset; if reading it failed, try again, since it may exist now.

        Raises DataError like `read`.
        """
        self._thread.join()
        if self._shared is None:
            self._shared = read(self._dataset, self._data_dir)
        return self._shared

    def fingerprint(self) -> str:
        """Return the `fingerprint` of the bytes in use. Raises DataError."""
        self._sha256 = self._sha256 or self.wait().digest()
        return self._sha256

    def _run(self) -> None:
        # An error here is raised again, and then reported, by `wait`.
        with suppress(DataError, OSError, MemoryError):
            if not missing_files(dataset_root(self._dataset, self._data_dir)):
                self._shared = read(self._dataset, self._data_dir)
                if self._wants_digest:
                    self._sha256 = self._shared.digest()


def read(dataset: str, data_dir: str) -> SharedDataset:
    """Read the set. Raises DataError if it is missing, damaged or unreadable."""
    raw = check(dataset, data_dir, checksums=False).root / RAW
    try:
        return _read_to_share(raw) or _read(raw)
    except OSError as error:
        raise unreadable(raw, error) from None


def take(ref: SharedRef | None) -> SharedDataset:
    """Map the dataset of another rank; raise OSError or ValueError if that is impossible."""
    if ref is None:
        raise ValueError("the first rank could not put it into shared memory")
    # Another process's descriptor can be anything, for example a pipe without a writer.
    handle = os.open(f"/proc/{ref.pid}/fd/{ref.handle}", os.O_RDONLY | os.O_NONBLOCK)
    try:
        status = os.fstat(handle)
        # In this task's own PID namespace the number names another process.
        is_it = (status.st_dev, status.st_ino) == ref.file
        if not is_it or status.st_size != sum(ref.sizes):
            raise ValueError("its process id belongs to another process here")
        return SharedDataset(_mapped(handle, status.st_size), ref.sizes)
    finally:
        os.close(handle)


def _read_to_share(raw: Path) -> SharedDataset | None:
    """Read the files into memory that others can map; None if the system lacks it."""
    try:
        handle = os.memfd_create("clusterddp-data", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError):
        return None
    try:
        sizes = tuple(_append(handle, raw / name) for name in FILES)
        everything = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
        fcntl.fcntl(handle, fcntl.F_ADD_SEALS, everything | fcntl.F_SEAL_SEAL)
        return SharedDataset(_mapped(handle, sum(sizes)), sizes, handle)
    except OSError:  # an error of the files is raised again in `_read`
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
                raise OSError("the file has shrunk")
            place += sent
    return size


def _mapped(handle: int, size: int) -> mmap.mmap:
    # Private: torch needs writable memory, and a sealed file permits no other writable mapping.
    return mmap.mmap(handle, size, access=mmap.ACCESS_COPY)


def _read(raw: Path) -> SharedDataset:
    contents = [(raw / name).read_bytes() for name in FILES]
    return SharedDataset(bytearray().join(contents), tuple(map(len, contents)))
