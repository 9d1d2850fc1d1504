"""Digits rendered from small bitmaps into a dataset of MNIST's form, for sites without MNIST.

All of it is integer arithmetic on a frozen random stream, so that a seed gives the same bytes
with every numpy on every machine. The digits are varied in font, weight, sharpness, size, slant,
rotation, waviness, place, ink and noise; that is easier than handwriting.
"""

import sys
from typing import TYPE_CHECKING, Any

from clusterddp import forms
from clusterddp.errors import DataError
from clusterddp.training import idx
from clusterddp.training.data import DatasetInfo, Progress, check, folder, missing_files
from clusterddp.training.data_draft import draft_beside, put_into_place

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Digits 0 to 9 side by side, five pixels wide; each block is a font.
_FONTS = (
    """
    .###. ..#.. .###. ##### ...#. ##### ..##. ##### .###. .###.
    #...# .##.. #...# ...#. ..##. #.... .#... ....# #...# #...#
    #...# ..#.. ....# ..#.. .#.#. ####. #.... ...#. #...# #...#
    #...# ..#.. ...#. ...#. #..#. ....# ####. ..#.. .###. .####
    #...# ..#.. ..#.. ....# ##### ....# #...# .#... #...# ....#
    #...# ..#.. .#... #...# ...#. #...# #...# .#... #...# ...#.
    .###. .###. ##### .###. ...#. .###. .###. .#... .###. .##..
    """,
    """
    ..#.. ...#. .##.. .###. #..#. ####. .#... ##### ..##. .####
    .#.#. ...#. #..#. #...# #..#. #.... .#... ....# .#..# #...#
    #...# ...#. ...#. ....# #..#. #.... #.... ...#. .#..# #...#
    #...# ..#.. ...#. ..##. ##### .###. #.##. .#### ..##. .####
    #...# ..#.. ..#.. ....# ...#. ....# ##..# ..#.. .#..# ....#
    .#.#. ..#.. .#... #...# ...#. #...# #...# .#... #...# ....#
    ..#.. .#... ####. .###. ...#. .###. .###. .#... .###. ....#
    """,
    """
    ##### ..#.. ##### ##### #...# ##### ##### ##### ##### #####
    #...# ..#.. ....# ....# #...# #.... #.... #...# #...# #...#
    #...# ..#.. ....# ....# #...# #.... #.... ....# #...# #...#
    #...# ..#.. ##### .#### ##### ##### ##### ....# ##### #####
    #...# ..#.. #.... ....# ....# ....# #...# ....# #...# ....#
    #...# ..#.. #.... ....# ....# ....# #...# ....# #...# ....#
    ##### ..#.. ##### ##### ....# ##### ##### ....# ##### #####
    """,
    """
    .##.. ..#.. .###. .###. ..#.. ####. ...#. ##### .###. .##..
    #..#. .##.. #...# #...# ..#.. #.... ..#.. #...# #...# #..#.
    #..#. #.#.. ....# ....# .#... ###.. .#... ....# #...# #..#.
    #..#. ..#.. ..##. .###. .#.#. ...#. ####. ...#. .###. .###.
    #..#. ..#.. .#... ....# ##### ....# #...# ..#.. #...# ...#.
    #..#. ..#.. #...# #...# ...#. ...#. #...# ..#.. #...# ...#.
    .##.. ##### ##### .###. ...#. ###.. .###. ..#.. .###. .##..
    """,
)
_GLYPH_WIDTH, _GLYPH_HEIGHT = 5, 7
_ENLARGED = 8  # pixels of a master for one of a glyph
_MARGIN = 12  # empty pixels around a master; whatever is looked up outside falls on them
_WIDTH = _GLYPH_WIDTH * _ENLARGED + 2 * _MARGIN
_HEIGHT = _GLYPH_HEIGHT * _ENLARGED + 2 * _MARGIN
_INK_LEVELS = (115, 90, 60)  # a blurred glyph cut at these levels: thin, medium, bold strokes
_BLUR_RADII = (1, 3)  # sharp, soft

