"""The rows of a comparison, its arithmetic, its table and its picture."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest

from clusterddp.comparison.plan import Hosts, plan
from clusterddp.comparison.results import (
    Row,
    RowRun,
    RowSummary,
    label,
    notes,
    results,
    scaling,
    table,
)
from clusterddp.errors import RequestError
from clusterddp.files import load
from clusterddp.processes.hardware import describe
from clusterddp.reporting import plots
from clusterddp.request.resources import Resources
from clusterddp.request.spec import JobSpec
from clusterddp.request.train_config import TrainConfig
from clusterddp.run.records import Report
from clusterddp.status.state import RunState

ALL = ("single", "dp", "ddp")
CPUS = Hosts(gpus=0, on_gpus=False)
CONFIG = TrainConfig(batch_size=60, lr=0.01)


def shapes(rows: list[Row]) -> list[tuple[str, int, int, str]]:
    return [(row.name, row.ranks, row.nodes, row.missing) for row in rows]


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        (CPUS,
         [("single", 1, 1, ""), ("dp-2", 1, 1, "needs 2 GPUs"), ("dp-4", 1, 1, "needs 4 GPUs"),
          ("ddp-1", 1, 1, ""), ("ddp-2", 2, 1, ""), ("ddp-4", 4, 1, "")]),
        (Hosts(gpus=2, on_gpus=True),
         [("single", 1, 1, ""), ("dp-2", 1, 1, ""), ("dp-4", 1, 1, "needs 4 GPUs"), ("ddp-1", 1, 1,
          ""), ("ddp-2", 2, 1, ""), ("ddp-4", 4, 1, "needs 4 GPUs")]),
        (Hosts(gpus=2, on_gpus=True, ranks_per_node=2),
         [("single", 1, 1, ""), ("dp-2", 1, 1, ""), ("dp-4", 1, 1, "needs 4 GPUs"), ("ddp-1", 1, 1,
          ""), ("ddp-2", 2, 1, ""), ("ddp-4", 4, 2, "")]),
    ],
    ids=["a host of CPUs", "a host of two GPUs", "nodes of two GPUs"],
)  # fmt: skip
def test_rows_go_where_there_is_room_for_them(
    hosts: Hosts, expected: list[tuple[str, int, int, str]]
) -> None:
    assert shapes(plan(CONFIG, ALL, [1, 2, 4], hosts)) == expected


@pytest.mark.parametrize(
    ("strategies", "sizes", "hosts", "said"),
    [
        (ALL, [3], Hosts(0, False, ranks_per_node=2), "3 ranks cannot fill nodes of 2 evenly"),
        (("dp",), [1], CPUS, "dp begins at 2 GPUs"),
        (("dp",), [2], CPUS, "dp, 2 GPUs needs 2 GPUs, and 0 GPUs can be had"),
        (ALL, [2], Hosts(0, on_gpus=True), "single needs 1 GPU; "),
    ],
)
def test_a_comparison_without_rows_is_refused(
    strategies: tuple[str, ...], sizes: list[int], hosts: Hosts, said: str
) -> None:
    with pytest.raises(RequestError, match=said):
        plan(CONFIG, strategies, sizes, hosts)


@pytest.mark.parametrize(("scaling", "factor"), [("linear", 4), ("sqrt", 2.0), ("none", 1)])
def test_each_device_takes_the_batch_and_dp_scales_its_rate_as_ddp_does(
    scaling: str, factor: float
) -> None:
    config = dataclasses.replace(CONFIG, lr_scaling=scaling, sync_batchnorm=True)
    single, dp, ddp = plan(config, ALL, [4], Hosts(gpus=4, on_gpus=True))
    assert (single.train.strategy, single.train.batch_size, single.train.lr) == ("single", 60, 0.01)
    assert (dp.train.strategy, dp.train.batch_size) == ("dp", 240)
    assert math.isclose(dp.train.lr, 0.01 * factor)
    assert ddp.train == dataclasses.replace(config, cuda_graph="off")
    assert [row.images_of_a_device(None) for row in (single, dp, ddp)] == [60, 60, 60]


def test_every_step_is_a_cuda_graph_or_none_is() -> None:
    """Where auto would capture that of a single rank alone, and so compare that as well."""
    hosts = Hosts(gpus=4, on_gpus=True)
    for asked in ("auto", "off"):
        rows = plan(dataclasses.replace(CONFIG, cuda_graph=asked), ALL, [2, 4], hosts)
        assert {row.train.cuda_graph for row in rows} == {"off"}
        assert not any(row.missing for row in rows)
    graphs = dataclasses.replace(CONFIG, cuda_graph="on")
    rows = plan(graphs, ALL, [4], hosts)
    assert {row.train.cuda_graph for row in rows if row.strategy != "dp"} == {"on"}
    [dp] = [row for row in rows if row.strategy == "dp"]
    assert dp.missing == "cannot be captured into a CUDA graph"
    with pytest.raises(RequestError, match="dp with --cuda-graph on: its step cannot be captured"):
        plan(graphs, ("dp",), [4], hosts)


def test_a_fixed_global_batch_is_shared_out_at_one_rate() -> None:
    hosts = Hosts(gpus=4, on_gpus=True)
    single, dp, ddp = plan(CONFIG, ALL, [4], hosts, fixed_global_batch=True)
    assert (single.train.batch_size, dp.train.batch_size, ddp.train.batch_size) == (60, 60, 15)
    assert (dp.train.lr, ddp.train.lr, ddp.train.lr_scaling) == (0.01, 0.01, "none")
    assert [row.images_of_a_device(None) for row in (single, dp, ddp)] == [60, 15, 15]
    with pytest.raises(RequestError, match="--batch-size 60 cannot be shared out among 8"):
        plan(CONFIG, ALL, [8], hosts, fixed_global_batch=True)


def test_a_run_is_known_again_by_its_request() -> None:
    def of(strategy: str, **asked: Any) -> Row:
        train = dataclasses.replace(CONFIG, strategy=strategy)
        return Row.of(JobSpec("a", "/a", Resources(**asked), "python", train=train))

    assert of("dp", gpus_per_node=4, tasks_per_node=1).name == "dp-4"
    assert (of("ddp", nodes=2, tasks_per_node=3).name, of("single").name) == ("ddp-6", "single")
    with pytest.raises(RequestError, match="a runs a COMMAND"):
        Row.of(JobSpec("a", "/a", Resources(), "python", command=("true",)))


def trial(row: Row, rate: float, **more: Any) -> RowRun:
    report = {
        "images_per_second": rate, "train_seconds": 6000 / rate, "total_seconds": 9.0,
        "accuracy": 0.9, "peak_memory_bytes": 512_000_000, "steps": 100, "threads": 1,
        "hosts": ["h01"], "device": "cpu", "precision": "bf16", "versions": {"torch": "2.9"},
        **more,
    }  # fmt: skip
    return RowRun(row, f"a-{row.name}", RunState.DONE, report=load(Report, report))


SINGLE, DP, DDP = plan(CONFIG, ALL, [4], Hosts(gpus=4, on_gpus=True))


def test_speed_up_is_against_single_and_efficiency_is_a_device_s_share() -> None:
    single, dp, ddp = results([trial(DDP, 300), trial(SINGLE, 100), trial(DP, 150)])
    assert (single.speedup, single.efficiency, single.baseline) == (1.0, 1.0, True)
    assert (dp.speedup, dp.efficiency, dp.devices, dp.ranks) == (1.5, 0.375, 4, 1)
    assert (ddp.speedup, ddp.efficiency, ddp.baseline) == (3.0, 0.75, False)


def test_without_single_the_fewest_devices_are_the_baseline() -> None:
    two = dataclasses.replace(DDP, devices=2)
    for lost in ([], [RowRun(SINGLE, state="failed", why="boom")]):
        lines = {label(line): line for line in results([trial(DDP, 300), trial(two, 200), *lost])}
        assert lines["ddp, 2 ranks"].baseline
        assert lines["ddp, 4 ranks"].speedup == 1.5
        assert lines["ddp, 4 ranks"].efficiency == 0.75


def test_repeated_rows_give_medians_and_the_spread() -> None:
    trials = [trial(SINGLE, rate, accuracy=rate / 1000) for rate in [100, 130, 110]]
    [line] = results(trials)
    assert (line.images_per_second, line.accuracy) == (110, 0.11)
    assert line.images_per_second_by_run == (100, 130, 110)
    assert "110 (100 to 130)" in table([line])
    assert any("medians" in note for note in notes(trials, [line], ""))
    [line] = results([*trials[:2], RowRun(SINGLE, "b", "failed", "boom")])
    assert (line.state, line.why, line.images_per_second) == ("failed", "1 of 3: boom", 115)
    assert table([line]).splitlines()[1].endswith("488 MiB  failed: 1 of 3: boom")


def test_the_table_has_a_line_for_every_row_also_for_those_without_figures() -> None:
    trials = [
        trial(SINGLE, 1000, peak_memory_bytes=None),
        RowRun(DP, why="needs 4 GPUs"),
        RowRun(DDP, "a-ddp-4", "failed", "rank 1 on h01 failed first: RuntimeError: boom"),
    ]
    assert table(results(trials)).splitlines() == [
        "STRATEGY  RANKS       NODES  TRAIN-TIME  TOTAL-TIME  IMAGES/S  SPEEDUP  EFFICIENCY  "
        "TEST-ACCURACY  PEAK-MEMORY",
        "single    1               1      6.00 s       9.0 s     1,000     1.00        100%  "
        "       90.00%            -",
        "dp        1 (4 GPUs)      1  not run: needs 4 GPUs",
        "ddp       4               1  failed: rank 1 on h01 failed first: RuntimeError: boom",
    ]


def noted(*trials: RowRun) -> str:
    return "\n".join(notes(trials, results(trials), "2 x Fast"))


def test_the_notes_say_what_the_figures_rest_on() -> None:
    said = noted(trial(SINGLE, 100), trial(DDP, 200))
    assert "on h01 (2 x Fast): cpu, bf16, threads per rank 1, torch 2.9" in said
    assert "convnet on mnist, 60 images per device and step: N devices take N times" in said
    assert "relative to single" in said
    assert "differ" not in said and "shares" not in said
    strong = plan(CONFIG, ALL, [4], CPUS, fixed_global_batch=True)
    assert "60 images per step, divided" in noted(trial(strong[0], 100), trial(strong[2], 200))
    other = dataclasses.replace(DDP, train=dataclasses.replace(CONFIG, model="mlp", seed=1))
    assert "the runs differ in --model, --seed" in noted(trial(SINGLE, 100), trial(other, 200))
    assert noted(RowRun(SINGLE, state="failed")) == ""


def test_the_notes_say_what_held_for_all_rows_and_what_did_not() -> None:
    def on_gpu(row: Row, rate: float, **more: Any) -> RowRun:
        return trial(row, rate, device="cuda", **more)

    assert "cuda, bf16, no CUDA graphs, threads" in noted(on_gpu(SINGLE, 100), on_gpu(DDP, 200))
    graphs = on_gpu(SINGLE, 100, cuda_graph=True), on_gpu(DDP, 200, cuda_graph=True)
    assert "cuda, bf16, every step a CUDA graph, threads" in noted(*graphs)
    unlike = noted(
        on_gpu(SINGLE, 100, cuda_graph=True),
        on_gpu(DDP, 200, precision="fp32"), on_gpu(DDP, 210, precision="fp32"),
    )  # fmt: skip
    assert "not alike: bf16 in single; fp32 in ddp, 4 ranks. Compare with one --precision" in unlike
    assert (
        "not alike: CUDA graphs in single; no CUDA graphs in ddp, 4 ranks. Compare with "
        "--cuda-graph off"
    ) in unlike
    on_cpus = noted(trial(SINGLE, 100, capture_seconds=0.1), trial(DDP, 200))
    assert "graph" not in on_cpus and "prepares" not in on_cpus


def test_the_notes_say_what_gpus_did_before_the_clock() -> None:
    both = [
        trial(row, 100, device="cuda", capture_seconds=seconds)
        for row, seconds in ((SINGLE, 0.4), (DDP, 1.25))
    ]
    assert "the training steps, without the preparation of the first (0.40 to 1.25 s);" in noted(
        *both
    )
    assert "preparation of the first (0.40 s);" in noted(both[0])
    assert "train time: the training steps;" in noted(trial(SINGLE, 100, device="cuda"))


def test_a_batch_that_a_small_dataset_does_not_fill_is_told_as_it_is() -> None:
    few = [trial(row, 100, train_images=100) for row in (SINGLE, DP, DDP)]
    assert [line.images_per_device for line in results(few)] == [60, 25, 25]
    assert "mnist, 25, 60 images per device and step;" in noted(few[0], few[2])
    missing = RowRun(dataclasses.replace(DDP, devices=2), why="needs 2 GPUs")
    assert "mnist, 25 images per device and step: N" in noted(few[2], missing)


@pytest.mark.parametrize("damage", [None, 5, "x", [None], {"torch": [1]}, math.nan, 10**400])
def test_a_damaged_report_takes_nothing_from_what_the_others_tell(damage: Any) -> None:
    names = ("accuracy", "peak_memory_bytes", "hosts", "versions", "device", "threads", "steps")
    damaged = trial(DDP, 200, **dict.fromkeys(names, damage))
    sound = trial(SINGLE, 100)
    assert "on h01" in noted(sound, damaged)
    single, ddp = results([sound, damaged])
    assert single.accuracy == 0.9 and ddp.speedup == 2.0
    assert ddp.accuracy is None or math.isfinite(ddp.accuracy)
    assert len(table([single, ddp]).splitlines()) == 3
    [line] = results([trial(SINGLE, 1, images_per_second=damage)])
    assert line.images_per_second in (None, 5)
    json.dumps(dataclasses.asdict(line), allow_nan=False)


def test_what_strangers_wrote_moves_no_cursor() -> None:
    evil = "a\x1b[2Jb\nc"
    said = noted(trial(SINGLE, 100, hosts=[evil], device=evil, versions={"torch": evil}))
    said += table(results([RowRun(SINGLE, state="failed", why=evil)]))
    assert "\x1b" not in said
    assert said.count("a\\x1b[2Jb c") == 4


def test_unequal_shares_of_the_cpus_are_told() -> None:
    unequal = trial(SINGLE, 100, threads=4), trial(DDP, 200, threads=1)
    assert "unequal shares of the CPUs" in noted(*unequal)
    on_gpus = [
        dataclasses.replace(t, report=dataclasses.replace(t.report, device="cuda")) for t in unequal
    ]
    assert "unequal" not in noted(*on_gpus)


def test_the_picture_is_of_the_kind_that_its_name_says_and_names_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = results([trial(SINGLE, 100), trial(SINGLE, 120), trial(DDP, 300), RowRun(DP, why="x")])
    monkeypatch.setitem(mpl.rcParams, "svg.fonttype", "none")
    plots.save_scaling(
        scaling(lines, "mine"), tmp_path / "a.svg", ["on a$x$b", f"convnet on {'long ' * 40}"]
    )
    drawn = (tmp_path / "a.svg").read_text()
    assert drawn.startswith("<?xml")
    for text in (">mine<", ">on a$x$b<", ">convnet on long ", "images/s"):
        assert text in drawn
    plots.save_scaling(scaling(lines[:1], "mine"), tmp_path / "a.png", [])
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["a.gif", "a", "none/a.png", "folder.png"])
def test_a_picture_that_could_not_be_written_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(RequestError, match="--plot"):
        plots.check_file("--plot", str(tmp_path / name))


def test_what_json_gives_of_a_row_keeps_its_names() -> None:
    assert [field.name for field in dataclasses.fields(RowSummary)] == [
        "strategy", "ranks", "devices", "nodes", "state", "why", "runs", "train_seconds",
        "total_seconds", "images_per_second", "images_per_second_by_run", "accuracy",
        "peak_memory_bytes", "steps", "images_per_device", "threads", "speedup", "efficiency",
        "baseline",
    ]  # fmt: skip


def test_this_machine_s_cpus_are_named_with_their_number() -> None:
    count, _, name = describe("cpu").partition(" x ")
    assert (count.isdigit() and name) or not count
