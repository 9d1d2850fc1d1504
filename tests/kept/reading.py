"""Reads what is kept: unpacked anywhere, and what the commands say of it, without ages."""

import json
import os
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner
from torch.nn.functional import cross_entropy

from clusterddp.checkpoints import state
from clusterddp.cli.main import cli
from clusterddp.run import events
from clusterddp.run.run_dir import RunDir
from tests.kept.programs.tiny import net, pairs

HERE = Path(__file__).parent
ARCHIVE, EXPECTED = "work.tar.xz", "expected.json"
VERSIONS = sorted(path.parent for path in HERE.glob(f"*/{EXPECTED}"))
"""The directories of the versions whose state is kept."""
STATUS = (
    "state", "nodes", "tasks_per_node", "world_size", "hosts", "attempt", "restarts",
    "dependencies", "job_id", "step", "steps_planned", "percent_done", "epoch", "loss", "accuracy",
    "checkpoint_step", "warnings", "submitted_time", "started_time", "ended_time", "exit_code",
    "code",
)  # fmt: skip
REPORT = (
    "complete", "command", "model", "dataset", "accuracy", "loss", "train_loss", "step", "epoch",
    "train_seconds", "world_size", "num_nodes", "hosts", "device", "precision", "num_attempts",
    "repeated_steps", "settings", "warnings", "weights_sha256", "finished",
)  # fmt: skip
CHECKPOINT = ("step", "bytes", "problem", "is_best", "is_next", "attempt")
SWEEP = ("state", "counts", "trials")


@dataclass(frozen=True)
class Kept:
    """A version's directory, unpacked into `folder` with its paths."""

    folder: Path
    expected: Mapping[str, Any]

    @classmethod
    def unpack(cls, version: Path, folder: Path) -> "Kept":
        """Unpack what a version made as if it had been made in `folder`, by this Python."""
        expected = json.loads((version / EXPECTED).read_text())
        with tarfile.open(version / ARCHIVE) as archive:
            # Python 3.11.2 has no filters.
            archive.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
            archive.extractall(folder / "project")
        paths = {expected["python"]: sys.executable, expected["folder"]: str(folder)}
        for path in folder.rglob("*"):
            if path.is_file() and not path.is_symlink() and path.suffix != ".pt":
                content = kept = path.read_bytes()
                for old, new in paths.items():
                    content = content.replace(old.encode(), new.encode())
                if content != kept:
                    path.write_bytes(content)
        return cls(folder / "project", expected)

    @property
    def runs(self) -> list[RunDir]:
        return [RunDir(path.parent) for path in sorted(self.folder.glob("jobs/*/spec.json"))]

    def typed(self, *argv: str) -> str:
        """Run a command in the directory, which must succeed; return its stdout."""
        before = Path.cwd()
        os.chdir(self.folder)
        try:
            done = CliRunner().invoke(cli, argv)
        finally:
            os.chdir(before)
        assert done.exit_code == 0, f"{argv}: {done.output}{done.exception}"
        return done.stdout


def seen(kept: Kept) -> dict[str, Any]:
    """Return what the commands say of each run and of the sweep."""
    listed = json.loads(kept.typed("runs", "--json"))
    sweeps = {each["name"]: _part(each, SWEEP) for each in listed if "sweep" in each}
    content = {
        "request": _request(kept, "request.toml"),
        "sweeps": sweeps,
        "runs": {run.name: _seen_of(kept, run) for run in kept.runs},
    }
    text = json.dumps(content).replace(str(kept.folder.parent), "FOLDER")
    return dict(json.loads(text.replace(sys.executable, "PYTHON")))


def losses(kept: Kept) -> dict[str, float]:
    """Return the test loss of each checkpoint's model, by file; sharded ones are only restored."""
    images, labels = pairs("", train=False)
    found = {}
    for path in sorted(kept.folder.glob("jobs/*/attempts/*/checkpoints/*.pt")):
        content, model = state.load(path), net().eval()
        if "sharded" in path.parts:
            continue
        model.load_state_dict(content["model"])
        with torch.no_grad():
            loss = cross_entropy(model(images), labels).item()
        found[str(path.relative_to(kept.folder))] = loss
    return found


def _seen_of(kept: Kept, run: RunDir) -> dict[str, Any]:
    def told(*argv: str) -> Any:
        return json.loads(kept.typed(*argv, "--json"))

    return {
        "status": _part(told("status", run.name), STATUS),
        "report": _part(told("report", run.name)[0], REPORT),
        "checkpoints": [_part(each, CHECKPOINT) for each in told("checkpoints", run.name)],
        "last line": kept.typed("logs", "--job", run.name).splitlines()[-1],
        "events": [{"kind": each.kind, **asdict(each)} for each in events.read(run.events)],
        "request": _request(kept, run.name),
    }


def _request(kept: Kept, source: str) -> dict[str, str]:
    """Return the options that a new run takes from a run or a file."""
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "saved.toml"
        argv = ["submit", "--dry-run", f"--config={source}", f"--save-config={saved}"]
        assert "#SBATCH" in kept.typed(*argv, "--run-name=again")
        lines = saved.read_text().splitlines()
        return dict(line.split(" = ", 1) for line in lines if " = " in line)


def _part(content: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: content[name] for name in names}
