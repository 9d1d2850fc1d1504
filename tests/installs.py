"""Builds the distributions, checks them as a package index does, installs them, types the README.

    python -m tests.installs --shared --oldest
    python -m tests.installs
    python -m tests.installs --cell 3.10:2.4 --cell 3.13:2.14

The first is what CI does. `--shared`: one environment, which takes torch from that of this Python.
`--oldest`: the oldest Python that is here, with its oldest torch. Each pair of a Python and a torch
gets an environment of its own, with all that pip downloads (5 GB, five minutes). Without options:
of each Python the oldest and the newest torch that it has.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
OLDEST_TORCH = 4
"""Of torch 2: pyproject.toml."""
NO_PYTHON, NO_WHEEL, PASSED, UNTRIED = "no Python here", "no wheel", "passed", "not tried"


def main() -> int:
    """Returns 0 when every cell that was tried passed, 1 when one did not."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("tests.installs", None, __doc__, formatter_class=formatter)
    parser.add_argument("--shared", action="store_true", help="with this environment's torch")
    parser.add_argument("--oldest", action="store_true", help="the oldest pair that is here")
    parser.add_argument("--cell", action="append", metavar="PYTHON:TORCH", help="again for more")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        wheel = distributions(Path(name))
        if asked.shared and said(install_shared(wheel, Path(name, "shared"))) != PASSED:
            return 1
        if asked.oldest:
            python = next(python for python in PYTHONS if found(python) and torches(python))
            torch = torches(python)[0]
            result = tried(python, torch, wheel, Path(name, "venv"))
            print(f"Python {python}, torch 2.{torch}: {result}")
            return 0 if result == PASSED else 1
        if asked.shared:
            return 0
        results = cells(asked.cell or [], wheel, Path(name))
    print("\n".join(table(results)))
    outcomes = {*results.values()} - {NO_PYTHON, NO_WHEEL, UNTRIED}
    return 0 if outcomes == {PASSED} else 1


def distributions(folder: Path) -> Path:
    """Returns the wheel, built from the source distribution; raises where an index refuses one."""
    _build(ROOT, folder, "sdist")
    [archive] = folder.glob("*.tar.gz")
    run(["tar", "-xzf", str(archive), "-C", str(folder)])
    _build(folder / archive.name.removesuffix(".tar.gz"), folder, "wheel")
    _build(ROOT / "client", folder, "wheel")
    files = sorted([*folder.glob("*.whl"), archive])
    run([sys.executable, "-m", "twine", "check", "--strict", *map(str, files)])
    print(*(file.name for file in files), sep="\n", flush=True)
    [wheel] = folder.glob("clusterddp-*.whl")
    return wheel


def install_shared(wheel: Path, venv: Path) -> Path:
    """Returns an environment with this wheel, and all else from that of this Python."""
    run([sys.executable, "-m", "venv", "--without-pip", str(venv)])
    [packages] = venv.glob("lib/python3*/site-packages")
    ours = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "shared.pth").write_text("\n".join(ours))
    pip = [sys.executable, "-m", "pip", "--python", str(venv / "bin/python"), "--quiet", "install"]
    run([*pip, "--no-index", "--no-deps", "--ignore-installed", str(wheel)])
    return venv


def cells(chosen: Sequence[str], wheel: Path, folder: Path) -> dict[tuple[str, int], str]:
    """Returns the result of each pair of a Python and a minor release of torch 2."""
    there = {python: torches(python) for python in PYTHONS}
    every = range(OLDEST_TORCH, max(map(max, filter(None, there.values()))) + 1)
    results = {
        (python, torch): UNTRIED if torch in there[python] else NO_WHEEL
        for python in PYTHONS
        for torch in every
    }
    for python, torch in [cell for cell, result in results.items() if result == UNTRIED]:
        cell = f"{python}:2.{torch}"
        if cell in chosen or (not chosen and torch in (there[python][0], there[python][-1])):
            print("==", cell, flush=True)
            results[python, torch] = tried(python, torch, wheel, folder / "venv")
    return results


