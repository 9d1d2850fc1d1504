"""Checks of the nodes by the ranks of a training."""

import json
import math
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from clusterddp.distributed.agreement import RankInfo
from clusterddp.distributed.heartbeat import Progress
from clusterddp.files import append_json_line
from clusterddp.preflight import evaluation
from clusterddp.run import bad_nodes
from clusterddp.run.attempt import Attempt, begin
from clusterddp.run.bad_nodes import BadNode
from clusterddp.run.run_dir import RunDir
from clusterddp.training import preflight
from tests.training.ranks import run_ranks

CPU = torch.device("cpu")


def test_a_product_is_right_and_has_a_speed() -> None:
    fault, speed = preflight.multiply(CPU)
    assert fault == ""
    assert speed > 0


def test_the_factors_keep_their_values_in_bf16_and_so_in_tf32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = torch.mm

    def rounded(left: torch.Tensor, right: torch.Tensor, **more: Any) -> torch.Tensor:
        assert torch.equal(left.bfloat16().float(), left)
        assert torch.equal(right.bfloat16().float(), right)
        return plain(left, right, **more)

    monkeypatch.setattr(torch, "mm", rounded)
    assert preflight.multiply(CPU)[0] == ""


@pytest.mark.parametrize("wrong", [1.0, -0.001, float("nan"), float("inf")])
def test_one_wrong_element_is_seen(wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.mm

    def mm(*args: Any, **more: Any) -> torch.Tensor:
        product = plain(*args, **more)
        product[511, 0] += wrong
        return product

    monkeypatch.setattr(torch, "mm", mm)
    assert preflight.multiply(CPU)[0] == "1 of 262,144 elements are wrong"


def checked(rank: int, world_size: int, folder: str, hook: str = "") -> tuple[bool, int, str]:
    """Check nodes of two ranks each; returns the answer, the marks that it set, and the place."""
    if hook and rank == 2:
        plain = torch.mm
        torch.mm = lambda *args, **more: plain(*args, **more).add_(1)  # type: ignore[assignment]
    # How fast these processes are beside each other is a matter of this host's load.
    evaluation.SLOW_PRODUCT, evaluation.SLOW_SHARE = math.inf, 0.0
    preflight._SPAN_SECONDS = preflight._EXCHANGE_SECONDS = 0.01
    info = cast(
        RankInfo,
        SimpleNamespace(rank=rank, local_rank=rank % 2, host=f"h{rank // 2}", device="cpu"),
    )
    progress, attempt = Progress(), Attempt(RunDir(Path(folder)), 1)
    passes = preflight.nodes_pass(info, attempt, CPU, "fp32", progress)
    return passes, progress.state[0], progress.position.words()


def record(folder: Path) -> Any:
    return json.loads(Attempt(RunDir(folder), 1).full_preflight.read_text())


def test_ranks_check_their_nodes_all_in_the_same_steps(tmp_path: Path) -> None:
    begin(RunDir(tmp_path / "a"))
    answers = run_ranks(6, checked, str(tmp_path / "a"))
    assert {answer[0] for answer in answers} == {True}
    assert {answer[2] for answer in answers} == {"waiting for all ranks in its preflight"}
    assert len({answer[1] for answer in answers}) == 1
    kept = record(tmp_path / "a")
    assert kept["failed"] == {}
    assert kept["summary"].startswith("3 nodes passed in ")
    figures = re.sub("[0-9,.]+ MB/s", "X", kept["summary"].partition("; ")[2])
    assert re.fullmatch(
        "all-reduce over 6 ranks up to 4 MiB: X, "
        r"within nodes at least X \(h[012]\), across nodes X",
        figures,
    ), figures
    for part in ("within", "across"):  # each group has one rate
        of_groups = {each["rank"] // 2 if part == "within" else each["local_rank"]: each[part]
                     for each in kept["ranks"]}  # fmt: skip
        rates = [each[part] for each in kept["ranks"]]
        assert {*of_groups.values()} == {*rates}
        assert len({*rates}) == len(of_groups) and min(rates) > 0
    assert kept["all_reduce"] > 0
    for each in kept["ranks"]:
        assert {int(other) % 2 for other in each["pairs"]} == {each["local_rank"]}
        assert len(each["pairs"]) == 2
        assert min(each["pairs"].values()) > 0


def test_a_wrong_product_has_all_ranks_leave_unless_the_node_is_known_as_bad(
    tmp_path: Path,
) -> None:
    begin(RunDir(tmp_path / "a"))
    assert {answer[0] for answer in run_ranks(4, checked, str(tmp_path / "a"), "wrong")} == {False}
    kept = record(tmp_path / "a")
    assert list(kept["failed"]) == ["h1"]
    assert kept["failed"]["h1"].startswith("rank 2 on cpu computes wrong matrix products: ")
    assert kept["summary"].startswith("failed: h1; 1 node passed in ")
    begin(RunDir(tmp_path / "b"))
    known = BadNode("h1", "slow", "preflight", expires=time.time() + 600)
    append_json_line(tmp_path / bad_nodes.FILE_NAME, vars(known))
    assert {answer[0] for answer in run_ranks(4, checked, str(tmp_path / "b"), "wrong")} == {True}
    kept = record(tmp_path / "b")
    assert kept["failed"] == {}
    assert kept["remarks"][-1].startswith("already marked bad, used anyway: h1: rank 2 ")


def test_a_rank_alone_multiplies_and_has_nobody_to_exchange_with(tmp_path: Path) -> None:
    begin(RunDir(tmp_path / "a"))
    assert run_ranks(1, checked, str(tmp_path / "a"))[0][0]
    kept = record(tmp_path / "a")
    assert (kept["failed"], kept["all_reduce"]) == ({}, None)
    assert kept["summary"].startswith("1 node passed in ")
    assert kept["ranks"][0]["pairs"] == {}
    assert (kept["ranks"][0]["within"], kept["ranks"][0]["across"]) == (-1, -1)


def test_what_cannot_be_recorded_ends_nothing(tmp_path: Path) -> None:
    assert run_ranks(2, checked, str(tmp_path / "none"))[0][0]
