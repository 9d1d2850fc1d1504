"""`clusterddp doctor` on sites whose Slurm answers as some do: no booted one is like them."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clusterddp.doctor.site_checks import ERROR, OK, WARNING
from tests import hostile
from tests.cli.made_runs import Workplace, workplace
from tests.waiting import PATIENCE, wait_for

__all__ = ["workplace"]

CONFIG = {
    "AccountingStorageEnforce": "associations,limits",
    "ClusterName": "far",
    "JobRequeue": "1",
    "KillWait": "30 sec",
    "PreemptMode": "OFF",
    "PreemptType": "preempt/none",
    "RequeueExit": "(null)",
    "RequeueExitHold": "(null)",
    "SLURM_VERSION": "24.11.5",
    "SlurmdTimeout": "300 sec",
}
SINFO = ("cpu*|1-00:00:00|64|9|(null)", "gpu|2-00:00:00|32|4|gpu:a100:4(S:0-1)")
RECORDS = (
    "PartitionName=cpu DefaultTime=01:00:00 MaxNodes=UNLIMITED PriorityTier=1 PreemptMode={mode} "
    "GraceTime={grace} State=UP",
    "PartitionName=gpu DefaultTime=NONE MaxNodes=2 DefMemPerCPU=4000 PriorityTier=5 State=UP",
)
PYTHON = """echo '{"python": "3.12.1", "torch": "2.9", "cuda": "13.0", "hip": null, "nccl": ""}'"""


class Site:
    """Stand-ins for Slurm's commands."""

    def __init__(self, workplace: Workplace) -> None:
        self.workplace, self.folder = workplace, workplace.folder
        workplace.command("python", PYTHON)
        workplace.command("sacct", "exit 0")
        workplace.command("sacctmgr", "echo physics; echo chemistry; echo physics")
        workplace.command("sinfo", "\n".join(f"echo '{line}'" for line in SINFO))
        self.sbatch()
        self.scontrol()

    def scontrol(self, mode: str = "OFF", grace: str = "0", **config: str) -> None:
        lines = [f"{key} = {value}" for key, value in {**CONFIG, **config}.items()]
        records = [line.format(mode=mode, grace=grace) for line in RECORDS]
        shown = "\n".join(
            ["case $* in *config*) /bin/cat <<'E'", *lines, "E", ";; *) /bin/cat <<'E'"]
        )
        self.workplace.command("scontrol", "\n".join([shown, *records, "E", "esac"]))

    def sbatch(self, refused: str = "nothing is", words: str = "error: no") -> None:
        """Refuse scripts in which a pattern of grep -E stands, with these words."""
        self.workplace.command(
            "sbatch",
            f"if /bin/grep -qE -e '{refused}'; then echo 'sbatch: {words}' >&2; exit 1; fi\n"
            "echo 'sbatch: Job 7 to start at 2030-01-01T00:00:00 using 1 processors' >&2",
        )

    def remove(self) -> None:
        for name in ("sbatch", "scontrol", "sinfo", "sacct", "sacctmgr"):
            (self.folder / "bin" / name).unlink()

    def diagnosis(self, *argv: str, code: int) -> dict[str, Any]:
        got = self.workplace.invoke("doctor", "--python", "python", "--json", *argv)
        assert got.code == code, got
        record: dict[str, Any] = json.loads(got.out)
        return record

    def check(self, name: str, *argv: str, code: int = 0) -> dict[str, Any]:
        [check] = [c for c in self.diagnosis(*argv, code=code)["checks"] if c["name"] == name]
        return dict(check)


@pytest.fixture
def site(workplace: Workplace) -> Site:
    return Site(workplace)


def test_each_check_is_a_line_and_nothing_is_queued_or_written(site: Site) -> None:
    before = sorted(site.folder.rglob("*"))
    got = site.workplace.invoke("doctor", "--python", "python")
    assert all(len(line) <= 80 or " " not in line[25:] for line in got.out.splitlines())
    whole = re.sub(r"\n +", " ", got.out)
    lines = [line.split(maxsplit=1) for line in whole.splitlines()]
    assert got.code == 0 and {line[0] for line in lines} <= {OK, WARNING}
    names = (
        *("slurm", "submission", "partition cpu", "partition gpu", "GPUs", "accounting"),
        *("requeue", "preemption", "signals", "runs directory", "dataset", "python", "limits"),
    )
    assert len(lines) == len(names)
    assert all(line[1].startswith(name) for line, name in zip(lines, names, strict=True))
    assert all((" To do: " in line[1]) == (line[0] != OK) for line in lines)
    calls = [call for call in site.workplace.calls if call.startswith("sbatch")]
    assert set(calls) == {"sbatch --test-only"}
    assert sorted(site.folder.rglob("*")) == sorted([*before, site.folder / "calls"])


