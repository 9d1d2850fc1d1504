"""Dumps of torch's flight recorder: made by hand as torch 2.14 writes them for NCCL, and real."""

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterddp.run.attempt import Attempt
from clusterddp.run.flight_recorder import find_absent, read_dump, variables
from clusterddp.run.records import Collective, Outcome
from clusterddp.run.run_dir import RunDir
from tests.run.test_outcome import outcome
from tests.training.ranks import run_ranks
from tests.waiting import wait_for

OWN = {"filename": "/home/me/train.py", "line": 31, "name": "step"}
TORCHS = {
    "filename": "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py",
    "line": 3906, "name": "all_reduce",
}  # fmt: skip


def entry(number: int, state: str, call: str = "all_reduce", **fields: Any) -> dict[str, Any]:
    return {
        "record_id": number, "pg_id": 0, "process_group": ("0", "default_pg"),
        "collective_seq_id": number, "p2p_seq_id": 0, "op_id": number, "is_p2p": False,
        "profiling_name": f"nccl:{call}", "input_sizes": [[3]], "input_dtypes": ["Float"],
        "output_sizes": [[3]], "output_dtypes": ["Float"], "state": state,
        "retired": state == "completed", "time_created_ns": 1, "timeout_ms": 600000,
        "frames": [TORCHS, OWN], **fields,
    }  # fmt: skip


def dump(path: Path, *entries: dict[str, Any], ranks: int = 4, **fields: Any) -> Path:
    numbers = [each["collective_seq_id"] for each in entries]
    content = {
        "version": "2.10", "comm_lib_version": "2.30.7", "entries": list(entries),
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": str([*range(ranks)])}},
        "pg_status": {"0": {"last_enqueued_collective": max(numbers, default=-1)}}, **fields,
    }  # fmt: skip
    path.write_bytes(pickle.dumps(content, protocol=2))
    return path


def test_the_earliest_open_call_of_each_group_is_read(tmp_path: Path) -> None:
    other = {"pg_id": 1, "process_group": ("1", "undefined")}
    path = dump(
        tmp_path / "nccl-trace-0",
        entry(57, "completed"),
        entry(58, "started"),
        entry(59, "scheduled"),
        entry(4, "scheduled", "recv 3<-0", is_p2p=True),
        entry(9, "completed", "broadcast", **other),
    )
    assert read_dump(path) == (
        Collective("0 (default_pg)", 4, 59, 58, "all_reduce Float [[3]]", "step (train.py:31)"),
        Collective("1", 0, 9),
    )


def test_a_group_whose_ring_of_calls_is_empty_is_known_by_its_configuration(tmp_path: Path) -> None:
    assert read_dump(dump(tmp_path / "d")) == (Collective("0 (default_pg)", 4),)


class Harm:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("harmed"),))


