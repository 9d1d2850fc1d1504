"""A submission asks Slurm beside its other checks: once, for a second at most."""

import threading
from pathlib import Path

import pytest

from clusterddp import api, polling
from clusterddp.errors import RequestError
from clusterddp.run import events
from clusterddp.run.run_dir import RunDir
from clusterddp.slurm import site as slurm_site
from tests.cli.made_runs import Workplace, workplace

__all__ = ["workplace"]
SINFO = """echo 'main*|1-00:00:00|16|2|gpu:4'
echo 'fast|1:00:00|64|1|gpu:a100:8(S:0-1)'
echo 'slow|infinite|8|90|(null)'"""
ASKED = "sinfo -h -a -e -o %P|%l|%c|%D|%G"


@pytest.fixture
def site(workplace: Workplace) -> Workplace:
    """A Slurm that answers; however busy this machine is, its answer is waited for."""
    workplace.monkeypatch.setattr(polling, "SINFO_SECONDS", 60.0)
    workplace.command("sbatch", "/bin/cat >sent; echo 12")
    workplace.command("sinfo", SINFO)
    return workplace


def submit(site: Workplace, *argv: str) -> tuple[int, str]:
    got = site.invoke("submit", "--no-snapshot", *argv, "--", "/bin/true")
    return got.code, got.err


def test_an_unknown_partition_is_refused_with_those_that_there_are(site: Workplace) -> None:
    for asked in ("mian", "main,mian"):
        code, said = submit(site, "--run-name", "one", "--partition", asked)
        assert code == 2
        assert "--partition mian: no such partition. This cluster has main, fast, slow." in said
        assert site.calls == [ASKED] and not (site.root / "one").exists()
        (site.folder / "calls").unlink()


def test_a_directive_that_sbatch_does_not_have_is_a_warning_for_a_plugin_may_add_it(
    site: Workplace,
) -> None:
    got = ["--sbatch", "foo=3", "--sbatch", "gpu-per-node=2", "--sbatch", "thread-spec=2"]
    code, said = submit(site, "--dry-run", *got)
    assert code == 0
    assert (
        "--sbatch foo: sbatch has no option --foo and rejects the job unless a plugin of the site "
        "adds it. See sbatch(1) for the options. [CD0107]" in said
    )
    assert "has no option --gpu-per-node" in said and "Did you mean --gpus-per-node?" in said
    assert "thread-spec" not in said
    assert "foo" not in submit(site, "--dry-run", "--launcher", "local", *got[:2])[1]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--gpus-per-node 5", "--gpus-per-node 5: no node of partition main has more than 4 GPUs"),
        (
            "-p main,fast --gpus-per-node 9",
            "no node of partition main or fast has more than 8 GPUs",
        ),
        ("-p fast --gpus-per-node h100:1", "partition fast has more than 0 GPUs of type h100"),
        ("-p slow --gpus-per-node 1", "no node of partition slow has more than 0 GPUs"),
        (
            "-c 9 --tasks-per-node 2",
            "--cpus-per-task 9 for 2 tasks per node needs 18 CPUs: no node",
        ),
        ("-N 3", "--nodes 3: partition main has only 2"),
        ("-t 1-01", "--time 1-01: the limit of partition main is 1-00:00:00"),
        ("-p main,fast -t UNLIMITED", "the limit of partition main or fast is 1-00:00:00"),
    ],
)
def test_what_no_partition_has_is_refused_unless_a_person_insists(
    site: Workplace, argv: str, words: str
) -> None:
    code, said = submit(site, *argv.split())
    assert code == 2 and words in said and "add --force. [CD0407]" in said
    assert site.calls == [ASKED]
    code, said = submit(site, *argv.split(), "--force")
    assert code == 0
    warnings = [line for line in said.splitlines() if "[CD0407]" in line]
    assert len(warnings) == 1 and words in warnings[0], said


def test_python_is_told_of_what_no_partition_has_and_can_insist(site: Workplace) -> None:
    with pytest.raises(RequestError, match=r"nodes 3: .*; time 1-01: .* add force"):
        api.submit(["/bin/true"], nodes=3, time="1-01", snapshot=False)
    assert site.calls == [ASKED]
    run = api.submit(["/bin/true"], nodes=3, time="1-01", snapshot=False, force=True)
    assert run.job_id == "12"


def test_resuming_on_no_fitting_partition_is_refused_unless_a_person_insists(
    site: Workplace,
) -> None:
    assert submit(site, "--run-name", "one", "-N", "2")[0] == 0
    site.command("squeue", "exit 0")
    events.add(
        RunDir(site.root / "one").events, events.Ended(job_id="12", exit_code=1, cause="failed")
    )
    got = site.invoke("resume", "one", "-N", "3", "--refresh-code")
    assert got.code == 2 and "--nodes 3: partition main has only 2" in got.err, got.err
    assert site.invoke("resume", "one", "-N", "3", "--refresh-code", "--force").code == 0


@pytest.mark.parametrize(
    "argv",
    [
        "--gpus-per-node 4 -c 4 -N 2 -t 1-00 -p main", "-p main,fast --gpus-per-node a100:8",
        "-p main,slow -t 30-0 -N 90", "-c 32 --sbatch overcommit", "-t 20:00:00",
        "-t 2-0 --sbatch time-min=12:00:00",
    ],
)  # fmt: skip
def test_what_some_node_has_is_none(site: Workplace, argv: str) -> None:
    code, said = submit(site, *argv.split())
    assert code == 0 and "sinfo" not in said


def test_slurm_is_asked_once_and_never_for_a_dry_run_or_a_rehearsal(site: Workplace) -> None:
    assert submit(site, "--dry-run", "-p", "mian")[0] == 0
    assert "partition" not in submit(site, "--launcher", "local", "-p", "mian")[1]
    assert submit(site, "--sbatch", "clusters=other", "-p", "mian")[0] == 0
    assert [call.split()[0] for call in site.calls] == ["sbatch"]
    assert submit(site, "--omit-directive", "partition", "-p", "mian")[0] == 0
    before = len(site.calls)
    assert submit(site, "-p", "fast")[0] == 0
    assert [call.split()[0] for call in site.calls[before:]] == ["sinfo", "sbatch"]


@pytest.mark.parametrize(
    "answer", ["exit 1", "echo some remark", "echo 'main|1|1|1|(null)'; exit 1"]
)
def test_a_slurm_that_cannot_say_refuses_nothing(site: Workplace, answer: str) -> None:
    site.command("sinfo", answer)
    assert submit(site, "-p", "mian")[0] == 0
    (site.folder / "bin/sinfo").unlink()
    assert submit(site, "-p", "mian")[0] == 0


def test_a_slurm_that_is_silent_is_left(
    site: Workplace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    may_answer = threading.Event()
    ask = slurm_site.ask

    def silent(*arguments: object) -> object:
        may_answer.wait(60)
        return ask(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(slurm_site, "ask", silent)
    monkeypatch.setattr(polling, "SINFO_SECONDS", 0.1)
    try:
        code, _ = submit(site, "-p", "mian")
        assert code == 0
        assert [call.split()[0] for call in site.calls] == ["sbatch"]
    finally:
        may_answer.set()