def test_partitions_have_their_limits_and_defaults(site: Site) -> None:
    facts = site.check("partition gpu")["facts"]
    assert facts["gpus"] == 4 and facts["gpu_types"] == {"a100": 4} and facts["accepted"] is True
    assert facts["limit"] == "2-00:00:00"
    assert facts["settings"] == {"MaxNodes": "2", "DefMemPerCPU": "4000"}
    assert site.check("accounting")["facts"]["accounts"] == ["physics", "chemistry"]


@pytest.mark.parametrize(
    ("refused", "words", "result", "found", "setting"),
    [
        ("nothing is", "", OK, "gpu accepts --gpus-per-node=1, --gres=gpu:1", None),
        ("gpus-per-node=", "error: use gres", ERROR, "use gres; it accepts --gres=gpu:1", "gres"),
        ("gpus-per-(node|task)=1$", "error: type", ERROR, "it accepts --gres=gpu:1", "gres"),
        ("(gpu:|gpus-per-(node|task)=)1$", "error: name a type", ERROR,
         "it accepts --gpus-per-node=a100:1", None),
        ("gres|gpus-per", "error: no GPUs for you", ERROR, "it accepts none", None),
        ("gres|gpus-per", "error: Nodes are not available", WARNING, "it accepts none", None),
    ],
)  # fmt: skip
def test_the_form_in_which_gpus_are_asked_for_is_found_out(
    site: Site, refused: str, words: str, result: str, found: str, setting: str | None
) -> None:
    site.sbatch(refused, words)
    diagnosis = site.diagnosis(code=1 if result == ERROR else 0)
    [check] = [check for check in diagnosis["checks"] if check["name"] == "GPUs"]
    assert check["result"] == result and found in check["found"]
    assert (f"\ngpu-directive = {setting}\n" in diagnosis["site_cfg"]) == (setting is not None)


def test_a_type_that_is_asked_for_is_one_that_is_tried(site: Site) -> None:
    site.sbatch("(gpu:|gpus-per-(node|task)=)1$", "error: name a type")
    assert site.check("GPUs", "--gpus-per-node", "a100:4")["result"] == OK


@pytest.mark.parametrize(
    ("name", "config", "result", "words"),
    [
        ("requeue", {}, OK, "a lost node is detected after 300 sec"),
        ("requeue", {"JobRequeue": "0"}, WARNING, "add --requeue for a COMMAND"),
        ("requeue", {"RequeueExit": "1-9,75"}, WARNING, "RequeueExit=1-9,75"),
        ("requeue", {"RequeueExitHold": "75"}, WARNING, "exits with 75"),
        ("requeue", {"RequeueExit": "99"}, OK, "JobRequeue=1"),
        ("requeue", {"SlurmdTimeout": "0 sec"}, WARNING, "never detected"),
        ("signals", {}, OK, "KillWait=30 sec"),
        ("signals", {"KillWait": "2 sec"}, WARNING, "USR1@120"),
        ("preemption", {}, OK, "off"),
        ("preemption", {"PreemptType": "preempt/qos"}, WARNING, "sacctmgr show qos"),
        ("preemption", {"PreemptType": "preempt/partition_prio"}, OK, "nothing preempts cpu"),
    ],
)
def test_settings_of_slurm_conf_are_judged(
    site: Site, name: str, config: dict[str, str], result: str, words: str
) -> None:
    site.scontrol(**config)
    check = site.check(name)
    assert check["result"] == result and words in f"{check['found']} {check['advice']}"


@pytest.mark.parametrize(
    ("mode", "grace", "result", "words"),
    [
        ("REQUEUE", "60", OK, "PreemptMode=REQUEUE, GraceTime=60 s"),
        ("REQUEUE", "0", WARNING, "only 30 sec to save"),
        ("CANCEL", "60", WARNING, "clusterddp resume"),
    ],
)
def test_the_mode_of_the_partition_that_is_used_counts(
    site: Site, mode: str, grace: str, result: str, words: str
) -> None:
    site.scontrol(mode, grace, PreemptType="preempt/partition_prio", PreemptMode="REQUEUE")
    check = site.check("preemption")
    assert check["result"] == result and words in f"{check['found']} {check['advice']}"
    assert site.check("preemption", "--partition", "gpu")["result"] == OK