def tried(python: str, torch: int, wheel: Path, venv: Path) -> str:
    """Install the wheel beside this torch and type the README's quickstart; returns the result."""
    if not (interpreter := found(python)):
        return NO_PYTHON
    pair = [f"torch==2.{torch}.*", f"torchvision<0.{torch + 16}"]
    try:
        run([interpreter, "-I", "-m", "venv", str(venv)])
        # -I: pip takes what a PYTHONPATH has as installed.
        pip = [str(venv / "bin/python"), "-I", "-m", "pip", "install", "--quiet"]
        run([*pip, *pair, str(wheel)])
        return said(venv)
    except subprocess.CalledProcessError as error:
        print(error, file=sys.stderr)
        return "failed"
    finally:
        shutil.rmtree(venv, ignore_errors=True)


def said(venv: Path) -> str:
    """Type the README's commands that need no Slurm, in an empty directory; returns the result."""
    readme = (ROOT / "README.md").read_text()
    commands = re.findall(r"^\$ (.*--launcher local.*)$", readme, re.M)
    assert commands, "the README has no quickstart without Slurm"
    path = f"{venv / 'bin'}:{os.environ['PATH']}"
    env = {"PATH": path, "HOME": os.environ["HOME"], "VIRTUAL_ENV": str(venv)}
    with tempfile.TemporaryDirectory() as folder:
        for command in ("clusterddp --version", *commands):
            print("$", command, flush=True)
            output = run(["sh", "-c", command], cwd=folder, env=env)
            print(*output.splitlines()[-2:], sep="\n", flush=True)
        where = run([str(venv / "bin/python"), "-c", _WHERE], cwd=folder, env=env)
    assert Path(where.strip()).is_relative_to(venv.resolve()), where
    return PASSED if ": done: test accuracy" in output else "failed"


_WHERE = "import clusterddp, os; print(os.path.realpath(clusterddp.__file__))"


def found(python: str) -> str | None:
    """Returns a Python of this version that can make environments: on PATH, of pyenv or of uv."""
    home = Path.home()
    places = [
        *filter(None, [shutil.which(f"python{python}")]),
        *(home / ".pyenv/versions").glob(f"{python}.*/bin/python"),
        *(home / ".local/share/uv/python").glob(f"cpython-{python}.*/bin/python3"),
    ]
    code = "import ensurepip, ssl, ctypes, sys; print('%d.%d' % sys.version_info[:2])"
    for place in map(str, places):
        shown = subprocess.run([place, "-c", code], capture_output=True, text=True, check=False)
        if shown.stdout.strip() == python:
            return place
    return None


def torches(python: str) -> list[int]:
    """Returns the minor releases of torch 2 that have wheels here, and torchvision one for them."""
    visions = [minor for minor in _minors(python, "torchvision", 0) if minor >= OLDEST_TORCH + 15]
    oldest = min(visions, default=99) - 15
    return sorted(minor for minor in _minors(python, "torch", 2) if minor >= oldest)


def _minors(python: str, package: str, major: int) -> set[int]:
    pip = [sys.executable, "-m", "pip", "index", "versions", package, "--only-binary=:all:"]
    pip += ["--python-version", python]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    if done.returncode and "No matching distribution" not in done.stderr:
        raise subprocess.CalledProcessError(done.returncode, pip, done.stdout, done.stderr)
    return {int(minor) for minor in re.findall(rf"\b{major}\.(\d+)\.\d+", done.stdout)}


def table(results: Mapping[tuple[str, int], str]) -> Iterable[str]:
    """Format the results in Markdown, a row for each Python."""
    torches = sorted({torch for _, torch in results})
    yield f"| Python | {' | '.join(f'torch 2.{torch}' for torch in torches)} |"
    yield f"| --- | {' | '.join('---' for _ in torches)} |"
    for python in PYTHONS:
        yield f"| {python} | {' | '.join(results[python, torch] for torch in torches)} |"


def run(argv: Sequence[str], **options: object) -> str:
    """Returns what a command printed, both streams; raises CalledProcessError with it."""
    try:
        return subprocess.run(  # type: ignore[call-overload, no-any-return]
            argv, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options
        ).stdout
    except subprocess.CalledProcessError as error:
        print(error.stdout, file=sys.stderr)
        raise


def _build(project: Path, folder: Path, target: str) -> None:
    run([sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)], cwd=project)


if __name__ == "__main__":
    sys.exit(main())
