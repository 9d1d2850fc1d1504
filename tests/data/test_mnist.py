"""The dataset: each way in which it can be bad, and how it is read."""

import gzip
import json
import multiprocessing
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from clusterddp.data import mnist
from clusterddp.data.download import import_from
from clusterddp.data.mnist import (
    PUBLISHED,
    Reading,
    SharedDataset,
    SharedRef,
    check,
    dataset_root,
    ensure,
    torchvision_set,
)
from clusterddp.data.synthetic import generate
from clusterddp.distributed import rendezvous
from clusterddp.errors import DataError, PeerError
from clusterddp.ranks.dist_env import DistEnv
from clusterddp.request.train_config import TrainConfig
from clusterddp.worker import start
from tests import forked
from tests.data.made_sets import NOBODY, gzipped, resized

SOURCES = {"synthetic": generate}

# --- check ---------------------------------------------------------------------------------


def test_a_whole_set_is_described(small: Path) -> None:
    info = check("synthetic", str(small), checksums=True)
    assert (info.name, info.root) == ("synthetic", small / "synthetic")
    assert (info.train_images, info.test_images) == (30, 10)
    assert info.bytes == 2 * (16 + 8) + 40 * (28 * 28 + 1)
    assert info.checksums_verified
    assert not info.published
    assert info.describe() == (
        f"synthetic at {small}/synthetic/MNIST/raw, 30 training and 10 test images"
    )


def test_the_real_mnist_is_recognised(mnist_dir: Path) -> None:
    info = check("mnist", str(mnist_dir), checksums=True)
    assert (info.train_images, info.test_images, info.bytes) == (60_000, 10_000, 54_950_048)
    assert info.checksums_verified
    assert info.published


def test_a_home_folder_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert dataset_root("mnist", "~/data") == Path("/home/me/data")
    assert dataset_root("synthetic", "~/data") == Path("/home/me/data/synthetic")