def test_a_refused_account_is_answered_with_the_accounts_that_there_are(site: Site) -> None:
    site.sbatch("account=maths", "error: Invalid account or account/partition combination")
    check = site.check("submission", "--account", "maths", code=1)
    assert check["result"] == ERROR and "yours: physics, chemistry" in check["advice"]


def test_a_partition_of_other_accounts_is_closed_although_slurm_takes_the_job(site: Site) -> None:
    site.scontrol(mode="OFF AllowAccounts=maths,history")
    checks = {check["name"]: check for check in site.diagnosis(code=1)["checks"]}
    assert checks["submission"]["result"] == ERROR
    assert checks["partition cpu"]["result"] == WARNING
    assert "AllowAccounts=maths,history" in checks["partition cpu"]["found"]
    assert checks["partition gpu"]["result"] == OK
    assert site.check("submission", "--account", "maths")["result"] == OK


def test_a_slurm_that_does_not_answer_leaves_the_other_checks(site: Site) -> None:
    words = "slurm_load_ctl_conf error: Unable to contact slurm controller"
    site.workplace.command("scontrol", f"echo '{words}' >&2; exit 1")
    results = {check["name"]: check["result"] for check in site.diagnosis(code=1)["checks"]}
    assert results["slurm"] == ERROR and results["python"] == OK
    assert "submission" not in results


def test_without_slurm_it_says_so_and_checks_the_rest(site: Site) -> None:
    site.remove()
    check = site.check("slurm")
    assert check["result"] == WARNING and "no Slurm here" in check["found"]


def test_a_public_cluster_is_named_with_its_settings_until_there_are_some(site: Site) -> None:
    words = "its settings: clusterddp site use frontier"
    assert words not in site.workplace.invoke("doctor", "--python", "python").err
    site.scontrol(ClusterName="Frontier")
    assert words in site.workplace.invoke("doctor", "--python", "python").err
    (site.folder / "site.cfg").write_text("[defaults]\n")
    assert words not in site.workplace.invoke("doctor", "--python", "python").err


def test_a_torch_without_cuda_is_a_warning_where_there_are_gpus(site: Site) -> None:
    site.workplace.command("python", PYTHON.replace('"13.0"', "null"))
    assert site.check("python")["result"] == WARNING
    site.workplace.command("sinfo", f"echo '{SINFO[0]}'")
    assert site.check("python")["result"] == OK


def write(site: Site, *argv: str) -> Any:
    return site.workplace.invoke("doctor", "--python", "python", "--write", "new.cfg", *argv)


def test_the_proposed_site_cfg_is_one_that_site_and_a_submission_take(site: Site) -> None:
    site.sbatch("gpus-per-node=", "error: use gres")
    assert write(site, "--account", "physics", "--data-dir", "it's $HOME").code == 1
    shown = site.workplace.invoke("site", "--site", "new.cfg", "--json")
    settings = json.loads(shown.out)["settings"]
    assert shown.code == 0
    expected = {
        "account": "physics",
        "partition": "gpu",
        "gpu-directive": "gres",
        "data-dir": str(site.folder / "it's $HOME"),
        "python": "python",
    }
    source = "new.cfg [defaults]"
    assert {n: row["value"] for n, row in settings.items() if row["source"] == source} == expected
    argv = ["--gpus-per-node", "2", "--dry-run", "--json", "--run-name", "a"]
    script = json.loads(site.workplace.invoke("submit", "--site", "new.cfg", *argv).out)["script"]
    assert "#SBATCH --gres=gpu:2\n" in script and "#SBATCH --partition=gpu\n" in script
    hints = (site.folder / "new.cfg").read_text()
    (site.folder / "new.cfg").write_text(hints.replace("# time =", "time ="))
    assert site.workplace.invoke("site", "--site", "new.cfg").code == 0


