"""The dataset: each way in which it can be bad, and each way in which it comes to its place."""

import gzip
import hashlib
import http.server
import io
import multiprocessing
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from clusterddp.errors import DataError
from clusterddp.training import data, data_source, idx
from clusterddp.training.data import PUBLISHED, check, ensure, folder, load, torchvision_set
from clusterddp.training.data_source import fetch, import_from
from clusterddp.training.synthetic import synthesise

NOBODY = 65534


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A data folder of our own with 30 and 10 synthetic digits."""
    synthesise(str(tmp_path / "data"), train_images=30, test_images=10, progress=print)
    return tmp_path / "data"


@pytest.fixture
def raw(small: Path) -> Path:
    return small / "synthetic" / "MNIST" / "raw"


def contents(raw: Path) -> dict[str, bytes]:
    return {name: (raw / name).read_bytes() for name in idx.FILES}


def gzipped(raw: Path, place: Path) -> Path:
    """The four files of a set, compressed into another folder."""
    place.mkdir(parents=True, exist_ok=True)
    for name, content in contents(raw).items():
        (place / f"{name}.gz").write_bytes(gzip.compress(content, 1))
    return place


def tarred(place: Path, members: dict[str, bytes], mode: str = "w:gz") -> Path:
    with tarfile.open(place, mode) as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return place


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
    assert folder("mnist", "~/data") == Path("/home/me/data")
    assert folder("synthetic", "~/data") == Path("/home/me/data/synthetic")


def rewrite(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(raw: Path) -> None:
        (raw / name).write_bytes(change((raw / name).read_bytes()))

    return damage


def remove(raw: Path) -> None:
    shutil.rmtree(raw)


def as_folder(raw: Path) -> None:
    (raw / idx.TEST_LABELS).unlink()
    (raw / idx.TEST_LABELS).mkdir()


def unlisted(raw: Path) -> None:
    (raw / idx.SUMS).unlink()


def resized(content: bytes) -> bytes:
    return struct.pack(">4I", 0x803, 30, 32, 32) + bytes(30 * 32 * 32)


HEADER_FAULTS = {
    "missing": (remove, ["synthetic dataset is missing", "clusterddp data synthesise"]),
    "one missing": (
        lambda raw: (raw / idx.TRAIN_LABELS).unlink(),
        ["train-labels-idx1-ubyte missing", "Move that folder away"],
    ),
    "truncated": (
        rewrite(idx.TRAIN_IMAGES, lambda content: content[:-100]),
        ["train-images-idx3-ubyte is truncated: 23,436 bytes", "30 images", "23,536"],
    ),
    "shorter than a header": (
        rewrite(idx.TEST_IMAGES, lambda content: content[:7]),
        ["t10k-images-idx3-ubyte is truncated: 7 bytes"],
    ),
    "longer": (
        rewrite(idx.TEST_LABELS, lambda content: content + b"\0"),
        ["t10k-labels-idx1-ubyte is too long: 19 bytes", "10 labels", "18"],
    ),
    "bad magic": (
        rewrite(idx.TEST_IMAGES, lambda content: b"\0\0\x0d\x03" + content[4:]),
        ["t10k-images-idx3-ubyte starts with 0x00000d03", "0x00000803"],
    ),
    "still gzipped": (
        rewrite(idx.TEST_IMAGES, gzip.compress),
        ["t10k-images-idx3-ubyte is still compressed"],
    ),
    "32x32": (rewrite(idx.TRAIN_IMAGES, resized), ["32x32 pixels", "28x28"]),
    "no images": (
        rewrite(idx.TRAIN_IMAGES, lambda _: idx.image_header(0)),
        ["train-images-idx3-ubyte is empty", "0 images"],
    ),
    "other count": (
        rewrite(idx.TRAIN_LABELS, lambda content: idx.label_header(29) + content[8:-1]),
        ["30 images", "29 labels", "do not belong together"],
    ),
    "a folder": (as_folder, ["cannot be read", "t10k-labels-idx1-ubyte", "Is a directory"]),
}
CONTENT_FAULTS = {
    "label 11": (
        rewrite(idx.TEST_LABELS, lambda content: content[:-1] + b"\x0b"),
        ["t10k-labels-idx1-ubyte has the label 11 at image 9", "0 to 9"],
    ),
    "flipped byte": (
        rewrite(idx.TRAIN_IMAGES, lambda content: content[:-1] + bytes([content[-1] ^ 1])),
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
    for words in (*said, str(raw), "clusterddp data synthesise"):
        assert words in str(raised.value)


def test_another_set_in_the_place_of_mnist_is_found_by_its_digest(raw: Path) -> None:
    (raw / idx.SUMS).unlink()
    with pytest.raises(DataError, match=f"MNIST was published with {PUBLISHED[idx.TRAIN_IMAGES]}"):
        check("mnist", str(raw.parents[1]), checksums=True)


def test_a_missing_mnist_lists_every_way_to_get_it(tmp_path: Path) -> None:
    place = tmp_path / "my data"
    with pytest.raises(DataError) as raised:
        check("mnist", str(place), checksums=False)
    for words in (
        f"clusterddp data fetch --data-dir '{place}'",
        f"clusterddp data import FILE --data-dir '{place}'",
        f"clusterddp data synthesise --data-dir '{place}'",
        "--dataset synthetic",
        "--data-dir FOLDER",
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
    info = import_from(place, str(tmp_path / "mine"), print)
    assert (info.train_images, info.test_images) == (30, 10)


@pytest.fixture
def nobody() -> Iterator[None]:
    """A user without rights, where the tests run as root, for whom permissions do not count."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    yield
    os.seteuid(0)