# 1024 * sin and cos of 0 to 15 degrees, and 256 * sin over one turn in 32 steps. Written out: the
# last bit of a computed sine may differ between C libraries.
_SIN = (0, 18, 36, 54, 71, 89, 107, 125, 143, 160, 178, 195, 213, 230, 248, 265)
_COS = (1024, 1024, 1023, 1023, 1022, 1020, 1018, 1016, 1014, 1011, 1008, 1005, 1002, 998, 994, 989)
_WAVE = (
    0, 50, 98, 142, 181, 213, 237, 251, 256, 251, 237, 213, 181, 142, 98, 50,
    0, -50, -98, -142, -181, -213, -237, -251, -256, -251, -237, -213, -181, -142, -98, -50,
)  # fmt: skip
_CHUNK = 2_000  # images rendered at once: about 40 MB, whatever the count. Part of the stream.


def synthesise(
    data_dir: str,
    *,
    train_images: int = 60_000,
    test_images: int = 10_000,
    seed: int = 0,
    progress: Progress,
) -> DatasetInfo:
    """Render a set into data_dir/synthetic, checked and moved into place whole.

    The same set that is there already is verified and left as it is. Raises DataError when the
    one there is another or damaged, when numpy is missing, or when the folder cannot be written.
    """
    forms.positive("--train-images", train_images)
    forms.positive("--test-images", test_images)
    root = folder("synthetic", data_dir)
    recipe = f"clusterddp synthetic digits, {train_images} and {test_images}, seed {seed}"
    if len(missing_files(root)) < len(idx.FILES):
        return _as_asked(check("synthetic", data_dir, checksums=True), recipe)
    _require_numpy()
    with draft_beside(root) as draft:
        raw = draft / idx.RAW
        progress(f"rendering {train_images:,} and {test_images:,} digits into {root / idx.RAW}")
        _write_split(raw / idx.TRAIN_IMAGES, raw / idx.TRAIN_LABELS, train_images, [seed, 0])
        _write_split(raw / idx.TEST_IMAGES, raw / idx.TEST_LABELS, test_images, [seed, 1])
        idx.write_sums(raw, recipe)
        put_into_place(draft, root)
    return check("synthetic", data_dir, checksums=True)


def _as_asked(info: DatasetInfo, recipe: str) -> DatasetInfo:
    found = idx.read_comment(info.root / idx.RAW)
    if found != recipe:
        raise DataError(
            f"{info.root / idx.RAW} holds another set already ({found or 'of unknown origin'}), "
            f"asked for was: {recipe}. Nothing was changed. Move that folder away, or choose "
            "another --data-dir."
        )
    return info


def _require_numpy() -> None:
    try:
        import numpy  # noqa: F401 -- whether it is there
    except ImportError as error:
        raise DataError(
            f"rendering digits needs numpy, which cannot be imported: {error}. Install it: "
            f"{sys.executable} -m pip install numpy"
        ) from None


def _write_split(images: Any, labels: Any, count: int, seed: list[int]) -> None:
    import numpy as np

    random = np.random.RandomState(seed)  # its stream is frozen for good: NumPy's NEP 19
    masters = _masters()
    with images.open("wb") as image_file, labels.open("wb") as label_file:
        image_file.write(idx.image_header(count))
        label_file.write(idx.label_header(count))
        for start in range(0, count, _CHUNK):
            digits, pixels = _render(masters, random, min(_CHUNK, count - start))
            image_file.write(pixels.tobytes())
            label_file.write(digits.astype(np.uint8).tobytes())


