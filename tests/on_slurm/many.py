"""A job of 32 hosts with 8 ranks each on a real Slurm: `python -m tests.on_slurm.many`.

The ranks only meet, without torch, as 256 imports of it do not fit into one machine. Each act is a
user's: submit, look at the stacks, ask the ranks to stop, lose a host. It prints what it saw, and
ends with 1 where that is not what it expected.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from clusterddp.run.attempt import latest
from clusterddp.run.outcome import read_outcomes
from clusterddp.run.run_dir import RunDir
from tests.event_lines import read_events
from tests.on_slurm.cluster import SlurmCluster
from tests.on_slurm.test_submit import CLUSTERDDP
from tests.waiting import wait_for

RANKS_PER_HOST = 8
_LONG = 900
PROGRAM = """
import os, pathlib, signal, socket, sys, time

def end(*_):
    sys.exit(75)

signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGUSR1, end)
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if rank:
    deadline = time.monotonic() + 600
    while True:
        try:
            peer = socket.create_connection(place, timeout=600)
            break
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.2)
    peer.sendall(b"%8d" % rank)
    assert peer.recv(1), "rank 0 is gone"
else:
    with socket.create_server(("", place[1]), backlog=1024) as listener:
        peers = [listener.accept()[0] for _ in range(size - 1)]
        assert sorted(int(peer.recv(8)) for peer in peers) == list(range(1, size))
    for peer in peers:
        peer.sendall(b"!")
    pathlib.Path(f"met-{time.time_ns()}").touch()

def waits():
    while True:
        time.sleep(1)

waits()
"""


class Trial:
    """The cluster, a folder, and what was seen."""

    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        self._cluster, self._folder = cluster, folder
        self.size = len(cluster.hosts) * RANKS_PER_HOST
        self.differs, self._meetings = False, 0

    def clusterddp(self, *argv: str) -> str:
        done = self._cluster.run([*CLUSTERDDP, *argv], cwd=self._folder, timeout=_LONG)
        return done.stdout + done.stderr

    def start(self, name: str, *options: str, nodes: int) -> RunDir:
        """Submit, and wait until the ranks have met."""
        began = time.monotonic()
        self.clusterddp(
            "submit", "--run-name", name, "--nodes", str(nodes), *options,
            "--tasks-per-node", str(RANKS_PER_HOST), "--no-snapshot",
            "--", sys.executable, "meet.py",
        )  # fmt: skip
        run = RunDir(self._folder / "jobs" / name)
        self.met(run)
        self.tell(f"{name}: all have met {time.monotonic() - began:.0f} s after the submission")
        return run

    def met(self, run: RunDir) -> None:
        """Wait until the ranks have met once more."""
        self._meetings += 1
        wait_for(
            lambda: len([*self._folder.glob("met-*")]) == self._meetings,
            f"the ranks of {run.name}", _LONG,
        )  # fmt: skip

    def tell(self, line: str, *, expected: bool = True) -> None:
        """Print what was seen."""
        self.differs |= not expected
        print(line if expected else f"NOT AS EXPECTED: {line}", flush=True)

    def files(self, run: RunDir) -> list[str]:
        attempt = latest(run)
        assert attempt
        return sorted(path.name for path in attempt.outcomes.glob("*-*.json"))

    def status(self, run: RunDir) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.clusterddp("status", run.name, "--json"))
        return answer


def look_and_stop(trial: Trial) -> None:
    """Look at the stacks of all ranks, ask them to stop, and look at what is left."""
    nodes = trial.size // RANKS_PER_HOST
    run = trial.start("stopped", nodes=nodes)
    wait_for(lambda: len(read_outcomes(latest(run).outcomes)) == trial.size, "records")  # type: ignore[union-attr]
    files = trial.files(run)
    trial.tell(f"record files: {len(files)}", expected=len(files) == nodes)
    began = time.monotonic()
    said = trial.clusterddp("stacks", run.name)
    seconds = time.monotonic() - began
    trial.tell(
        f"stacks of all ranks in {seconds:.0f} s:\n{said[:600]}",
        expected=f"all {trial.size} (ranks 0-{trial.size - 1})" in said,
    )
    began = time.monotonic()
    trial.status(run)
    trial.tell(f"status in {time.monotonic() - began:.1f} s")
    began = time.monotonic()
    trial.clusterddp("stop", run.name)
    wait_for(lambda: read_events(run)[-1]["event"] == "ended", "the end", _LONG)
    outcomes = read_outcomes(latest(run).outcomes)  # type: ignore[union-attr]
    codes = {each.exit_code for each in outcomes}
    trial.tell(
        f"ended {time.monotonic() - began:.0f} s after the request, {len(outcomes)} ranks with "
        f"codes {codes}, in {len(trial.files(run))} files: {read_events(run)[-1]}",
        expected=codes == {75} and len(outcomes) == trial.size,
    )


def lose_a_host(trial: Trial, cluster: SlurmCluster) -> None:
    """Lose a host of a job with a spare one: it starts again without it."""
    run = trial.start("lost", "--spare-nodes", "1", "--retries", "1",
                      nodes=trial.size // RANKS_PER_HOST - 1)  # fmt: skip
    began = time.monotonic()
    lost = read_outcomes(latest(run).outcomes)[-1].host  # type: ignore[union-attr]
    cluster.kill_host(lost)
    trial.met(run)
    trial.tell(f"{lost} lost; all have met again {time.monotonic() - began:.0f} s later")
    trial.clusterddp("stop", run.name)
    wait_for(lambda: read_events(run)[-1]["event"] == "ended", "the end", _LONG)
    causes = [each.get("cause") for each in read_events(run) if each["event"] == "ended"]
    trial.tell(f"causes of the ends: {causes}", expected=len(causes) == 2)


def main() -> None:
    """Run both acts."""
    parser = argparse.ArgumentParser(prog="python -m tests.on_slurm.many")
    parser.add_argument("--hosts", type=int, default=32, help="default: %(default)s")
    hosts = parser.parse_args().hosts
    with SlurmCluster(hosts) as cluster, tempfile.TemporaryDirectory() as name:
        Path(name, "meet.py").write_text(PROGRAM)
        trial = Trial(cluster, Path(name))
        look_and_stop(trial)
        lose_a_host(trial, cluster)
    sys.exit(trial.differs)


if __name__ == "__main__":
    main()