def test_missing_permission_is_told_apart_from_missing_files(
    small: Path, raw: Path, nobody: None
) -> None:
    if os.geteuid() != NOBODY:
        (raw / idx.TRAIN_IMAGES).chmod(0)
    with pytest.raises(DataError, match=r"cannot be read: .*Permission denied") as raised:
        check("synthetic", str(small), checksums=False)
    assert "--data-dir" in str(raised.value)


def test_a_source_without_permission_is_named(raw: Path, tmp_path: Path, nobody: None) -> None:
    if os.geteuid() != NOBODY:
        raw.chmod(0)
    said = r"nothing was imported .*Permission denied"
    with tempfile.TemporaryDirectory() as place, pytest.raises(DataError, match=said):
        import_from(raw, place, print)
    if os.geteuid() != NOBODY:
        raw.chmod(0o755)


def test_checking_imports_neither_torch_nor_numpy(small: Path) -> None:
    program = (
        "import sys; from clusterddp.training.data import check; "
        "check('synthetic', sys.argv[1], checksums=True); "
        "print(sorted({'torch', 'torchvision', 'numpy'} & set(sys.modules)))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, str(small)], capture_output=True, text=True, check=True
    )
    assert ran.stdout == "[]\n"


# --- ensure and load -----------------------------------------------------------------------


def test_ensure_renders_a_synthetic_set_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(synthesise.__kwdefaults__, "train_images", 40)
    monkeypatch.setitem(synthesise.__kwdefaults__, "test_images", 20)
    info = ensure("synthetic", str(tmp_path), progress=print, may_fetch=False)
    assert (info.train_images, info.test_images) == (40, 20)


def test_ensure_takes_a_synthetic_set_of_any_size(small: Path) -> None:
    said: list[str] = []
    info = ensure("synthetic", str(small), progress=said.append, may_fetch=False)
    assert (info.train_images, said) == (30, [])


def test_ensure_does_not_fetch_unless_it_may(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="mnist dataset is missing"):
        ensure("mnist", str(tmp_path), progress=print, may_fetch=False)
    assert list(tmp_path.iterdir()) == []


def test_ensure_does_not_replace_a_damaged_set(small: Path, raw: Path) -> None:
    (raw / idx.TRAIN_IMAGES).write_bytes(b"torn")
    with pytest.raises(DataError, match="truncated"):
        ensure("synthetic", str(small), progress=print, may_fetch=True)
    assert (raw / idx.TRAIN_IMAGES).read_bytes() == b"torn"