def rewrite(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(raw: Path) -> None:
        (raw / name).write_bytes(change((raw / name).read_bytes()))

    return damage


def remove(raw: Path) -> None:
    shutil.rmtree(raw)


def as_folder(raw: Path) -> None:
    (raw / mnist.TEST_LABELS).unlink()
    (raw / mnist.TEST_LABELS).mkdir()


def unlisted(raw: Path) -> None:
    (raw / mnist.SUMS).unlink()


HEADER_FAULTS = {
    "missing": (remove, ["synthetic dataset is missing", "clusterddp data generate"]),
    "one missing": (
        lambda raw: (raw / mnist.TRAIN_LABELS).unlink(),
        ["train-labels-idx1-ubyte missing", "Move that directory away"],
    ),
    "truncated": (
        rewrite(mnist.TRAIN_IMAGES, lambda content: content[:-100]),
        ["train-images-idx3-ubyte is truncated: 23,436 bytes", "30 images", "23,536"],
    ),
    "shorter than a header": (
        rewrite(mnist.TEST_IMAGES, lambda content: content[:7]),
        ["t10k-images-idx3-ubyte is truncated: 7 bytes"],
    ),
    "longer": (
        rewrite(mnist.TEST_LABELS, lambda content: content + b"\0"),
        ["t10k-labels-idx1-ubyte is too long: 19 bytes", "10 labels", "18"],
    ),
    "bad magic": (
        rewrite(mnist.TEST_IMAGES, lambda content: b"\0\0\x0d\x03" + content[4:]),
        ["t10k-images-idx3-ubyte starts with 0x00000d03", "0x00000803"],
    ),
    "still gzipped": (
        rewrite(mnist.TEST_IMAGES, gzip.compress),
        ["t10k-images-idx3-ubyte is still compressed"],
    ),
    "32x32": (rewrite(mnist.TRAIN_IMAGES, resized), ["32x32 pixels", "28x28"]),
    "no images": (
        rewrite(mnist.TRAIN_IMAGES, lambda _: mnist.image_header(0)),
        ["train-images-idx3-ubyte is empty", "0 images"],
    ),
    "other count": (
        rewrite(mnist.TRAIN_LABELS, lambda content: mnist.label_header(29) + content[8:-1]),
        ["30 images", "29 labels", "do not belong together"],
    ),
    "a folder": (as_folder, ["cannot be read", "t10k-labels-idx1-ubyte", "Is a directory"]),
}
CONTENT_FAULTS = {
    "label 11": (
        rewrite(mnist.TEST_LABELS, lambda content: content[:-1] + b"\x0b"),
        ["t10k-labels-idx1-ubyte has the label 11 at image 9", "0 to 9"],
    ),
    "flipped byte": (
        rewrite(mnist.TRAIN_IMAGES, lambda content: content[:-1] + bytes([content[-1] ^ 1])),
        ["train-images-idx3-ubyte has the SHA-256 digest", "SHA256SUMS records"],
    ),
    "no record": (unlisted, ["SHA256SUMS has no digest of train-images-idx3-ubyte"]),
}


@pytest.mark.parametrize("checksums", [False, True])
@pytest.mark.parametrize(("damage", "said"), HEADER_FAULTS.values(), ids=HEADER_FAULTS)
def test_a_fault_of_form_is_named_with_what_to_do(
    small: Path, raw: Path, damage: Callable[[Path], None], said: list[str], checksums: bool
) -> None:
    damage(raw)
    with pytest.raises(DataError) as raised:
        check("synthetic", str(small), checksums=checksums)
    for words in (*said, str(raw), "--data-dir"):
        assert words in str(raised.value)


@pytest.mark.parametrize(("damage", "said"), CONTENT_FAULTS.values(), ids=CONTENT_FAULTS)
def test_a_fault_of_content_is_found_by_checksums(
    small: Path, raw: Path, damage: Callable[[Path], None], said: list[str]
) -> None:
    damage(raw)
    assert not check("synthetic", str(small), checksums=False).checksums_verified
    with pytest.raises(DataError) as raised:
        check("synthetic", str(small), checksums=True)
    for words in (*said, str(raw), "clusterddp data generate"):
        assert words in str(raised.value)
    assert raised.value.code == "CD0602"


def test_another_set_in_the_place_of_mnist_is_found_by_its_digest(raw: Path) -> None:
    (raw / mnist.SUMS).unlink()
    with pytest.raises(
        DataError, match=f"MNIST was published with {PUBLISHED[mnist.TRAIN_IMAGES]}"
    ):
        check("mnist", str(raw.parents[1]), checksums=True)


def test_a_missing_mnist_lists_every_way_to_get_it(tmp_path: Path) -> None:
    place = tmp_path / "my data"
    with pytest.raises(DataError) as raised:
        check("mnist", str(place), checksums=False)
    for words in (
        f"clusterddp data fetch --data-dir '{place}'",
        f"clusterddp data import FILE --data-dir '{place}'",
        f"clusterddp data generate --data-dir '{place}'",
        "--dataset synthetic",
        "--data-dir DIR",
    ):
        assert words in str(raised.value)
    assert not place.exists()


@pytest.mark.parametrize("where", ["MNIST/raw", "MNIST", "."])
def test_files_that_are_there_but_gzipped_are_pointed_out(
    raw: Path, tmp_path: Path, where: str
) -> None:
    place = gzipped(raw, tmp_path / "mine" / where)
    with pytest.raises(DataError, match="not unpacked") as raised:
        check("mnist", str(tmp_path / "mine"), checksums=False)
    assert f"clusterddp data import {place} --data-dir" in str(raised.value)
    info = import_from(place, str(tmp_path / "mine"))
    assert (info.train_images, info.test_images) == (30, 10)


def test_missing_permission_is_told_apart_from_missing_files(
    small: Path, raw: Path, nobody: None
) -> None:
    if os.geteuid() != NOBODY:
        (raw / mnist.TRAIN_IMAGES).chmod(0)
    with pytest.raises(DataError, match=r"cannot be read: .*Permission denied") as raised:
        check("synthetic", str(small), checksums=False)
    assert "--data-dir" in str(raised.value)


# --- ensure and torchvision_set -------------------------------------------------------------


def test_ensure_renders_a_synthetic_set_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(generate.__kwdefaults__, "train_images", 40)
    monkeypatch.setitem(generate.__kwdefaults__, "test_images", 20)
    info = ensure("synthetic", str(tmp_path), SOURCES)
    assert (info.train_images, info.test_images) == (40, 20)


def test_ensure_takes_a_synthetic_set_of_any_size(small: Path, logged: list[str]) -> None:
    assert (ensure("synthetic", str(small), SOURCES).train_images, logged) == (30, [])


def test_ensure_takes_the_digits_of_an_older_generator(
    small: Path, raw: Path, logged: list[str]
) -> None:
    sums = raw / mnist.SUMS
    sums.write_text(sums.read_text().replace(", generator 2", ""))
    assert (ensure("synthetic", str(small), SOURCES).train_images, logged) == (30, [])
    with pytest.raises(DataError, match=r"seed 0\), expected .*generator 2"):
        generate(str(small), train_images=30, test_images=10)


def test_ensure_gets_nothing_without_a_source(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="mnist dataset is missing"):
        ensure("mnist", str(tmp_path), SOURCES)
    assert list(tmp_path.iterdir()) == []


def test_ensure_does_not_replace_a_damaged_set(small: Path, raw: Path) -> None:
    (raw / mnist.TRAIN_IMAGES).write_bytes(b"torn")
    with pytest.raises(DataError, match="truncated"):
        ensure("synthetic", str(small), SOURCES)
    assert (raw / mnist.TRAIN_IMAGES).read_bytes() == b"torn"


def ensure_small(data_dir: str) -> None:
    generate.__kwdefaults__.update(train_images=3_000, test_images=100)
    ensure("synthetic", data_dir, SOURCES)


@pytest.mark.slow
def test_processes_that_ensure_at_once_all_get_one_whole_set(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    place = str(tmp_path / "new" / "data")
    processes = [context.Process(target=ensure_small, args=(place,)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert check("synthetic", place, checksums=True).train_images == 3_000
    assert [path.name for path in Path(place, "synthetic", "MNIST").iterdir()] == ["raw"]


def test_the_loader_needs_torchvision(synthetic_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(DataError, match="--data-pipeline loader needs torchvision"):
        torchvision_set("synthetic", str(synthetic_dir), train=False)


def test_the_loader_refuses_what_an_old_torchvision_cached(small: Path) -> None:
    legacy = small / "synthetic" / "MNIST" / "processed"
    legacy.mkdir()
    for name in ("training.pt", "test.pt"):
        (legacy / name).write_bytes(b"")
    with pytest.raises(DataError, match="cache of an old torchvision"):
        torchvision_set("synthetic", str(small), train=True)


TAKES = """
import json, sys
from clusterddp.data import mnist
from clusterddp import files
shared = mnist.take(files.load(mnist.SharedRef, json.loads(sys.argv[1])))
pixels, labels = shared.tensors(train=True)
print(int(pixels.sum()), int(labels.sum()), tuple(pixels.shape))
"""


@pytest.fixture
def shared(synthetic_dir: Path) -> SharedDataset:
    return mnist.read("synthetic", str(synthetic_dir))


def ref_of(shared: SharedDataset) -> SharedRef:
    ref = shared.ref()
    assert ref
    return ref


@pytest.mark.parametrize(("train", "count"), [(True, 2_000), (False, 500)])
def test_the_copy_is_what_torchvision_reads(
    synthetic_dir: Path, train: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = mnist.torchvision_set("synthetic", str(synthetic_dir), train=train)
    monkeypatch.setitem(sys.modules, "torchvision", None)  # which is not needed here
    shared = mnist.read("synthetic", str(synthetic_dir))
    pixels, labels = shared.tensors(train=train)
    assert pixels.shape == (count, 28, 28)
    for ours, expected in ((pixels, theirs.data), (labels, theirs.targets)):
        assert torch.equal(ours, expected)
        assert ours.dtype == expected.dtype
    assert shared.digest() == mnist.fingerprint("synthetic", str(synthetic_dir))


def test_another_process_maps_it_and_nobody_can_change_it(shared: SharedDataset) -> None:
    pixels, labels = shared.tensors(train=True)
    done = forked.run("-c", TAKES, json.dumps(asdict(ref_of(shared))))
    assert done.stdout == f"{int(pixels.sum())} {int(labels.sum())} {tuple(pixels.shape)}\n"
    assert shared.handle is not None
    with pytest.raises(PermissionError):
        os.pwrite(shared.handle, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(shared.handle, 0)
    shared.close()
    assert shared.ref() is None
    assert torch.equal(shared.tensors(train=True)[0], pixels), "the tensors stay"


def test_an_offer_of_another_process_or_of_nothing_is_refused(shared: SharedDataset) -> None:
    ref = ref_of(shared)
    with pytest.raises(ValueError, match="another process"):
        mnist.take(replace(ref, file=(0, 0)))
    with pytest.raises(OSError):
        mnist.take(replace(ref, handle=1 << 20))
    with pytest.raises(ValueError, match="into shared memory"):
        mnist.take(None)


def test_without_shared_memory_the_files_are_read_all_the_same(
    synthetic_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    for name in ("memfd_create", "sendfile"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, full)
            shared = mnist.read("synthetic", str(synthetic_dir))
        assert shared.ref() is None
        assert shared.digest() == mnist.fingerprint("synthetic", str(synthetic_dir))


def test_a_set_that_comes_after_the_reading_began_is_read(
    synthetic_dir: Path, tmp_path: Path
) -> None:
    reading = Reading("synthetic", str(tmp_path), digest=True)
    with pytest.raises(DataError, match="missing"):
        reading.wait()
    (tmp_path / "synthetic").symlink_to(synthetic_dir / "synthetic")
    assert reading.fingerprint() == mnist.fingerprint("synthetic", str(synthetic_dir))
    assert Reading("synthetic", str(tmp_path), digest=True).fingerprint() == reading.fingerprint()


def test_a_damaged_set_is_named(synthetic_dir: Path, tmp_path: Path) -> None:
    raw = tmp_path / "synthetic" / mnist.RAW
    raw.mkdir(parents=True)
    for name in mnist.FILES:
        (raw / name).write_bytes((synthetic_dir / "synthetic" / mnist.RAW / name).read_bytes()[:-1])
    with pytest.raises(DataError, match="truncated"):
        Reading("synthetic", str(tmp_path), digest=False).wait()


def test_a_rank_that_cannot_map_it_says_so_and_reads_the_files(
    shared: SharedDataset, synthetic_dir: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    config = TrainConfig(dataset="synthetic", data_dir=str(synthetic_dir))
    env = DistEnv.from_environ({})

    def take(ref: object) -> SharedDataset:
        monkeypatch.setattr(rendezvous, "ask", lambda *_: ref)
        return start._take(config, env, None, "data/0")  # type: ignore[arg-type]

    whole = json.loads(json.dumps(asdict(ref_of(shared))))
    assert take(whole).handle is None and not logged
    for ref in ({**whole, "file": [0, 0]}, {}, None, {"sizes": "?"}):
        assert take(ref).digest() == shared.digest()
        assert "and reads the files" in logged.pop()
    with pytest.raises(PeerError, match="gone"):
        take({"error": "the files are gone"})
