"""A person's own dataset: what is taken, what is refused and how, and who calls it when."""

import importlib
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from clusterddp.data.loader import Images, Loader
from clusterddp.data.user_dataset import OwnSets
from clusterddp.distributed.rendezvous import Identity, RunStore
from clusterddp.errors import ClusterDDPError, DataError, TrainingError
from clusterddp.ranks.dist_env import DistEnv
from clusterddp.request.train_config import TrainConfig
from clusterddp.run.run_dir import RunDir
from clusterddp.training.learner import check_fit
from clusterddp.worker import start
from clusterddp.worker.task import run_task
from tests.training.ranks import run_ranks
from tests.training.trainings import generator_states, info

CPU = torch.device("cpu")
MODULE = """
import os, random, time
from pathlib import Path
import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

pixels, floats = torch.zeros(6, 20, 20, dtype=torch.uint8), torch.rand(6, 3, 8, 8)
labels = torch.arange(6)
calls = []

class Items(Dataset):
    def __init__(self, items):
        self.items = items
    def __len__(self):
        return len(self.items)
    def __getitem__(self, index):
        return self.items[index]

class Endless(IterableDataset):
    def __iter__(self):
        yield floats[0], 1

class Turned(Items):
    def __getitem__(self, index):
        torch.rand(()), random.random(), np.random.random()  # as random transforms do
        return self.items[index]

def given(data_dir, train):
    return eval(expression, globals(), {"train": train})

def drawn(data_dir, train):
    calls.append((data_dir, train))
    return torch.randn(6, 1, 4, 4), labels + random.randrange(100)

def failing(data_dir, train):
    raise OSError(f"no such archive in {data_dir}")

def logged(data_dir, train):
    # Says when each rank comes and goes; fails on the rank that it is told.
    rank = os.environ["OWN_RANK"]
    with open(f"{data_dir}/calls", "a", buffering=1) as file:
        file.write(f"begin {rank}\\n")
        time.sleep(0.1)
        file.write(f"end {rank}\\n")
    if os.environ.get("FAILS") == rank:
        raise OSError("the disk is full")
    return torch.full((6, 1, 4, 4), float(os.environ.get("OTHER") == rank)), labels
"""


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of a person, `own`, in the current directory."""
    (tmp_path / "own.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    importlib.invalidate_caches()
    yield importlib.import_module("own")
    del sys.modules["own"]


def config(**fields: Any) -> TrainConfig:
    return TrainConfig(
        **{"dataset": "own:given", "data_dir": "somewhere", "num_workers": 0, **fields}
    )


def sets_of(own: Any, expression: str, **fields: Any) -> OwnSets:
    """What a function gives that returns this, `own`'s names being its own."""
    own.expression = expression
    return OwnSets(config(**fields))


def batch(given: Images | Loader) -> tuple[torch.Tensor, torch.Tensor]:
    [found] = given.batches(torch.tensor([1, 0]), 2)
    return found