def ensure_small(data_dir: str) -> None:
    synthesise.__kwdefaults__.update(train_images=3_000, test_images=100)
    ensure("synthetic", data_dir, progress=print, may_fetch=False)


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


def test_load_gives_what_torchvision_reads(synthetic_dir: Path) -> None:
    for train, count in ((True, 2_000), (False, 500)):
        pixels, labels = load("synthetic", str(synthetic_dir), train=train)
        theirs = torchvision_set("synthetic", str(synthetic_dir), train=train)
        assert pixels.shape == (count, 28, 28)
        assert torch.equal(pixels, theirs.data)
        assert torch.equal(labels, theirs.targets)


def test_load_needs_no_torchvision(synthetic_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    load("synthetic", str(synthetic_dir), train=False)
    with pytest.raises(DataError, match="--data-pipeline loader needs torchvision"):
        torchvision_set("synthetic", str(synthetic_dir), train=False)


def test_load_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="mnist dataset is missing"):
        load("mnist", str(tmp_path), train=True)


def test_load_refuses_what_an_old_torchvision_cached(small: Path) -> None:
    legacy = small / "synthetic" / "MNIST" / "processed"
    legacy.mkdir()
    for name in ("training.pt", "test.pt"):
        (legacy / name).write_bytes(b"")
    with pytest.raises(DataError, match="cache of an old torchvision"):
        torchvision_set("synthetic", str(small), train=True)


# --- fetch ---------------------------------------------------------------------------------


