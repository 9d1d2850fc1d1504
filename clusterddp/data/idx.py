"""Checks and reads the four IDX files of a dataset of MNIST's form: names, headers, digests.

Plain Python, so that checking a dataset imports neither numpy nor torch. A `DataError` raised here
names the file and the fault; the caller adds the folder and the remedy.
The format: http://yann.lecun.com/exdb/mnist/, "FILE FORMATS FOR THE MNIST DATABASE".
"""

import hashlib
import re
import struct
from pathlib import Path
from typing import NamedTuple

from clusterddp.errors import DataError

RAW = Path("MNIST", "raw")
"""Folder of the files below the root of torchvision's MNIST class."""
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


class Counts(NamedTuple):
    """Sizes of a complete set."""

    train_images: int
    test_images: int
    bytes: int


def image_header(count: int) -> bytes:
    return struct.pack(">4I", _IMAGES_MAGIC, count, SIDE, SIDE)


def label_header(count: int) -> bytes:
    return struct.pack(">2I", _LABELS_MAGIC, count)


def standard_name(name: str) -> str | None:
    """Map the name of a plain, gzipped or `images.idx3` file to the one in FILES, or None."""
    if not _KNOWN_FORMS.fullmatch(name):
        return None
    return name.removesuffix(".gz").replace(".idx", "-idx")


def inspect(raw: Path) -> Counts:
    """Check each file's header against its size, and the files against each other.

    Reads 16 bytes of each file. Raises DataError for a fault and OSError for an unreadable file.
    """
    counts = {name: _count_in(raw / name) for name in FILES}
    for images, labels in ((TRAIN_IMAGES, TRAIN_LABELS), (TEST_IMAGES, TEST_LABELS)):
        if counts[images] != counts[labels]:
            raise DataError(
                f"{images} holds {counts[images]:,} images, but {labels} {counts[labels]:,} "
                "labels; they do not belong together."
            )
    size = sum((raw / name).stat().st_size for name in FILES)
    return Counts(counts[TRAIN_IMAGES], counts[TEST_IMAGES], size)


def _count_in(path: Path) -> int:
    """Count the images or labels in one file, once its header and its size agree."""
    images = "images" in path.name
    magic, length = (_IMAGES_MAGIC, 16) if images else (_LABELS_MAGIC, 8)
    size = path.stat().st_size
    with path.open("rb") as file:
        header = file.read(length)
    if header.startswith(_GZIP_MAGIC):
        raise DataError(f"{path.name} is still compressed: it starts as a gzip file does.")
    if len(header) < length:
        raise DataError(
            f"{path.name} is truncated: {size} bytes, and its header alone has {length}."
        )
    first, count, *shape = struct.unpack(f">{length // 4}I", header)
    if first != magic:
        raise DataError(
            f"{path.name} starts with {first:#010x}, but an IDX file of "
            f"{'images' if images else 'labels'} with {magic:#010x}; it is some other file."
        )
    if images and shape != [SIDE, SIDE]:
        raise DataError(
            f"{path.name} holds images of {shape[0]}x{shape[1]} pixels; "
            f"the models take {SIDE}x{SIDE}."
        )
    if count == 0:
        raise DataError(
            f"{path.name} is empty: its header says 0 {'images' if images else 'labels'}."
        )
    expected: int = length + count * (SIDE * SIDE if images else 1)
    if size != expected:
        raise DataError(
            f"{path.name} is {'truncated' if size < expected else 'too long'}: {size:,} bytes, "
            f"but its header, which says {count:,} {'images' if images else 'labels'}, "
            f"makes it {expected:,}."
        )
    return int(count)


def content(path: Path) -> bytearray:
    """Read all images or labels of a file that `inspect` has passed, a byte a pixel or label."""
    with path.open("rb") as file:
        file.seek(16 if "images" in path.name else 8)
        data = bytearray(path.stat().st_size - file.tell())
        file.readinto(data)
    return data


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
    try:
        lines = (raw / SUMS).read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return {}
    matches = (_SUM_LINE.fullmatch(line.strip()) for line in lines)
    return {match[2]: match[1] for match in matches if match and match[2] in FILES}


def write_sums(raw: Path, comment: str) -> None:
    """Record the digests of the four files, below a comment that names their origin."""
    lines = [f"# {comment}", *(f"{digest(raw / name)}  {name}" for name in FILES)]
    (raw / SUMS).write_text("\n".join(lines) + "\n")


def read_comment(raw: Path) -> str:
    """Return the comment that `write_sums` left, or an empty one."""
    try:
        first, _, _ = (raw / SUMS).read_text(errors="replace").partition("\n")
    except FileNotFoundError:
        return ""
    return first.removeprefix("# ") if first.startswith("# ") else ""
