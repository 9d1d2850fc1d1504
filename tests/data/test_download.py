"""Each way in which the dataset comes to its place, and in which that can fail."""

import gzip
import hashlib
import http.server
import io
import os
import shutil
import sys
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterddp.data import download, mnist
from clusterddp.data.download import fetch, import_from
from clusterddp.data.mnist import PUBLISHED
from clusterddp.data.synthetic import generate
from clusterddp.errors import DataError
from tests.data.made_sets import NOBODY, contents, gzipped, resized, tarred

# --- fetch ---------------------------------------------------------------------------------


@pytest.fixture
def mirror(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of a mirror on this machine, whose small set stands for the published MNIST."""
    from torchvision.datasets import MNIST

    place = gzipped(raw, tmp_path / "mirror")
    files = [f"{name}.gz" for name in mnist.FILES]
    sums = [hashlib.md5((place / file).read_bytes()).hexdigest() for file in files]
    monkeypatch.setattr(MNIST, "resources", list(zip(files, sums, strict=True)))
    published = {name: mnist.digest(raw / name) for name in mnist.FILES}
    monkeypatch.setattr(mnist, "PUBLISHED", published)
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
    info = fetch(str(place))
    assert (info.train_images, info.checksums_verified, info.published) == (30, True, True)
    assert contents(place / mnist.RAW) == contents(raw)
    assert [path.name for path in (place / "MNIST").iterdir()] == ["raw"]
    assert sorted(path.name for path in (place / mnist.RAW).iterdir()) == sorted(
        [*mnist.FILES, mnist.SUMS]
    )


def test_ensure_fetches_where_it_may(tmp_path: Path, mirror: Path) -> None:
    assert mnist.ensure("mnist", str(tmp_path / "new"), {"mnist": fetch}).test_images == 10


def test_fetch_leaves_a_whole_set_as_it_is(tmp_path: Path, mirror: Path) -> None:
    fetch(str(tmp_path / "new"))
    shutil.rmtree(mirror)
    assert fetch(str(tmp_path / "new")).published


def test_fetch_completes_what_torchvision_left_half_done(
    tmp_path: Path, raw: Path, mirror: Path
) -> None:
    half = tmp_path / "half" / mnist.RAW
    half.mkdir(parents=True)
    shutil.copy(raw / mnist.TRAIN_IMAGES, half)
    (half / "notes.txt").write_text("mine")
    assert fetch(str(tmp_path / "half")).published
    assert (half / "notes.txt").read_text() == "mine"


def test_fetch_does_not_overwrite_another_file(tmp_path: Path, mirror: Path) -> None:
    half = tmp_path / "half" / mnist.RAW
    half.mkdir(parents=True)
    (half / mnist.TEST_LABELS).write_bytes(b"mine")
    with pytest.raises(DataError, match="already contains another or a damaged dataset"):
        fetch(str(tmp_path / "half"))
    assert [path.name for path in half.iterdir()] == [mnist.TEST_LABELS]


def test_a_failed_fetch_gives_the_reason_and_the_other_ways(tmp_path: Path, mirror: Path) -> None:
    (mirror / "t10k-labels-idx1-ubyte.gz").write_bytes(b"torn")  # after three whole files
    with pytest.raises(DataError, match="could not be downloaded") as raised:
        fetch(str(tmp_path / "new"))
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
        fetch(str(tmp_path / "new"))


def test_a_mirror_that_sends_something_else_is_found_out(
    tmp_path: Path, mirror: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mnist, "PUBLISHED", PUBLISHED)
    with pytest.raises(DataError, match="the downloaded files are not MNIST"):
        fetch(str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


def test_fetch_without_torchvision_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(DataError, match="needs torchvision") as refused:
        fetch(str(tmp_path / "new"))
    assert refused.value.code == "CD0803"


# --- import --------------------------------------------------------------------------------


def as_plain(raw: Path, place: Path) -> Path:
    (place / "deep" / "er").mkdir(parents=True)
    for name, content in contents(raw).items():
        (place / "deep" / "er" / name).write_bytes(content)
    return place


def as_dotted(raw: Path, place: Path) -> Path:
    """As today's archives have it: images.idx3, and each file also in its own directory."""
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
        archive.addfile(tarfile.TarInfo(f"{place.parent}/absolute.txt"), io.BytesIO(b""))
    return place.with_suffix(".tar")


SOURCES = [gzipped, as_plain, as_dotted, as_spread, as_tar, as_tgz_of_gz, as_hostile_tar]


@pytest.mark.parametrize("make", SOURCES)
def test_import_takes_the_set_from(
    make: Callable[[Path, Path], Path], raw: Path, tmp_path: Path, logged: list[str]
) -> None:
    source = make(raw, tmp_path / "source")
    before = {path for path in tmp_path.parent.rglob("*") if tmp_path / "new" not in path.parents}
    info = import_from(source, str(tmp_path / "new"))
    assert (info.train_images, info.checksums_verified, info.published) == (30, True, False)
    assert contents(tmp_path / "new" / mnist.RAW) == contents(raw)
    assert "not the published MNIST" in logged[-1]
    after = {path for path in tmp_path.parent.rglob("*") if tmp_path / "new" not in path.parents}
    assert after - before == {tmp_path / "new"}


def test_import_of_the_real_mnist(mnist_dir: Path, tmp_path: Path) -> None:
    assert import_from(mnist_dir, str(tmp_path)).published


def test_importing_the_same_set_again_changes_nothing(raw: Path, tmp_path: Path) -> None:
    for _ in range(2):
        assert import_from(raw, str(tmp_path / "new")).train_images == 30


def test_import_does_not_overwrite_another_set(raw: Path, tmp_path: Path) -> None:
    import_from(raw, str(tmp_path / "new"))
    generate(str(tmp_path / "b"), train_images=30, test_images=10, seed=1)
    with pytest.raises(DataError, match="already contains another or a damaged dataset"):
        import_from(tmp_path / "b", str(tmp_path / "new"))
    assert contents(tmp_path / "new" / mnist.RAW) == contents(raw)


def three_of_four(raw: Path, place: Path) -> Path:
    (as_plain(raw, place) / "deep" / "er" / mnist.TEST_IMAGES).unlink()
    return place


def two_sets(raw: Path, place: Path) -> Path:
    gzipped(raw, place / "first")
    gzipped(raw, place / "second")
    return place


def one_file_twice(raw: Path, place: Path) -> Path:
    as_spread(raw, place)
    (place / "again").mkdir()
    shutil.copy(raw / mnist.TEST_LABELS, place / "again")
    return place


def torn_gzip(raw: Path, place: Path) -> Path:
    file = gzipped(raw, place) / f"{mnist.TRAIN_IMAGES}.gz"
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
    file = as_plain(raw, place) / "deep" / "er" / mnist.TRAIN_IMAGES
    file.write_bytes(resized(b""))
    return place


def wrong_label(raw: Path, place: Path) -> Path:
    file = as_plain(raw, place) / "deep" / "er" / mnist.TRAIN_LABELS
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    return place


BAD_SOURCES = {
    three_of_four: "no t10k-images-idx3-ubyte in it",
    two_sets: "contains several sets, in .*first, .*second",
    one_file_twice: "contains t10k-labels-idx1-ubyte more than once",
    torn_gzip: "train-images-idx3-ubyte.gz is damaged",
    torn_tar: "neither a directory nor a",
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
        import_from(source, str(tmp_path / "new"))
    assert f"nothing was imported from {source}" in str(raised.value)
    assert not (tmp_path / "new").exists()


def test_an_archive_that_unpacks_without_end_is_stopped(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "_MAX_FILE_BYTES", 1 << 20)
    source = gzipped(raw, tmp_path / "source")
    (source / f"{mnist.TEST_LABELS}.gz").write_bytes(gzip.compress(bytes(5 << 20)))
    with pytest.raises(DataError, match="unpacks to over"):
        import_from(source, str(tmp_path / "new"))


def test_a_source_without_permission_is_named(raw: Path, tmp_path: Path, nobody: None) -> None:
    if os.geteuid() != NOBODY:
        raw.chmod(0)
    said = r"nothing was imported .*Permission denied"
    with tempfile.TemporaryDirectory() as place, pytest.raises(DataError, match=said):
        import_from(raw, place)
    if os.geteuid() != NOBODY:
        raw.chmod(0o755)
