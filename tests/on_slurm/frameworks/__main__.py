"""Stops and resumes a training script on a real Slurm, and compares its weights.

    python -m tests.on_slurm.frameworks PATH/train.py --weights 'out/*.safetensors' -- --epochs 2

The script has the lines that make it resumable. It trains twice on two hosts of two ranks, each
time in a copy of its directory: once undisturbed, once stopped at a step and resumed.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from clusterddp.run.run_dir import RunDir
from tests.event_lines import read_events
from tests.on_slurm.cluster import SlurmCluster
from tests.on_slurm.test_submit import CLUSTERDDP, submit
from tests.waiting import wait_for

HOOKS = Path(__file__).parents[1] / "campaign/hooks"


def train(
    cluster: SlurmCluster, folder: Path, command: Sequence[str], at: int, limit: float
) -> int | None:
    """Train in a directory on two hosts of two ranks; return the step of the stop.

    at: the step at which all ranks are told to stop, after which the run is resumed; 0: none.
    limit: seconds for each job. Raises AssertionError if an attempt ends in another way.
    """
    holds = folder.with_name(f"{folder.name}-holds")  # not among the code
    holds.mkdir()
    if at:
        (holds / f"want-step-{at}").write_text("until told")
    paths = os.pathsep.join(filter(None, [str(HOOKS), os.environ.get("PYTHONPATH")]))
    done = submit(
        cluster, folder, "--nodes", "2", "--tasks-per-node", "2", "--run-name", "own",
        "--partition", "main", "--no-snapshot", "--json", "--env", f"PYTHONPATH={paths}",
        "--env", f"CAMPAIGN_HOLDS={holds}", "--env", "OMP_NUM_THREADS=1", "--env", "CHECK=1",
        "--", sys.executable, *command,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run, step = RunDir(folder / "jobs/own"), None
    if at:
        held = f"held-step-{at}.*"
        wait_for(lambda: len(list(holds.glob(held))) == 4, "four ranks at the step", limit)
        cluster.run([*CLUSTERDDP, "stop", "own"], cwd=folder, timeout=limit, check=True)
        cluster.wait_job(json.loads(done.stdout)["job_id"], limit)
        log = run.job_log.read_text() + run.rank_log(0).read_text()
        [end] = [event for event in read_events(run) if event["event"] == "ended"]
        assert (end["cause"], end["exit_code"]) == ("stopped", 75), log
        step = end["step"]
        done = cluster.run([*CLUSTERDDP, "resume", "own", "--json"], cwd=folder, timeout=limit)
        assert done.returncode == 0, done.stderr
    state = cluster.wait_job(json.loads(done.stdout)["job_id"], limit)
    assert state == "COMPLETED", run.job_log.read_text() + run.rank_log(0).read_text()
    return step


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors in a file of torch or safetensors, by their place in it."""
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return dict(load_file(path))
    return dict(_walk(torch.load(path, map_location="cpu", weights_only=False), ""))


def _walk(value: Any, place: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield place, value
    elif isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for name, each in items:
            yield from _walk(each, f"{place}/{name}")


def differences(one: Path, other: Path, pattern: str) -> list[str]:
    """Return what differs between the newest files of two directories that match a pattern."""
    found = []
    for folder in (one, other):
        files = sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime)
        if not files:
            return [f"no file in {folder} matches {pattern}"]
        found.append(tensors(files[-1]))
    names = sorted(found[0].keys() | found[1].keys())
    if not names:
        return [f"the files that match {pattern} have no tensors"]
    return [
        name
        for name in names
        if any(name not in each for each in found)
        or found[0][name].dtype != found[1][name].dtype
        or not torch.equal(*(each[name] for each in found))
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.on_slurm.frameworks", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("script", type=Path, help="its directory is copied")
    parser.add_argument("--weights", required=True, metavar="GLOB", help="the newest is compared")
    parser.add_argument("--at-step", type=int, default=8, metavar="N", help="default: %(default)s")
    parser.add_argument("--limit", type=float, default=600, help="seconds a job; default: 600")
    parser.add_argument("--keep", action="store_true", help="keep both directories")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser.epilog = "After --: the script's arguments."
    given = parser.parse_args(sys.argv[1:end])
    root = Path(tempfile.mkdtemp(prefix="frameworks-"))
    command = [given.script.name, *sys.argv[end + 1 :]]
    try:
        with SlurmCluster(hosts=2) as cluster:
            for name, at in (("whole", 0), ("stopped", given.at_step)):
                shutil.copytree(given.script.parent, root / name)
                step = train(cluster, root / name, command, at, given.limit)
                print(f"{name}: done", f"after a stop at step {step}" if at else "", flush=True)
        different = differences(root / "whole", root / "stopped", given.weights)
        print("\n".join(different) or "the weights are equal")
        return 1 if different else 0
    finally:
        if given.keep:
            print(f"kept: {root}")
        else:
            shutil.rmtree(root)


if __name__ == "__main__":
    sys.exit(main())
