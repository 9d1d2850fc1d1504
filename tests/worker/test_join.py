"""What two ranks open when they start, counted by a hook of Python's own in each of them."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clusterddp.data import mnist
from tests.waiting import dying_with_us

# Notes what this process opens below the two folders, where it listens, and what it imports of
# torch; by a descriptor that was open before the hook was.
HOOK = """
import json, os, sys
_folders = tuple(os.environ["WATCHED"].split(":"))
_log = os.open(os.environ["NOTES"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
def _hook(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, bytes)):
        path = os.fsdecode(arguments[0])
        if path.startswith(_folders):
            writes = bool((arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR))
            _note([event, path, writes])
    elif event == "socket.bind":
        _note([event, str(arguments[1]), False])
    elif event == "import" and arguments[0] in ("torch", "torchvision"):
        _note([event, arguments[0], False])
def _note(what):
    os.write(_log, (json.dumps([os.environ.get("RANK", ""), *what]) + chr(10)).encode())
sys.addaudithook(_hook)
"""


class Ranks:
    """Starts of one run by two ranks on this host."""

    def __init__(self, folder: Path, data: Path) -> None:
        self.folder, self.data, self.run = folder, data, folder / "run"
        (folder / "hook").mkdir()
        (folder / "hook" / "sitecustomize.py").write_text(HOOK)
        self.starts = 0

    def train(self, *options: str) -> list[list[Any]]:
        """What they noted: rank, event, path or name, whether to write; in order."""
        self.starts += 1
        notes = self.folder / f"notes-{self.starts}"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environ = {
            **os.environ, "WATCHED": f"{self.data}:{self.run}", "NOTES": str(notes),
            "PYTHONPATH": f"{self.folder / 'hook'}:{Path(__file__).parents[2]}",
            "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }  # fmt: skip
        started = [
            subprocess.Popen(
                [
                    sys.executable, "-m", "clusterddp", "train", f"--run-dir={self.run}",
                    "--dataset=synthetic", f"--data-dir={self.data}", "--threads=1",
                    "--device=cpu", *options,
                ],
                env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                preexec_fn=dying_with_us(),  # noqa: PLW1509 -- no threads here
            )
            for rank in (0, 1)
        ]  # fmt: skip
        for rank in started:
            said, _ = rank.communicate(timeout=200)
            assert rank.returncode == 0, said
        return [json.loads(line) for line in notes.read_text().splitlines()]


@pytest.fixture
def ranks(tmp_path: Path, synthetic_dir: Path) -> Ranks:
    return Ranks(tmp_path, synthetic_dir)


@pytest.mark.slow
def test_one_rank_of_a_node_reads_and_each_writes_what_is_its_own(ranks: Ranks) -> None:
    first = ranks.train("--max-steps=2")
    again = ranks.train("--max-steps=4")
    assert json.loads((ranks.run / "report.json").read_text())["steps"] == 4
    for notes in (first, again):
        opened = {
            rank: [Path(path) for who, event, path, _ in notes if (who, event) == (rank, "open")]
            for rank in ("0", "1")
        }
        by_first = [path.name for path in opened["0"]]
        assert all(by_first.count(name) >= 1 for name in mnist.FILES)
        ours = [path for path in opened["1"] if not path.is_relative_to(ranks.run)]
        assert not ours, "rank 1 maps what rank 0 has read"
        assert not [path for path in opened["1"] if ".pt" in path.name], "rank 0 reads checkpoints"
        written = {
            path
            for who, event, path, writes in notes
            if (who, event, writes) == ("1", "open", True)
        }
        assert written and all("rank-1.json" in path for path in written), written
    resumed = [path for who, _, path, writes in again if path.endswith(".pt") and not writes]
    assert resumed, "the second start went on from a checkpoint"


def test_rank_0_listens_before_it_imports_torch_and_nobody_needs_torchvision(ranks: Ranks) -> None:
    notes = ranks.train("--max-steps=1")
    events = [event for who, event, _, _ in notes if who == "0" and event != "open"]
    assert events.index("socket.bind") < events.index("import")
    assert {name for _, event, name, _ in notes if event == "import"} == {"torch"}
