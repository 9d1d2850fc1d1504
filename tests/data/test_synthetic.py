"""The rendered digits: the same bytes everywhere, well-formed, and learnable."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from clusterddp.data import mnist
from clusterddp.data.synthetic import generate
from clusterddp.errors import DataError, RequestError

RAW = Path("synthetic", "MNIST", "raw")


def read(data_dir: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    raw = data_dir / RAW
    images = np.fromfile(raw / f"{split}-images-idx3-ubyte", np.uint8)[16:].reshape(-1, 28, 28)
    return images, np.fromfile(raw / f"{split}-labels-idx1-ubyte", np.uint8)[8:]


def test_a_seed_gives_these_bytes_on_every_machine(tmp_path: Path) -> None:
    # More than one chunk, and a last one that is not full. The digest was the same with NumPy
    # 1.24 and 2.4; if it changes, so do the runs that people compare.
    generate(str(tmp_path), train_images=2_100, test_images=50, seed=7)
    together = hashlib.sha256()
    for name in mnist.FILES:
        together.update((tmp_path / RAW / name).read_bytes())
    assert together.hexdigest() == (
        "3477b9e4f5a5965de803da0aa68469c04832869b2149e168e1e108e04be70682"
    )


def test_another_seed_gives_other_digits(tmp_path: Path) -> None:
    for seed in (0, 1):
        generate(str(tmp_path / str(seed)), train_images=20, test_images=20, seed=seed)
    first, second = (read(tmp_path / str(seed), "train")[0] for seed in (0, 1))
    assert not np.array_equal(first, second)


def test_training_and_test_images_differ(tmp_path: Path) -> None:
    generate(str(tmp_path), train_images=20, test_images=20)
    assert not np.array_equal(read(tmp_path, "train")[0], read(tmp_path, "t10k")[0])


def test_every_digit_is_drawn_and_no_image_is_empty(synthetic_dir: Path) -> None:
    images, labels = read(synthetic_dir, "train")
    assert np.bincount(labels, minlength=10).min() > 100
    assert images.max(axis=(1, 2)).min() > 100
    assert 0.1 < images.mean() / 255 < 0.25


def test_the_label_says_what_is_drawn(synthetic_dir: Path) -> None:
    # The nearest of 2,000 neighbours is a weak reader, and far above the 10 % of chance.
    images, labels = (part.astype(np.float32) for part in read(synthetic_dir, "train"))
    tests, truth = (part.astype(np.float32) for part in read(synthetic_dir, "t10k"))
    known, seen = images.reshape(len(images), -1), tests.reshape(len(tests), -1)
    distance = (known**2).sum(1) - 2 * seen @ known.T
    assert (labels[distance.argmin(1)] == truth).mean() > 0.8


def test_the_set_that_is_there_is_left_as_it_is(tmp_path: Path, logged: list[str]) -> None:
    generate(str(tmp_path), train_images=30, test_images=10)
    logged.clear()
    before = [(tmp_path / RAW / name).stat().st_mtime_ns for name in mnist.FILES]
    info = generate(str(tmp_path), train_images=30, test_images=10)
    assert (info.train_images, info.test_images, logged) == (30, 10, [])
    assert [(tmp_path / RAW / name).stat().st_mtime_ns for name in mnist.FILES] == before


@pytest.mark.parametrize("other", [{"train_images": 31}, {"test_images": 11}, {"seed": 1}])
def test_another_set_is_not_overwritten(tmp_path: Path, other: dict[str, int]) -> None:
    asked = {"train_images": 30, "test_images": 10}
    generate(str(tmp_path), **asked)
    with pytest.raises(DataError, match="30 and 10, seed 0") as raised:
        generate(str(tmp_path), **{**asked, **other})
    assert "Move that directory away" in str(raised.value)


def test_a_damaged_set_is_not_overwritten(tmp_path: Path) -> None:
    generate(str(tmp_path), train_images=30, test_images=10)
    (tmp_path / RAW / mnist.TEST_LABELS).write_bytes(b"")
    with pytest.raises(DataError, match="t10k-labels-idx1-ubyte is truncated"):
        generate(str(tmp_path), train_images=30, test_images=10)


def test_an_interrupted_rendering_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(mnist, "write_sums", interrupt)
    with pytest.raises(KeyboardInterrupt):
        generate(str(tmp_path / "data"), train_images=30, test_images=10)
    assert not (tmp_path / "data" / "synthetic").exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write the dataset to .*file.*--data-dir"):
        generate(str(tmp_path / "file"), train_images=1, test_images=1)


@pytest.mark.parametrize("count", [0, -1])
def test_a_set_without_images_is_refused(tmp_path: Path, count: int) -> None:
    with pytest.raises(RequestError, match="--train-images"):
        generate(str(tmp_path), train_images=count, test_images=1)