def _masters() -> "NDArray[np.uint8]":
    """Every glyph enlarged and smoothed: (digit, font, weight, sharpness, height, width)."""
    import numpy as np

    rows = [[line.split() for line in font.split("\n") if line.strip()] for font in _FONTS]
    bits = np.array([[[[p == "#" for p in g] for g in row] for row in font] for font in rows])
    glyphs = bits.transpose(2, 0, 1, 3).astype(np.int32)  # to digit, font, height, width
    large = glyphs.repeat(_ENLARGED, axis=2).repeat(_ENLARGED, axis=3) * 255
    margins = ((0, 0), (0, 0), (_MARGIN, _MARGIN), (_MARGIN, _MARGIN))
    blurred = _blur(_blur(np.pad(large, margins), 4), 3)
    strokes = [(blurred > level).astype(np.int32) * 255 for level in _INK_LEVELS]
    drawn = [[_blur(stroke, radius) for radius in _BLUR_RADII] for stroke in strokes]
    masters: NDArray[np.uint8] = np.array(drawn).transpose(2, 3, 0, 1, 4, 5).astype(np.uint8)
    masters[..., 0, :] = masters[..., -1, :] = masters[..., 0] = masters[..., -1] = 0
    return np.ascontiguousarray(masters)


def _blur(image: "NDArray[np.int32]", radius: int) -> "NDArray[np.int32]":
    """Mean over a square of 2 * radius + 1 pixels, the outermost ones repeated."""
    import numpy as np

    for axis in (-1, -2):
        width = 2 * radius + 1
        margins = [(0, 0)] * image.ndim
        margins[axis] = (radius + 1, radius)
        sums = np.moveaxis(np.pad(image, margins, mode="edge").cumsum(axis=axis), axis, -1)
        image = np.moveaxis((sums[..., width:] - sums[..., :-width]) // width, -1, axis)
    return image


def _render(
    masters: "NDArray[np.uint8]", random: "np.random.RandomState", count: int
) -> "tuple[NDArray[np.int32], NDArray[np.uint8]]":
    """Draw `count` digits: labels (count,) and pixels (count, 28, 28).

    Each pixel looks up one of its master's: the inverse of scaling, slanting and rotating, in
    fixed point, with 2**15 for one pixel of the master and coordinates in half pixels.
    """
    import numpy as np

    def draw(low: int, high: int) -> "NDArray[np.int32]":
        return random.randint(low, high + 1, size=(count, 1), dtype=np.int32)

    digits, fonts, weights, sharpness = draw(0, 9), draw(0, 3), draw(0, 2), draw(0, 1)
    scale_x, scale_y, slant = draw(36, 58), draw(38, 54), draw(-360, 360)
    angle, shift_x, shift_y = draw(-15, 15), draw(-6, 6), draw(-5, 5)
    wave_x, wave_y, phase_x, phase_y = draw(0, 450), draw(0, 350), draw(0, 31), draw(0, 31)
    ink, noise = draw(150, 256), draw(0, 60)

    sin = np.array(_SIN, np.int32)[abs(angle)] * np.sign(angle)
    cos = np.array(_COS, np.int32)[abs(angle)]
    wave = np.array(_WAVE, np.int32)
    line = np.arange(idx.SIDE, dtype=np.int32)[None, :]
    x, y = 2 * line - (idx.SIDE - 1) - shift_x, 2 * line - (idx.SIDE - 1) - shift_y
    u_of_x = scale_x * cos * x + (_WIDTH // 2 << 15)
    u_of_y = scale_x * (sin + slant) * y + wave_x * wave[(2 * line + phase_x) & 31]
    v_of_x = -scale_y * sin * x + wave_y * wave[(line + phase_y) & 31]
    v_of_y = scale_y * cos * y + (_HEIGHT // 2 << 15)
    u = ((u_of_x[:, None, :] + u_of_y[:, :, None]) >> 15).clip(0, _WIDTH - 1)
    v = ((v_of_x[:, None, :] + v_of_y[:, :, None]) >> 15).clip(0, _HEIGHT - 1)
    _, n_fonts, n_weights, n_sharpness, _, _ = masters.shape
    which = ((digits * n_fonts + fonts) * n_weights + weights) * n_sharpness + sharpness
    at = (which[:, :, None] * _HEIGHT + v) * _WIDTH + u

    drawn = masters.reshape(-1)[at].astype(np.int32) * ink[:, :, None] >> 8
    grain = np.frombuffer(random.bytes(drawn.size), np.uint8).reshape(drawn.shape)
    drawn += (grain.astype(np.int32) - 128) * noise[:, :, None] >> 7
    return digits[:, 0], drawn.clip(0, 255).astype(np.uint8)
