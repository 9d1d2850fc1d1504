"""Runs the tests of the integrations with older releases of the frameworks, and prints a table.

The releases of a set are installed once, in a directory that comes first on the path. What they
need is not: torch and the rest are those of this environment.

    python -m tests.integrations
    python -m tests.integrations --set 2025-11 --slurm -- -x -k stopped
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

SETS = {
    "newest": "",  # this environment's
    "2025-11": "lightning==2.5.6 pytorch-lightning==2.5.6 accelerate==1.12.0 transformers==4.57.3 "
    "tokenizers==0.22.1 huggingface-hub==0.36.0",
    "oldest": "lightning==2.4.0 pytorch-lightning==2.4.0 accelerate==1.9.0 transformers==5.0.0 "
    "tokenizers==0.22.1 huggingface-hub==1.3.0 httpx==0.28.1 httpcore==1.0.9",
}
"""Releases to install: none, those of a year ago, and the oldest that the pages name."""
FILES = {
    "tests/integrations/test_lightning.py": "lightning",
    "tests/integrations/test_transformers.py": "transformers",
    "tests/integrations/test_accelerate.py": "accelerate",
    "tests/training/test_sources.py": "torchdata",
}
ON_SLURM = "tests/on_slurm/test_integrations.py"
CACHE = Path.home() / ".cache/clusterddp-integrations"


def main() -> int:
    """Returns 0 when every test passed, 1 when one did not."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("tests.integrations", None, __doc__, formatter_class=formatter)
    parser.add_argument("--set", action="append", choices=SETS, help="again for more; all without")
    parser.add_argument("--slurm", action="store_true", help=f"also {ON_SLURM}, on a real Slurm")
    parser.add_argument("--cache", type=Path, default=CACHE, help="of the packages; %(default)s")
    parser.add_argument("pytest", nargs="*", help="options of pytest, after --")
    asked = parser.parse_args()
    lines, ok = ["| package | release | passed | failed |", "| --- | --- | --- | --- |"], True
    for name in asked.set or SETS:
        env = environment(SETS[name], asked.cache / name)
        releases = versions(env, FILES.values())
        print("==", name, releases, flush=True)
        passed, failed = test(env, [*FILES, *[ON_SLURM] * asked.slurm, *asked.pytest])
        for package, release in releases.items():
            lines.append(f"| {package} | {release} | {passed[package]} | {failed[package]} |")
        ok = ok and bool(passed) and not failed
    print("\n".join(lines))
    return 0 if ok else 1


def environment(releases: str, folder: Path) -> dict[str, str]:
    """Returns the environment of the tests, with these releases installed in the directory."""
    wanted = dict(each.split("==") for each in releases.split())
    env = {**os.environ, **({"PYTHONPATH": str(folder)} if wanted else {})}
    if wanted and not (folder.is_dir() and versions(env, wanted) == wanted):
        shutil.rmtree(folder, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
        subprocess.run([*pip, str(folder), *releases.split()], check=True)
    assert versions(env, wanted) == wanted
    return env


def versions(env: dict[str, str], packages: Iterable[str]) -> dict[str, str]:
    """Returns what a Python in this environment finds."""
    code = "import sys, importlib.metadata as m\nfor n in sys.argv[1:]: print(n, m.version(n))"
    argv = [sys.executable, "-c", code, *packages]
    found = subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout
    return dict(line.split() for line in found.splitlines())


def test(env: dict[str, str], argv: Sequence[str]) -> tuple[Counter[str], Counter[str]]:
    """Returns how many tests passed and how many did not, by package; a skipped one did not."""
    counts: tuple[Counter[str], Counter[str]] = Counter(), Counter()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        options = ["-q", "-o", "junit_family=xunit1", f"--junitxml={report}"]
        subprocess.run([sys.executable, "-m", "pytest", *options, *argv], env=env, check=False)
        for case in ET.parse(report).iter("testcase"):
            parameter = case.get("name", "").partition("[")[2].removesuffix("]")
            package = FILES.get(case.get("file", ""), parameter)
            wrong = any(child.tag in ("failure", "error", "skipped") for child in case)
            counts[wrong][package] += 1
    return counts


if __name__ == "__main__":
    sys.exit(main())
