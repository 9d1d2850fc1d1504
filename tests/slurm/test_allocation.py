"""What Slurm has given a job, from its own words, and requests beyond it."""

import pytest

from clusterddp.errors import OptionError
from clusterddp.slurm import allocation
from clusterddp.slurm.allocation import Share
from clusterddp.slurm.forms import in_salloc_shell

# From 22.05.8, shortened.
RECORD = (
    "JobId=1 JobName=interactive TRES=cpu=12,node=2,billing=12 JOB_GRES=gpu:4   Nodes=h01 "
    "CPU_IDs=10-15 Mem=2000 GRES=gpu:2(IDX:0-1)   Nodes=h[02-03] CPU_IDs=0,4-5 Mem=0 GRES= "
    "MinCPUsNode=6 Command=(null)"
)
ASKED = {"nodes": 2, "gpus": 2, "cpus": 6, "mem": "", "time": ""}
SHARES = {"h01": Share(6, 2000, 2), "h02": Share(6, 2000, 2)}


def test_each_node_has_its_share() -> None:
    assert allocation.parse(RECORD) == {
        "h01": Share(6, 2000, 2),
        "h02": Share(3, 0, 0),
        "h03": Share(3, 0, 0),
    }


def test_a_queued_job_has_no_nodes() -> None:
    assert allocation.parse("JobId=1 JobState=PENDING NodeList= Command=(null)") == {}


@pytest.mark.parametrize(
    ("beyond", "option"),
    [
        ({"nodes": 3}, "--nodes"),
        ({"gpus": 3}, "--gpus-per-node"),
        ({"cpus": 7}, "--cpus-per-task"),
        ({"mem": "2G"}, "--mem"),
        ({"mem": "64g"}, "--mem"),
        ({"time": "11"}, "--time"),
    ],
)
def test_a_request_beyond_the_allocation_is_refused(beyond: dict[str, object], option: str) -> None:
    with pytest.raises(OptionError, match="job 1 has") as refused:
        allocation.usable(SHARES, 600.0, {**ASKED, **beyond}, "job 1")
    assert refused.value.option == option


@pytest.mark.parametrize(("mem", "time", "left"), [("2000", "10", 600.0), ("1G", "60", None)])
def test_a_request_within_the_allocation_is_accepted(
    mem: str, time: str, left: float | None
) -> None:
    assert allocation.usable(SHARES, left, {**ASKED, "mem": mem, "time": time}, "job 1")


UNEQUAL = {"h01": Share(6, 0, 0), "h02": Share(6, 0, 2), "h03": Share(2, 0, 4)}
ONE = {"nodes": 1, "gpus": 0, "cpus": 1, "mem": "", "time": ""}


@pytest.mark.parametrize(
    ("asked", "named", "unwanted", "nodes"),
    [
        ({}, [], {}, ["h01", "h02", "h03"]),
        ({}, ["h03"], {}, ["h03", "h01", "h02"]),
        ({"gpus": 2}, [], {}, ["h02", "h03"]),
        ({"gpus": 2}, ["h03"], {"h01": "--exclude"}, ["h03", "h02"]),
        ({"gpus": 2, "cpus": 6}, [], {}, ["h02"]),
        ({}, [], {"h01": "--exclude", "h02": "bad: slow", "h99": "bad: slow"}, ["h03"]),
        ({"gpus": 3}, [], {}, ["h03"]),
    ],
)
def test_only_nodes_that_can_serve_a_request_are_usable(
    asked: dict[str, object], named: list[str], unwanted: dict[str, str], nodes: list[str]
) -> None:
    given = allocation.usable(
        UNEQUAL, None, {**ONE, **asked}, "job 1", named=named, unwanted=unwanted
    )
    assert given == nodes


@pytest.mark.parametrize(
    ("asked", "named", "unwanted", "words"),
    [
        ({}, ["h02", "h04"], {}, "--nodelist: h04 requested, but job 1 has h01, h02, h03"),
        ({"gpus": 2}, ["h01"], {}, "--gpus-per-node: 2 requested, but job 1 has 0"),
        ({"gpus": 3, "nodes": 2}, [], {}, "--gpus-per-node: 3 requested, but job 1 has 2"),
        ({"gpus": 3, "cpus": 6}, [], {}, "--nodes: 1 requested, but job 1 has 0"),
        (
            {"nodes": 2},
            [],
            {"h01": "--exclude", "h03": "bad: slow"},
            r"--nodes: 2 requested, but job 1 has 1 without h01 \(--exclude\), h03 \(bad: slow\)",
        ),
    ],
)
def test_a_request_that_too_few_nodes_can_serve_is_refused(
    asked: dict[str, object], named: list[str], unwanted: dict[str, str], words: str
) -> None:
    with pytest.raises(OptionError, match=words):
        allocation.usable(UNEQUAL, None, {**ONE, **asked}, "job 1", named=named, unwanted=unwanted)


@pytest.mark.parametrize(
    ("environ", "is_shell"),
    [
        ({}, False),
        ({"SLURM_JOB_ID": "1"}, True),
        ({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0"}, False),  # a batch script
        ({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}, False),
        ({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290"}, True),
        ({"SLURM_JOB_ID": "1", "CLUSTERDDP_BATCH": "1"}, False),
    ],
)
def test_only_a_shell_of_salloc_holds_an_allocation(
    environ: dict[str, str], is_shell: bool
) -> None:
    assert in_salloc_shell(environ) is is_shell