def test_a_site_cfg_that_hides_the_one_in_force_names_what_it_lacks(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = site.folder / ".config/clusterddp/site.cfg"
    own.parent.mkdir(parents=True)
    own.write_text("[defaults]\npartition = gpu\nmem = 4G\n[environment]\nA = 1\n[cluster:b]\n")
    command = ["doctor", "--python", "python", "--write"]
    monkeypatch.setenv("XDG_CONFIG_HOME", str(site.folder / ".config"))
    aside = site.workplace.invoke(*command, "other.cfg")
    assert "other.cfg" in aside.err and "precedence" not in aside.err
    got = site.workplace.invoke(*command, "site.cfg")
    [line] = [line for line in got.err.splitlines() if "precedence" in line]
    assert f"site.cfg now takes precedence over {own}, and" in line
    assert "lacks 3 of its settings: mem, A, [cluster:b]." in line and line.endswith(" [CD0207]")


def test_a_variable_that_names_no_file_costs_no_diagnosis(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLUSTERDDP_SITE", "gone.cfg")
    (site.folder / "a.cfg").write_text("[defaults]\npartition = gpu\n")
    got = write(site, "--site", "a.cfg")
    assert "wrote new.cfg" in got.err and "precedence" not in got.err
    assert "partition = gpu" in (site.folder / "new.cfg").read_text()


def test_what_is_wrong_is_not_proposed(site: Site) -> None:
    site.sbatch("partition=gone", "error: invalid partition specified: gone")
    site.workplace.command("python", "exit 1")
    assert write(site, "--partition", "gone").code == 1
    text = (site.folder / "new.cfg").read_text()
    assert "\npartition =" not in text and "\npython =" not in text


def test_a_machine_without_slurm_conf_is_sent_to_a_login_node(site: Site) -> None:
    words = "scontrol: fatal: Could not establish a configuration source"
    site.workplace.command("scontrol", f"echo '{words}' >&2; exit 1")
    got = site.workplace.invoke("doctor", "--python", "python").out
    assert " (slurm.conf). To do: run it on a login node; " in re.sub(r"\n +", " ", got)


def test_a_file_that_is_there_is_never_overwritten(site: Site) -> None:
    (site.folder / "new.cfg").write_text("mine")
    got = write(site)
    assert got.code == 2 and "already exists" in got.err
    assert site.workplace.calls == [] and (site.folder / "new.cfg").read_text() == "mine"
    for place in ("gone/new.cfg", ""):
        assert site.workplace.invoke("doctor", "--write", place).code == 2
    assert site.workplace.calls == []


@pytest.mark.parametrize("value", [*hostile.CARRIED, *hostile.REFUSED])
def test_a_hostile_folder_is_carried_or_refused(site: Site, value: str) -> None:
    site.remove()
    got = write(site, "--data-dir", value)
    if got.code == 2:
        assert not (site.folder / "new.cfg").exists()
        assert "site.cfg cannot express" not in got.err or got.err.endswith("[CD0201]\n")
        return
    assert value in hostile.CARRIED
    shown = site.workplace.invoke("site", "--site", "new.cfg", "--json")
    assert Path(json.loads(shown.out)["settings"]["data-dir"]["value"]) == site.folder / value
    assert not list(site.folder.rglob("pwned"))


@pytest.mark.parametrize(
    "argv",
    [["--partition", "a b"], ["--gpu-directive", "x"], ["--site", "gone"], ["--nodes", "0"]],
    ids=" ".join,
)
def test_a_wrong_request_is_refused_before_anything_is_asked(site: Site, argv: list[str]) -> None:
    assert site.workplace.invoke("doctor", *argv).code == 2
    assert site.workplace.calls == []


@pytest.mark.parametrize("hangs", ["torch's import", "a wrapper"])
def test_ctrl_c_ends_it_and_what_it_has_started(hangs: str, workplace: Workplace) -> None:
    Site(workplace)
    folder = workplace.folder
    notes = f"echo $$ >>{folder}/pids; "
    workplace.command("sbatch", f"{notes}exec /bin/sleep 600")
    if hangs == "a wrapper":
        workplace.command("python", f"{notes}/bin/sleep 600; true")
    else:
        (folder / "torch.py").write_text("import time; time.sleep(600)\n")
        workplace.command("python", f'{notes}PYTHONPATH={folder} exec {sys.executable} "$@"')
    process = subprocess.Popen(
        [sys.executable, "-m", "clusterddp", "doctor", "--python", "python"], cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    with process:
        wait_for(lambda: len(pids(folder)) >= 2, "both commands")
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(PATIENCE) == 130
        assert process.stderr and process.stderr.read() == "\ninterrupted\n"
    try:
        wait_for(lambda: not at_work(folder), "the end of its children")
    finally:
        for pid in at_work(folder):
            os.kill(pid, signal.SIGKILL)


def pids(folder: Path) -> list[int]:
    path = folder / "pids"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def at_work(folder: Path) -> list[int]:
    """Those that still run in the directory: a number can be another process's by now."""
    return [pid for pid in pids(folder) if runs_in(folder, pid)]


def runs_in(folder: Path, pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cwd").readlink() == folder
    except OSError:
        return False
