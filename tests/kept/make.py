"""Keeps what a checkout writes: python -m tests.kept.make CHECKOUT NAME; see README.md."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tests.kept import requests
from tests.kept.places import FOLDER, PYTHON, relocate
from tests.waiting import wait_for

HERE = Path(__file__).parent
TRAINING = [
    "--nodes=2", "--model=digits:net", "--dataset=digits:pairs", "--threads=1", "--device=cpu",
    "--precision=fp32", "--batch-size=32", "--epochs=20", "--warmup-steps=5", "--keep-last=1",
    "--save-every=50steps", "--eval-every=50steps", "--log-every=10", "--time=10",
]  # fmt: skip
SYNTHETIC = [
    *TRAINING, "--dataset=synthetic", "--no-snapshot", "--optimizer=sgd", "--epochs=40",
    "--eval-every=40epochs",
]  # fmt: skip
COMMAND = ["--", "sh", "-c", 'echo "rank $RANK of $WORLD_SIZE: $0"', "it's $HOME"]


class Maker:
    """A folder to type in, a data folder and commands of Slurm's that queue nothing."""

    def __init__(self, checkout: Path, base: Path) -> None:
        self.folder, self.data, binaries = base / "work", base / "data", base / "bin"
        for folder in (self.folder, binaries):
            folder.mkdir()
        for name, line in {"sbatch": "echo Submitted batch job 7", "srun": "false"}.items():
            (binaries / name).write_text(f"#!/bin/sh\n{line}\n")
            (binaries / name).chmod(0o755)
        self.environ = {
            "PATH": f"{binaries}:{os.environ['PATH']}", "HOME": str(base), "USER": "kept",
            "PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip
        shutil.copy(HERE / "digits.py", self.folder)

    def popen(self, *argv: str, **more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", *argv],
            cwd=self.folder, env={**self.environ, **more}, text=True, stdout=subprocess.PIPE,
        )  # fmt: skip

    def typed(self, *argv: str) -> str:
        process = self.popen("clusterddp", *argv)
        out, _ = process.communicate()
        assert process.returncode == 0, argv
        return out

    def stopped(self, name: str, *options: str) -> Path:
        """Submit a run to the local launcher, and stop its training midway."""
        run = self.folder / "jobs" / name
        submit = ["clusterddp", "submit", "--launcher=local", f"--run-name={name}", *options]
        process = self.popen(*submit, KEPT_SLOWLY="1")
        metrics = run / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and '"step": 80' in metrics.read_text(), "step 80")
        self.typed("stop", name)
        process.communicate()
        assert process.returncode == 75, process.returncode
        return run

    def weights(self, **scripts: Path) -> dict[str, dict[str, object]]:
        """Train what each script asks for, and each of `requests`, in one piece."""
        reports = {}
        for name, script in scripts.items():
            run = self.folder / f"jobs/{name}-whole"
            run.mkdir(parents=True)
            text = script.read_text().replace(f"/jobs/{name}", f"/jobs/{name}-whole")
            (run / "script.sbatch").write_text(text)
            assert self.popen("clusterddp.launchers.local", str(run)).wait() == 0
            reports[name] = json.loads((run / "report.json").read_text())
        for number, name in enumerate(requests.REQUESTS):
            folder = self.folder.parent / str(number)
            reports[name] = requests.train(name, folder, self.environ)
        return {
            name: {key: report[key] for key in ("weights_sha256", "loss")}
            for name, report in reports.items()
        }


def main() -> None:
    """Make tests/kept/NAME, which may not be there yet."""
    checkout, kept = Path(sys.argv[1]).resolve(), HERE / sys.argv[2]
    kept.mkdir()
    with tempfile.TemporaryDirectory(prefix="clusterddp-kept-") as base:
        maker, draft = Maker(checkout, Path(base)), Path(base) / "draft"
        draft.mkdir()
        for name, options in {"training": TRAINING, "command": ["--nodes=2", *COMMAND]}.items():
            render = ["submit", "--dry-run", "--no-snapshot", f"--run-name={name}"]
            (draft / f"{name}.sbatch").write_text(maker.typed(*render, *options))
        maker.typed("submit", "--launcher=submitit", "--run-name=queued", *TRAINING)
        maker.stopped("stopped", *TRAINING)
        data = f"--data-dir={maker.data}"
        maker.typed("data", "synthesise", data, "--train-images=256", "--test-images=64")
        maker.stopped("synthetic", *SYNTHETIC, data)
        scripts = {
            "training": draft / "training.sbatch",
            "synthetic": maker.folder / "jobs/synthetic/script.sbatch",
        }
        weights = {"machine": requests.machine(), **maker.weights(**scripts)}
        (kept / "weights.json").write_text(json.dumps(weights, indent=2) + "\n")
        for name in ("queued", "stopped", "synthetic"):
            shutil.copytree(maker.folder / "jobs" / name, draft / name, symlinks=True)
        shutil.copytree(maker.data, draft / "data")
        # Longest first: one path may begin with another.
        paths = {
            str(maker.folder): FOLDER, base: FOLDER, sys.executable: PYTHON,
            f'"{os.uname().nodename}"': '"kept-host"',
        }  # fmt: skip
        relocate(draft, paths)
        for script in draft.glob("*.sbatch"):
            shutil.copy(script, kept)
        for name, folders in {
            "queued": ["queued"], "stopped": ["stopped"], "synthetic": ["synthetic", "data"],
        }.items():  # fmt: skip
            with tarfile.open(kept / f"{name}.tar.xz", "w:xz", preset=9) as archive:
                for folder in folders:
                    archive.add(draft / folder, folder, filter=_anonymous)


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    if "/.submission_file_" in member.name:  # a link of submitit's into the maker's folder
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


if __name__ == "__main__":
    main()
