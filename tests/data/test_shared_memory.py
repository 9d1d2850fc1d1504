import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from clusterddp.data import mnist, shared_memory
from clusterddp.data.shared_memory import Held, Offer, Reading
from clusterddp.distributed import rendezvous
from clusterddp.errors import DataError, PeerError
from clusterddp.ranks.dist_env import DistEnv
from clusterddp.request.train_config import TrainConfig
from clusterddp.worker import start
from tests import forked

TAKES = """
import json, sys
from clusterddp.data import shared_memory
from clusterddp import files
held = shared_memory.take(files.load(shared_memory.Offer, json.loads(sys.argv[1])))
pixels, labels = held.tensors(train=True)
print(int(pixels.sum()), int(labels.sum()), tuple(pixels.shape))
"""


@pytest.fixture
def held(synthetic_dir: Path) -> Held:
    return shared_memory.read("synthetic", str(synthetic_dir))


def offer_of(held: Held) -> Offer:
    offer = held.offer()
    assert offer
    return offer


@pytest.mark.parametrize(("train", "count"), [(True, 2_000), (False, 500)])
def test_the_copy_is_what_torchvision_reads(
    synthetic_dir: Path, train: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = mnist.torchvision_set("synthetic", str(synthetic_dir), train=train)
    monkeypatch.setitem(sys.modules, "torchvision", None)  # which is not needed here
    held = shared_memory.read("synthetic", str(synthetic_dir))
    pixels, labels = held.tensors(train=train)
    assert pixels.shape == (count, 28, 28)
    for ours, expected in ((pixels, theirs.data), (labels, theirs.targets)):
        assert torch.equal(ours, expected)
        assert ours.dtype == expected.dtype
    assert held.digest() == mnist.fingerprint("synthetic", str(synthetic_dir))


def test_another_process_maps_it_and_nobody_can_change_it(held: Held) -> None:
    pixels, labels = held.tensors(train=True)
    done = forked.run("-c", TAKES, json.dumps(asdict(offer_of(held))))
    assert done.stdout == f"{int(pixels.sum())} {int(labels.sum())} {tuple(pixels.shape)}\n"
    assert held.handle is not None
    with pytest.raises(PermissionError):
        os.pwrite(held.handle, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(held.handle, 0)
    held.close()
    assert held.offer() is None
    assert torch.equal(held.tensors(train=True)[0], pixels), "the tensors stay"


def test_an_offer_of_another_process_or_of_nothing_is_refused(held: Held) -> None:
    offer = offer_of(held)
    with pytest.raises(ValueError, match="another process"):
        shared_memory.take(replace(offer, file=(0, 0)))
    with pytest.raises(OSError):
        shared_memory.take(replace(offer, handle=1 << 20))
    with pytest.raises(ValueError, match="memory that ranks can share"):
        shared_memory.take(None)


def test_without_shared_memory_the_files_are_read_all_the_same(
    synthetic_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    for name in ("memfd_create", "sendfile"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, full)
            held = shared_memory.read("synthetic", str(synthetic_dir))
        assert held.offer() is None
        assert held.digest() == mnist.fingerprint("synthetic", str(synthetic_dir))


def test_a_set_that_comes_after_the_reading_began_is_read(
    synthetic_dir: Path, tmp_path: Path
) -> None:
    reading = Reading("synthetic", str(tmp_path), digest=True)
    with pytest.raises(DataError, match="missing"):
        reading.held()
    (tmp_path / "synthetic").symlink_to(synthetic_dir / "synthetic")
    assert reading.fingerprint() == mnist.fingerprint("synthetic", str(synthetic_dir))
    assert Reading("synthetic", str(tmp_path), digest=True).fingerprint() == reading.fingerprint()


def test_a_damaged_set_is_named(synthetic_dir: Path, tmp_path: Path) -> None:
    raw = tmp_path / "synthetic" / mnist.RAW
    raw.mkdir(parents=True)
    for name in mnist.FILES:
        (raw / name).write_bytes((synthetic_dir / "synthetic" / mnist.RAW / name).read_bytes()[:-1])
    with pytest.raises(DataError, match="truncated"):
        Reading("synthetic", str(tmp_path), digest=False).held()


def test_a_rank_that_cannot_map_it_says_so_and_reads_the_files(
    held: Held, synthetic_dir: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    config = TrainConfig(dataset="synthetic", data_dir=str(synthetic_dir))
    env = DistEnv.from_environ({})

    def take(offer: object) -> Held:
        monkeypatch.setattr(rendezvous, "ask", lambda *_: offer)
        return start._take(config, env, None, "data/0")  # type: ignore[arg-type]

    whole = json.loads(json.dumps(asdict(offer_of(held))))
    assert take(whole).handle is None and not logged
    for offer in ({**whole, "file": [0, 0]}, {}, None, {"sizes": "?"}):
        assert take(offer).digest() == held.digest()
        assert "reads the dataset itself" in logged.pop()
    with pytest.raises(PeerError, match="gone"):
        take({"error": "the files are gone"})