@pytest.fixture
def mirror(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a mirror on this machine, whose small set stands for the published MNIST."""
    from torchvision.datasets import MNIST

    place = gzipped(raw, tmp_path / "mirror")
    files = [f"{name}.gz" for name in idx.FILES]
    sums = [hashlib.md5((place / file).read_bytes()).hexdigest() for file in files]
    monkeypatch.setattr(MNIST, "resources", list(zip(files, sums, strict=True)))
    published = {name: idx.digest(raw / name) for name in idx.FILES}
    monkeypatch.setattr(data, "PUBLISHED", published)
    monkeypatch.setenv("no_proxy", "*")

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(place))

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(MNIST, "mirrors", [f"http://127.0.0.1:{server.server_port}/"])
        yield place
        server.shutdown()


def test_fetch_puts_a_verified_set_into_place(tmp_path: Path, raw: Path, mirror: Path) -> None:
    place = tmp_path / "fetched"
    info = fetch(str(place), print)
    assert (info.train_images, info.checksums_verified, info.published) == (30, True, True)
    assert contents(place / idx.RAW) == contents(raw)
    assert [path.name for path in (place / "MNIST").iterdir()] == ["raw"]
    assert sorted(path.name for path in (place / idx.RAW).iterdir()) == sorted(
        [*idx.FILES, idx.SUMS]
    )


def test_ensure_fetches_where_it_may(tmp_path: Path, mirror: Path) -> None:
    info = ensure("mnist", str(tmp_path / "new"), progress=print, may_fetch=True)
    assert info.test_images == 10


def test_fetch_leaves_a_whole_set_as_it_is(tmp_path: Path, mirror: Path) -> None:
    fetch(str(tmp_path / "new"), print)
    shutil.rmtree(mirror)
    assert fetch(str(tmp_path / "new"), print).published


def test_fetch_completes_what_torchvision_left_half_done(
    tmp_path: Path, raw: Path, mirror: Path
) -> None:
    half = tmp_path / "half" / idx.RAW
    half.mkdir(parents=True)
    shutil.copy(raw / idx.TRAIN_IMAGES, half)
    (half / "notes.txt").write_text("mine")
    assert fetch(str(tmp_path / "half"), print).published
    assert (half / "notes.txt").read_text() == "mine"


def test_fetch_does_not_overwrite_another_file(tmp_path: Path, mirror: Path) -> None:
    half = tmp_path / "half" / idx.RAW
    half.mkdir(parents=True)
    (half / idx.TEST_LABELS).write_bytes(b"mine")
    with pytest.raises(DataError, match="holds another dataset already"):
        fetch(str(tmp_path / "half"), print)
    assert [path.name for path in half.iterdir()] == [idx.TEST_LABELS]


def test_a_failed_fetch_gives_the_reason_and_the_other_ways(tmp_path: Path, mirror: Path) -> None:
    (mirror / "t10k-labels-idx1-ubyte.gz").write_bytes(b"torn")  # after three whole files
    with pytest.raises(DataError, match="could not be fetched") as raised:
        fetch(str(tmp_path / "new"), print)
    for words in ("t10k-labels-idx1-ubyte.gz", "corrupted", "data import FILE", "synthetic"):
        assert words in str(raised.value)
    assert not (tmp_path / "new").exists()


def test_a_mirror_that_refuses_the_connection_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchvision.datasets import MNIST

    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(MNIST, "mirrors", ["http://127.0.0.1:9/"])
    with pytest.raises(DataError, match="Connection refused"):
        fetch(str(tmp_path / "new"), print)


def test_a_mirror_that_sends_something_else_is_found_out(
    tmp_path: Path, mirror: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "PUBLISHED", PUBLISHED)
    with pytest.raises(DataError, match="what the mirrors sent is not MNIST"):
        fetch(str(tmp_path / "new"), print)
    assert not (tmp_path / "new").exists()


def test_fetch_without_torchvision_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(DataError, match="needs torchvision"):
        fetch(str(tmp_path / "new"), print)


# --- import --------------------------------------------------------------------------------


def as_plain(raw: Path, place: Path) -> Path:
    (place / "deep" / "er").mkdir(parents=True)
    for name, content in contents(raw).items():
        (place / "deep" / "er" / name).write_bytes(content)
    return place


def as_dotted(raw: Path, place: Path) -> Path:
    """As archives of today have it: images.idx3, and each file in a folder of its own besides."""
    for name, content in contents(raw).items():
        (place / name).mkdir(parents=True)
        (place / name / name).write_bytes(content)
        (place / name.replace("-idx", ".idx")).write_bytes(content)
    return place


def as_spread(raw: Path, place: Path) -> Path:
    for name, content in contents(raw).items():
        (place / name).mkdir(parents=True)
        (place / name / name).write_bytes(content)
    return place


def as_tar(raw: Path, place: Path) -> Path:
    members = {f"./mnist/{name}": content for name, content in contents(raw).items()}
    return tarred(place.with_suffix(".tar"), members, "w")


def as_tgz_of_gz(raw: Path, place: Path) -> Path:
    members = {f"a/{name}.gz": gzip.compress(content) for name, content in contents(raw).items()}
    return tarred(place.with_suffix(".tgz"), members)


def as_hostile_tar(raw: Path, place: Path) -> Path:
    """Names that lead out of the archive, and links and devices under the names looked for."""
    with tarfile.open(place.with_suffix(".tar"), "w") as archive:
        for name, content in contents(raw).items():
            for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE):
                trap = tarfile.TarInfo(f"traps/{kind.decode()}/{name}")
                trap.type, trap.linkname = kind, "/etc/passwd"
                archive.addfile(trap)
            member = tarfile.TarInfo(f"../../escaped/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        absolute = tarfile.TarInfo(f"{place.parent}/absolute.txt")
        archive.addfile(absolute, io.BytesIO(b""))
    return place.with_suffix(".tar")


SOURCES = [gzipped, as_plain, as_dotted, as_spread, as_tar, as_tgz_of_gz, as_hostile_tar]


@pytest.mark.parametrize("make", SOURCES)
def test_import_takes_the_set_from(
    make: Callable[[Path, Path], Path], raw: Path, tmp_path: Path
) -> None:
    source = make(raw, tmp_path / "source")
    before = {path for path in tmp_path.parent.rglob("*") if tmp_path / "new" not in path.parents}
    said: list[str] = []
    info = import_from(source, str(tmp_path / "new"), said.append)
    assert (info.train_images, info.checksums_verified, info.published) == (30, True, False)
    assert contents(tmp_path / "new" / idx.RAW) == contents(raw)
    assert "not MNIST as published" in said[-1]
    after = {path for path in tmp_path.parent.rglob("*") if tmp_path / "new" not in path.parents}
    assert after - before == {tmp_path / "new"}


def test_import_of_the_real_mnist(mnist_dir: Path, tmp_path: Path) -> None:
    info = import_from(mnist_dir, str(tmp_path), print)
    assert info.published


def test_importing_the_same_set_again_changes_nothing(raw: Path, tmp_path: Path) -> None:
    for _ in range(2):
        info = import_from(raw, str(tmp_path / "new"), print)
        assert info.train_images == 30


def test_import_does_not_overwrite_another_set(raw: Path, tmp_path: Path) -> None:
    import_from(raw, str(tmp_path / "new"), print)
    synthesise(str(tmp_path / "b"), train_images=30, test_images=10, seed=1, progress=print)
    with pytest.raises(DataError, match="holds another dataset already"):
        import_from(tmp_path / "b", str(tmp_path / "new"), print)
    assert contents(tmp_path / "new" / idx.RAW) == contents(raw)


def three_of_four(raw: Path, place: Path) -> Path:
    (as_plain(raw, place) / "deep" / "er" / idx.TEST_IMAGES).unlink()
    return place


def two_sets(raw: Path, place: Path) -> Path:
    gzipped(raw, place / "first")
    gzipped(raw, place / "second")
    return place


def one_file_twice(raw: Path, place: Path) -> Path:
    as_spread(raw, place)
    (place / "again").mkdir()
    shutil.copy(raw / idx.TEST_LABELS, place / "again")
    return place


def torn_gzip(raw: Path, place: Path) -> Path:
    file = gzipped(raw, place) / f"{idx.TRAIN_IMAGES}.gz"
    file.write_bytes(file.read_bytes()[:-500])
    return place


def torn_tar(raw: Path, place: Path) -> Path:
    path = as_tgz_of_gz(raw, place)
    path.write_bytes(path.read_bytes()[:2_000])
    return path


def no_tar(raw: Path, place: Path) -> Path:
    place.with_suffix(".zip").write_bytes(b"PK\x03\x04 and more")
    return place.with_suffix(".zip")


def wrong_shape(raw: Path, place: Path) -> Path:
    file = as_plain(raw, place) / "deep" / "er" / idx.TRAIN_IMAGES
    file.write_bytes(resized(b""))
    return place


def wrong_label(raw: Path, place: Path) -> Path:
    file = as_plain(raw, place) / "deep" / "er" / idx.TRAIN_LABELS
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    return place


BAD_SOURCES = {
    three_of_four: "no t10k-images-idx3-ubyte in it",
    two_sets: "holds several sets, in .*first, .*second",
    one_file_twice: "t10k-labels-idx1-ubyte is in it more than once",
    torn_gzip: "train-images-idx3-ubyte.gz is damaged",
    torn_tar: "cannot be read as a tar archive",
    no_tar: "unpack other archives first",
    wrong_shape: "32x32 pixels",
    wrong_label: "the label 255 at image 29",
}


@pytest.mark.parametrize(("make", "said"), BAD_SOURCES.items())
def test_a_source_that_cannot_be_imported_is_explained(
    make: Callable[[Path, Path], Path], said: str, raw: Path, tmp_path: Path
) -> None:
    source = make(raw, tmp_path / "source")
    with pytest.raises(DataError, match=said) as raised:
        import_from(source, str(tmp_path / "new"), print)
    assert f"nothing was imported from {source}" in str(raised.value)
    assert not (tmp_path / "new").exists()


def test_an_archive_that_unpacks_without_end_is_stopped(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_source, "_LARGEST_FILE_BYTES", 1 << 20)
    source = gzipped(raw, tmp_path / "source")
    (source / f"{idx.TEST_LABELS}.gz").write_bytes(gzip.compress(bytes(5 << 20)))
    with pytest.raises(DataError, match="unpacks to over"):
        import_from(source, str(tmp_path / "new"), print)
