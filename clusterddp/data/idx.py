"""The four IDX files of an MNIST-shaped dataset: names, headers, digests, and what can be wrong.

Plain Python, so that checking a dataset costs no import of numpy or torch. A `DataError` raised
here names the file and what was seen; the caller adds where the file is and what to do.
The format: http://yann.lecun.com/exdb/mnist/, "FILE FORMATS FOR THE MNIST DATABASE".
"""

import hashlib
import re
import struct
from pathlib import Path
from typing import NamedTuple

from clusterddp.errors import DataError

RAW = Path("MNIST", "raw")
"""Where torchvision's MNIST class looks for the files, below its root."""
TRAIN_IMAGES = "train-images-idx3-ubyte"
TRAIN_LABELS = "train-labels-idx1-ubyte"
TEST_IMAGES = "t10k-images-idx3-ubyte"
TEST_LABELS = "t10k-labels-idx1-ubyte"
TRAIN_FILES = (TRAIN_IMAGES, TRAIN_LABELS)
TEST_FILES = (TEST_IMAGES, TEST_LABELS)
FILES = (*TRAIN_FILES, *TEST_FILES)
SUMS = "SHA256SUMS"
"""The digests of a set that was placed by us, in the form of sha256sum(1)."""

SIDE = 28
"""Height and width of an image, pixels."""
CLASSES = 10

_IMAGES_MAGIC = 0x00000803  # unsigned bytes in three dimensions
_LABELS_MAGIC = 0x00000801  # unsigned bytes in one dimension
_GZIP_MAGIC = b"\x1f\x8b"
_KNOWN_FORMS = re.compile(r"(train|t10k)-(images[-.]idx3|labels[-.]idx1)-ubyte(\.gz)?")
_SUM_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")


class Counts(NamedTuple):
    """What a complete set holds."""

    train_images: int
    test_images: int
    bytes: int


def image_header(count: int) -> bytes:
    return struct.pack(">4I", _IMAGES_MAGIC, count, SIDE, SIDE)


def label_header(count: int) -> bytes:
    return struct.pack(">2I", _LABELS_MAGIC, count)


def standard_name(name: str) -> str | None:
    """Which of FILES is offered under this name, plain, gzipped, or as `images.idx3`; or None."""
    if not _KNOWN_FORMS.fullmatch(name):
        return None
    return name.removesuffix(".gz").replace(".idx", "-idx")


def inspect(raw: Path) -> Counts:
    """Check each file's header against its size, and the files against each other.

    Reads 16 bytes of each file. Raises DataError for what is wrong and OSError for a file that
    cannot be read.
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
    """The images or labels in one file, once its header and its size agree."""
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
    seen, count, *shape = struct.unpack(f">{length // 4}I", header)
    if seen != magic:
        raise DataError(
            f"{path.name} starts with {seen:#010x}, but an IDX file of "
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
    """All images or labels of one file, a byte a pixel or label; `inspect` has passed before."""
    with path.open("rb") as file:
        file.seek(16 if "images" in path.name else 8)
        data = bytearray(path.stat().st_size - file.tell())
        file.readinto(data)
    return data


def check_labels(raw: Path) -> None:
    """Raise DataError unless every label is a digit; `inspect` has passed before."""
    for name in (TRAIN_LABELS, TEST_LABELS):
        labels = (raw / name).read_bytes()[8:]
        if max(labels) >= CLASSES:
            index = next(i for i, label in enumerate(labels) if label >= CLASSES)
            raise DataError(
                f"{name} has the label {labels[index]} at image {index}; "
                f"labels are 0 to {CLASSES - 1}."
            )


def digest(path: Path) -> str:
    """The SHA-256 of a file, in hex."""
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            sha256.update(block)
    return sha256.hexdigest()


def read_sums(raw: Path) -> dict[str, str]:
    """File name to digest as recorded beside the files; empty where nothing is recorded."""
    try:
        lines = (raw / SUMS).read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return {}
    found = (_SUM_LINE.fullmatch(line.strip()) for line in lines)
    return {match[2]: match[1] for match in found if match and match[2] in FILES}


def write_sums(raw: Path, comment: str) -> None:
    """Record the digests of the four files, below a comment that says where they come from."""
    lines = [f"# {comment}", *(f"{digest(raw / name)}  {name}" for name in FILES)]
    (raw / SUMS).write_text("\n".join(lines) + "\n")


def read_comment(raw: Path) -> str:
    """The comment that `write_sums` left, or nothing."""
    try:
        first, _, _ = (raw / SUMS).read_text(errors="replace").partition("\n")
    except FileNotFoundError:
        return ""
    return first.removeprefix("# ") if first.startswith("# ") else ""
