"""Renders digits of a small bitmap font as a set in MNIST's format, for sites without MNIST.

Each digit varies in size, slant, place, ink and noise. It uses integer arithmetic on a frozen
random stream: a seed gives the same bytes with every version of numpy on every machine. The digits
are far easier to recognise than handwriting.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from clusterddp import log
from clusterddp.data import mnist
from clusterddp.data.mnist import DatasetInfo
from clusterddp.errors import DataError
from clusterddp.request.options import COUNT

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

GENERATOR = 2
"""Version of the rendering, which SHA256SUMS records."""
# Digits 0 to 9 side by side, each seven pixels high and five wide.
_FONT = """
.###. ..#.. .###. .###. ...#. ##### ..##. ##### .###. .###.
#...# .##.. #...# #...# ..##. #.... .#... ....# #...# #...#
#...# ..#.. ....# ....# .#.#. ####. #.... ...#. #...# #...#
#...# ..#.. ...#. ..##. #..#. ....# ####. ..#.. .###. .####
#...# ..#.. ..#.. ....# ##### ....# #...# .#... #...# ....#
#...# ..#.. .#... #...# ...#. #...# #...# .#... #...# ...#.
.###. .###. ##### .###. ...#. .###. .###. .#... .###. .##..
"""
_CHUNK = 2_000  # images rendered at once: about 20 MB, whatever the count. Part of the stream.


def generate(
    data_dir: str, *, train_images: int = 60_000, test_images: int = 10_000, seed: int = 0
) -> DatasetInfo:
    """Render a set into data_dir/synthetic, check it and install it atomically.

    An identical set that already exists is verified and kept. Raises DataError if another or a
    damaged set exists, or if the directory cannot be written.
    """
    COUNT.check("--train-images", train_images)
    COUNT.check("--test-images", test_images)
    root = mnist.dataset_root("synthetic", data_dir)
    asked = f"{train_images} and {test_images}, seed {seed}, generator {GENERATOR}"
    recipe = f"clusterddp synthetic digits, {asked}"
    if len(mnist.missing_files(root)) < len(mnist.FILES):
        info = mnist.check("synthetic", data_dir, checksums=True)
        present = mnist.read_comment(root / mnist.RAW)
        if present != recipe:
            raise DataError(
                f"{root / mnist.RAW} already contains another set ({present or 'of unknown origin'}"
                f"), expected {recipe}. Nothing was changed, because runs may need it. Move that "
                "directory away, or choose another --data-dir. [CD0608]"
            )
        return info
    with mnist.draft_beside(root) as draft:
        raw = draft / mnist.RAW
        log.info(f"rendering {train_images:,} and {test_images:,} digits into {root / mnist.RAW}")
        _write_split(raw / mnist.TRAIN_IMAGES, raw / mnist.TRAIN_LABELS, train_images, [seed, 0])
        _write_split(raw / mnist.TEST_IMAGES, raw / mnist.TEST_LABELS, test_images, [seed, 1])
        mnist.write_sums(raw, recipe)
        mnist.put_into_place(draft, root)
    return mnist.check("synthetic", data_dir, checksums=True)


def _write_split(images: Path, labels: Path, count: int, seed: list[int]) -> None:
    import numpy as np

    random = np.random.RandomState(seed)  # a frozen stream: NumPy's NEP 19
    rows = [line.split() for line in _FONT.strip().split("\n")]
    bits = np.array([[[pixel == "#" for pixel in part] for part in row] for row in rows])
    # (digit, row, column), with an empty border, onto which whatever is looked up outside falls.
    glyphs = np.pad(bits.transpose(1, 0, 2).astype(np.int32), ((0, 0), (1, 1), (1, 1)))
    with images.open("wb") as image_file, labels.open("wb") as label_file:
        image_file.write(mnist.image_header(count))
        label_file.write(mnist.label_header(count))
        for start in range(0, count, _CHUNK):
            digits, pixels = _render(glyphs, random, min(_CHUNK, count - start))
            image_file.write(pixels.tobytes())
            label_file.write(digits.tobytes())


def _render(
    glyphs: "NDArray[np.int32]", random: "np.random.RandomState", count: int
) -> "tuple[NDArray[np.uint8], NDArray[np.uint8]]":
    """Draw `count` digits: labels (count,) and pixels (count, 28, 28)."""
    import numpy as np

    def draw(low: int, high: int) -> "NDArray[np.int32]":
        return random.randint(low, high + 1, size=(count, 1, 1), dtype=np.int32)

    digits, ink, noise = draw(0, 9), draw(120, 255), draw(0, 80)
    # Each pixel looks up one of its glyph's, 256 units high and wide; steps from pixel to pixel.
    step_x, step_y, slant = draw(56, 96), draw(72, 96), draw(-20, 20)
    shift_x, shift_y = draw(-256, 256), draw(-256, 256)
    _, height, width = glyphs.shape
    places = np.arange(mnist.SIDE, dtype=np.int32) - mnist.SIDE // 2
    x, y = places[None, None, :], places[None, :, None]
    row = (step_y * y + shift_y + 128 * height) >> 8
    column = (step_x * x + slant * y + shift_x + 128 * width) >> 8
    drawn = ink * glyphs[digits, row.clip(0, height - 1), column.clip(0, width - 1)]
    grain = np.frombuffer(random.bytes(drawn.size), np.uint8).reshape(drawn.shape)
    drawn += (grain.astype(np.int32) - 128) * noise >> 7
    return digits[:, 0, 0].astype(np.uint8), drawn.clip(0, 255).astype(np.uint8)