@pytest.mark.parametrize(
    "content",
    [
        b"", b"no pickle", pickle.dumps([1]), pickle.dumps({"entries": [7], "pg_config": {}}),
        pickle.dumps({"entries": [], "pg_config": {}, "pg_status": Harm()}),
    ],
)  # fmt: skip
def test_a_dump_is_data_and_what_is_none_says_nothing(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nccl-trace-0").write_bytes(content)
    assert read_dump(tmp_path / "nccl-trace-0") == ()
    assert not Path("harmed").exists()
    assert read_dump(tmp_path / "none") == ()


def waits(rank: int, number: int, call: str = "all_reduce Float [[3]]", **fields: Any) -> Outcome:
    known = Collective("0 (default_pg)", 4, number, number, call, "step (train.py:31)")
    return outcome(rank, collectives=(replace(known, **fields),))


def idles(rank: int, last: int, *others: Collective) -> Outcome:
    return outcome(rank, collectives=(Collective("0 (default_pg)", 4, last), *others))


IN_ANOTHER = Collective("7", 2, 4, 4, "all_gather", "")
CALL = "call 58 of NCCL's group 0 (default_pg), all_reduce Float [[3]] in step (train.py:31)"


@pytest.mark.parametrize(
    ("outcomes", "said"),
    [
        (
            [waits(0, 58), waits(1, 58, last=60), idles(2, 57), waits(3, 58)],
            f"rank 2 did not join {CALL}, where ranks 0-1, 3 waited",
        ),
        (
            [waits(0, 58), idles(1, 0), idles(2, 0), idles(3, 0)],
            f"ranks 1-3 did not join {CALL}, where rank 0 waited",
        ),
        (
            [waits(0, 58), idles(1, 57, IN_ANOTHER), idles(2, 57)],
            f"rank 2 did not join {CALL}, where rank 0 waited",
        ),
        (  # rank 1 waits in a group for rank 2, which is the cause
            [
                waits(0, 58),
                idles(1, 57, IN_ANOTHER),
                outcome(2, collectives=(Collective("7", 2, 3),)),
            ],
            "rank 2 did not join call 4 of NCCL's group 7, all_gather, where rank 1 waited",
        ),
        (
            [waits(0, 58), waits(1, 58, "broadcast Float [[3]]"), waits(2, 58)],
            "the ranks made different calls as 58 of NCCL's group 0 (default_pg): "
            "ranks 0, 2: all_reduce Float [[3]]; rank 1: broadcast Float [[3]]",
        ),
        (
            [waits(0, 58), waits(1, 58, "all_reduce Float [[4]]")],
            "the ranks made different calls as 58 of NCCL's group 0 (default_pg): "
            "rank 0: all_reduce Float [[3]]; rank 1: all_reduce Float [[4]]",
        ),
        (
            [waits(0, 58), waits(1, 58), waits(2, 58), outcome(3)],
            f"ranks 0-2 waited in {CALL}; the dumps of 1 of its ranks were not read",
        ),
        (  # a task with several ranks, or a lost node
            [waits(0, 58), waits(1, 58)],
            f"ranks 0-1 waited in {CALL}; the dumps of 2 of its ranks were not read",
        ),
        (
            [waits(rank, 58) for rank in range(4)],
            f"all known ranks joined {CALL}, but it did not complete: a GPU or the network",
        ),
        (
            [waits(rank, 58, f"all_to_all Float [[{rank}]]") for rank in range(4)],
            f"all known ranks joined {CALL}, but it did not complete: a GPU or the network".replace(
                "all_reduce Float [[3]]", "all_to_all Float [[0]]"
            ),
        ),
        ([idles(0, 58), idles(1, 58)], ""),
        ([outcome(0), outcome(1)], ""),
    ],
)  # fmt: skip
def test_the_rank_that_the_others_waited_for_is_found(outcomes: list[Outcome], said: str) -> None:
    assert find_absent(outcomes) == said


def _dumps(rank: int, _: int, folder: Path) -> tuple[Collective, ...]:
    import torch
    import torch.distributed as dist

    for _number in range(3):
        dist.all_reduce(torch.ones(2))
    pending = None if rank else dist.all_reduce(torch.ones(2), async_op=True)
    path = folder / str(rank)

    def is_settled() -> bool:  # a thread of torch marks the third call as ended
        path.write_bytes(torch._C._distributed_c10d._dump_fr_trace())
        return [each.open for each in read_dump(path)] == [0 if rank else 4]

    wait_for(is_settled, "the end of the third call")
    dist.barrier(group=dist.new_group())  # not before both have dumped
    if pending:
        pending.wait()
    else:
        dist.all_reduce(torch.ones(2))
    return read_dump(path)


def test_torchs_own_dump_shows_which_rank_did_not_come(tmp_path: Path) -> None:
    import torch

    if not hasattr(torch._C._distributed_c10d, "_dump_fr_trace"):
        pytest.skip("this torch records no gloo calls")
    known = run_ranks(2, _dumps, tmp_path)
    said = find_absent([outcome(rank, collectives=own) for rank, own in enumerate(known)])
    assert said.startswith(
        "rank 1 did not join call 4 of NCCL's group 0 (default_pg), all_reduce Float [[2]] in "
        "_dumps (test_flight_recorder.py:"
    )
    assert said.endswith("), where rank 0 waited")


def test_the_dump_goes_into_the_attempt_unless_the_user_names_a_file() -> None:
    attempt = Attempt(RunDir(Path("/jobs/a")), 3)
    prefix = "/jobs/a/attempts/0003/nccl-trace-"
    assert variables(attempt, {}) == {
        "TORCH_FR_DUMP_TEMP_FILE": prefix,
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": prefix,
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
    own = {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/tmp/own-"}
    assert variables(attempt, own) == {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    assert (
        variables(attempt, {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"})["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"
    )