@pytest.mark.parametrize(
    ("returned", "kind", "dtype", "shape"),
    [
        ("pixels, labels", Images, torch.uint8, (2, 20, 20)),
        ("[floats, labels.int()]", Images, torch.float32, (2, 3, 8, 8)),
        ("floats.double(), labels.byte()", Images, torch.float32, (2, 3, 8, 8)),
        ("floats.flatten(1).half(), labels", Images, torch.float32, (2, 192)),
        ("Items(list(zip(floats, labels)))", Loader, torch.float32, (2, 3, 8, 8)),
        ("Items(list(zip(floats.double(), labels.tolist())))", Loader, torch.float32, (2, 3, 8, 8)),
        ("list(zip(pixels, labels.int().numpy()))", Loader, torch.uint8, (2, 20, 20)),
        ("torch.utils.data.TensorDataset(floats, labels)", Loader, torch.float32, (2, 3, 8, 8)),
    ],
)
def test_tensors_stay_in_memory_and_a_dataset_is_read_by_the_loader(
    own: Any, returned: str, kind: type, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    for given in sets_of(own, returned).on(CPU):
        images, labels = batch(given)
        assert isinstance(given, kind) and len(given) == 6
        assert (images.dtype, tuple(images.shape)) == (dtype, shape)
        assert (labels.dtype, labels.tolist()) == (torch.int64, [1, 0])


def test_with_the_loader_tensors_are_read_by_it_as_well(own: Any) -> None:
    train, _ = sets_of(own, "floats, labels", data_pipeline="loader").on(CPU)
    assert isinstance(train, Loader)
    assert torch.equal(batch(train)[0], own.floats[[1, 0]])


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("None", r"with train=True: expected a pair of tensors .*, found NoneType"),
        ("3", "found int 3"),
        (
            "floats",
            r"expected items that are pairs .* found a tensor \(3, 8, 8\) of torch.float32 first",
        ),
        ("(floats.numpy(), labels.numpy())", "found a tuple of ndarray, ndarray"),
        ("(floats, labels, floats)", r"found a tuple of a tensor \(6, 3, 8, 8\)"),
        ("{'images': floats}", "found dict"),
        ("Endless()", "a dataset with a length .*, found Endless"),
        ("Items([])", "the dataset is empty"),
        ("(floats[:0], labels[:0])", "it returned no image: "),
        ("(floats, labels[:5])", r"one label per image, found images \(6, 3, 8, 8\) and"),
        ("(floats, labels.view(6, 1))", r"labels \(6, 1\)"),
        ("(labels.float(), labels)", r"images \(6,\) and labels \(6,\)"),
        ("(floats, labels.float())", "expected integer labels .*, found torch.float32"),
        ("(floats, labels > 2)", "found torch.bool"),
        ("(floats, labels - 1)", "found a label -1"),
        ("(labels.view(6, 1, 1), labels)", "floats or bytes, found torch.int64 of"),
        ("(floats.byte(), labels)", r"\(height, width\) each, found torch.uint8 of"),
        ("Items([{'x': 1}])", "found dict"),
        ("Items([(floats[0], 0.5)])", "label of 0 or more, found a tuple of"),
        ("Items([(floats[0], -1)])", r"a tensor \(3, 8, 8\) of torch.float32, int -1"),
        ("Items([(floats[0], True)])", "bool True"),
        ("Items([('a.png', 1)])", "found a tuple of str, int 1"),
        ("Items([(floats[0].byte(), 1)])", r"\(height, width\) each"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_with_what_was_seen(
    own: Any, returned: str, words: str
) -> None:
    with pytest.raises(DataError, match=words) as caught:
        sets_of(own, returned).load()
    assert str(caught.value).startswith("--dataset own:given with train=True: ")


def test_a_function_that_fails_is_told_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TrainingError, match="OSError: no such archive in somewhere ") as caught:
        OwnSets(config(dataset="own:failing")).load()
    assert "\n" not in str(caught.value)
    assert "in failing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("returned", "taken"),
    [("pixels, labels", True), ("floats, labels", True), ("floats.flatten(1), labels", False)],
)
def test_augmenting_takes_what_has_a_height_and_a_width(
    own: Any, returned: str, taken: bool
) -> None:
    sets = sets_of(own, returned, augment="affine")
    if taken:
        sets.load()
    else:
        with pytest.raises(
            DataError, match=r"expected \(channels, height, width\) for --augment affine"
        ):
            sets.load()


def test_what_is_drawn_is_the_same_on_every_rank_and_at_every_start(own: Any) -> None:
    found = []
    for spoilt in range(2):
        torch.manual_seed(spoilt)
        sets = OwnSets(config(dataset="own:drawn", data_dir="here"))
        found.append(sets.fingerprint())
        sets.on(CPU)
    assert found[0] == found[1]
    assert own.calls == [("here", True), ("here", False)] * 2  # and once each
    assert OwnSets(config(dataset="own:drawn", seed=1)).fingerprint() != found[0]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("floats, labels", "floats.double(), labels.int()", True),  # trained on as the same
        ("floats, labels", "floats + 1, labels", False),
        ("floats, labels", "floats, labels.flip(0)", False),
        ("floats, labels", "floats + float(not train), labels", False),
        ("floats, labels", "floats.view(6, 3, 64), labels", False),
        ("Items([(floats[0], 1)] * 5)", "Items([(floats[1], 0)] * 5)", True),
        ("Items([(floats[0], 1)] * 5)", "Items([(floats[0], 1)] * 6)", False),
    ],
)
def test_the_fingerprint_is_of_the_content_or_of_a_datasets_length(
    own: Any, one: str, other: str, same: bool
) -> None:
    found = [sets_of(own, text).fingerprint() for text in (one, other)]
    assert (found[0] == found[1]) == same


def test_a_run_is_not_gone_on_with_on_another_set(own: Any, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")

    def decide(sets: OwnSets) -> str:
        settings = config(data_dir=str(tmp_path))
        return start.settle_attempt(
            settings, run.path, None, {"SLURM_JOB_ID": "7"}, [info(0, 1)], sets.fingerprint
        ).data_sha256

    first = sets_of(own, "floats, labels")
    assert decide(first) == first.fingerprint()
    with pytest.raises(DataError, match=r"the own:given dataset at .* has changed .* the images"):
        decide(sets_of(own, "floats * 2, labels"))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            nn.Sequential(nn.Flatten(), nn.Linear(192, 5)),
            "the label 5 is not one of the model's 5 classes",
        ),
        (nn.Conv2d(3, 9, 1), r"returned \(1, 9, 8, 8\) for 1 image"),
        (nn.Linear(7, 9), r"on images \(1, 3, 8, 8\) failed on .*: RuntimeError: "),
    ],
)
@pytest.mark.parametrize("returned", ["floats, labels", "Turned(list(zip(floats, labels)))"])
def test_a_model_that_does_not_fit_the_set_is_told_before_a_step(
    own: Any, model: nn.Module, words: str, returned: str
) -> None:
    sets = sets_of(own, returned).on(CPU)
    with pytest.raises(ClusterDDPError, match=words):
        check_fit(config(model="own:net"), model, *sets)
        list(sets[0].batches(torch.arange(6), 3))  # the loader sees labels as they come


def test_trying_them_leaves_the_ranks_random_numbers_and_the_model_as_they_were(own: Any) -> None:
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(192), nn.Dropout(), nn.Linear(192, 6))
    sets = sets_of(own, "Turned(list(zip(floats, labels)))").on(CPU)
    model.register_forward_hook(lambda *_: (random.random(), np.random.random(), None)[2])
    model.register_forward_hook(lambda *_: (torch.rand(()), None)[1])
    before, state = (generator_states(), {k: v.clone() for k, v in model.state_dict().items()})
    check_fit(config(model="own:net"), model, *sets)
    assert torch.equal(generator_states(), before) and model.training
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())


def test_a_shipped_model_says_for_which_images_it_is_made(own: Any) -> None:
    from clusterddp.models import nets

    with pytest.raises(TrainingError, match=r"\(N, 1, 28, 28\)\. Use your own") as caught:
        check_fit(config(), nets.build("convnet"), *sets_of(own, "floats, labels").on(CPU))
    assert "own:given on images (1, 3, 8, 8)" in str(caught.value)

    class AsKeras(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            raise ValueError("expected axis 1 of input shape to have value 1")

    with pytest.raises(TrainingError, match="this model expects images"):
        check_fit(config(), AsKeras(), *sets_of(own, "floats, labels").on(CPU))


def test_a_task_tries_both_together_before_it_trains(
    own: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own.expression = "floats, labels"
    monkeypatch.setattr(os, "environ", dict(os.environ))
    threads = torch.get_num_threads()
    try:
        with pytest.raises(TrainingError, match="this model expects images"):
            run_task(config(device="cpu", threads=1), tmp_path / "run")
    finally:
        torch.set_num_threads(threads)
    assert not list(tmp_path.glob("run/**/*.pt"))


def _obtain(rank: int, world_size: int, folder: str, environ: dict[str, str]) -> str:
    """As a rank does, two ranks a node; rank 0 has called the function to agree on it."""
    os.chdir(folder)
    sys.path.insert(0, folder)
    os.environ.update(environ, OWN_RANK=str(rank))
    local = world_size // 2
    env = DistEnv(
        rank=rank, local_rank=rank % local, node_rank=rank // local, world_size=world_size,
        local_world_size=local, num_nodes=2, master_addr="127.0.0.1", master_port=1,
        hostnames=("h01", "h02"), origin="torch",
    )  # fmt: skip
    settings = config(dataset="own:logged", data_dir=folder)
    sets = OwnSets(settings)
    found = [sets.fingerprint() if rank == 0 else ""]
    dist.broadcast_object_list(found)
    store = RunStore(dist.FileStore(f"{folder}/store", world_size), Identity("", ""))
    try:
        (train, _), _ = start.load_datasets(settings, env, store, sets, CPU, data_sha256=found[0])
    except ClusterDDPError as error:
        return f"{type(error).__name__}: {error}"
    return str(len(train))


def test_rank_0_calls_it_first_then_the_first_of_every_node_then_the_others(tmp_path: Path) -> None:
    assert run_ranks(4, _obtain, str(tmp_path), {}) == ["6"] * 4
    lines = (tmp_path / "calls").read_text().splitlines()
    assert len(lines) == 4 * 2 * 2  # each rank calls it for both sets, and once
    place = {line: [n for n, each in enumerate(lines) if each == line] for line in lines}
    assert place["end 0"][-1] < place["begin 2"][0]
    for later in "13":
        for earlier in "02":
            assert place[f"end {earlier}"][-1] < place[f"begin {later}"][0], lines


def test_where_the_first_rank_of_a_node_fails_the_others_of_it_do_not_try(tmp_path: Path) -> None:
    first, other, failed, peer = run_ranks(4, _obtain, str(tmp_path), {"FAILS": "2"})
    assert (first, other) == ("6", "6")
    assert failed.startswith("TrainingError: own:logged failed on ")
    assert peer.startswith("PeerError: the first rank of this node has no dataset: own:logged")
    assert "begin 3" not in (tmp_path / "calls").read_text()


def test_a_rank_that_gets_other_images_is_named(tmp_path: Path) -> None:
    taken = run_ranks(2, _obtain, str(tmp_path), {"OTHER": "1"})
    assert taken[0] == "6"
    assert taken[1].startswith("DataError: --dataset own:logged returns other data on rank 1 on ")
