"""Tests that need a GPU: their marks, what a machine without one does with them, their summary.

`gpu` marks a test that needs one GPU, `gpu2` one that needs two; `-m gpu` selects both. Without
them a test is skipped. CLUSTERDDP_REQUIRE_GPU=N says that N GPUs must be there: a test that needs
no more of them fails instead.
"""

import ctypes
import functools
import os
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

# Read once, as the tests clear what they see of it.
_REQUIRED = int(os.environ.get("CLUSTERDDP_REQUIRE_GPU") or 0)
# CUDA's, and ROCm's two: what a process and its children may see.
_SHOW = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_OUTCOMES = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")
# A process of its own: what asks CUDA must not fork ranks afterwards, which tests do.
_DESCRIBE = """
import torch
print(torch.cuda.device_count() if torch.cuda.is_available() else 0)
print(f"torch {torch.__version__}, CUDA {torch.version.cuda}")
if torch.cuda.is_available():
    print("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        print(f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, {gpu.major}.{gpu.minor}")
"""


@dataclass(frozen=True)
class Machine:
    """The GPUs that torch sees here, and the versions that a figure depends on."""

    gpus: int = 0
    lines: tuple[str, ...] = ()


@functools.cache
def machine() -> Machine:
    """Ask torch, in a process of its own and once a session, where there is a driver."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Machine(0, ("no NVIDIA driver",))
    answer = subprocess.run(
        [sys.executable, "-c", _DESCRIBE], capture_output=True, text=True, check=False
    )
    lines = answer.stdout.splitlines()
    if answer.returncode or not lines:
        why = (answer.stderr.strip().splitlines() or ["no answer"])[-1]
        return Machine(0, (f"torch was asked for GPUs and failed: {why}",))
    return Machine(int(lines[0]), tuple(lines[1:]))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what needs two GPUs as something that needs a GPU."""
    for item in items:
        if item.get_closest_marker("gpu2"):
            item.add_marker("gpu")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a marked test where its GPUs are not; fails it where they have to be there."""
    needs = 2 if item.get_closest_marker("gpu2") else 1 if item.get_closest_marker("gpu") else 0
    if needs <= (machine().gpus if needs else 0):
        return
    found = machine().gpus
    why = f"needs {_count(needs)}, and torch sees {_count(found) if found else 'none'} here"
    if needs <= _REQUIRED:
        pytest.fail(f"{why}; CLUSTERDDP_REQUIRE_GPU is {_REQUIRED}", pytrace=False)
    pytest.skip(why)


def hidden(marked: bool, driver: str) -> dict[str, str]:
    """The variables that show a test no GPU, unless it is marked as one of a GPU's.

    Only where the host has a driver: without one there is nothing to hide, and an empty
    CUDA_VISIBLE_DEVICES would itself be an answer to what some tests ask.
    """
    return {} if marked or not driver else dict.fromkeys(_SHOW, "")


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Prints what `-m gpu` has shown, to be pasted where others look for it."""
    reports = [
        (outcome, report)
        for outcome in _OUTCOMES
        for report in terminalreporter.stats.get(outcome, [])
        if isinstance(report, pytest.TestReport) and "gpu" in report.keywords
    ]
    asked = "gpu" in (config.option.markexpr or "")
    if not asked or not reports:
        return
    terminalreporter.section("GPU tests, to paste")
    terminalreporter.write_line(summary(reports, machine()))


def summary(reports: Iterable[tuple[str, pytest.TestReport]], where: Machine) -> str:
    """Gives the machine, and a table of the tests, a line each whatever its parameters.

    reports: with the outcome of each. A test adds a figure by pytest's `record_property`.
    """
    tests: dict[str, list[tuple[str, pytest.TestReport]]] = {}
    for outcome, report in sorted(reports, key=lambda each: each[1].nodeid):
        name = report.nodeid.removeprefix("tests/").partition("[")[0]
        tests.setdefault(name, []).append((outcome, report))
    found = "; ".join(where.lines) if where.gpus else "no GPU: nothing below has run on one"
    lines = [
        f"`python -m pytest -m gpu`: {_counted(each for of in tests.values() for each in of)}.",
        f"On {found}; Python {platform.python_version()}, Linux {platform.release()}.", "",
        "| test | outcome | s | figures |", "| --- | --- | --: | --- |",
    ]  # fmt: skip
    for name, of in tests.items():
        seconds = sum(report.duration for _, report in of)
        notes = dict.fromkeys(note for _, report in of if (note := _note(report)))
        lines.append(f"| {name} | {_counted(of)} | {seconds:.1f} | {'; '.join(notes)} |")
    return "\n".join(lines)


def _counted(reports: Iterable[tuple[str, pytest.TestReport]]) -> str:
    """As in `2 passed, 1 skipped`."""
    counts = Counter(outcome for outcome, _ in reports)
    return ", ".join(f"{counts[each]} {each}" for each in _OUTCOMES if counts[each])


def _note(report: pytest.TestReport) -> str:
    """The figures of a test, behind its parameters, or why it was skipped."""
    if report.skipped and isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    figures = ", ".join(f"{key} {value}" for key, value in report.user_properties)
    parameters = report.nodeid.partition("[")[2].removesuffix("]")
    return f"{parameters}: {figures}" if figures and parameters else figures


def digits(named: str | None, folders: Iterable[Path]) -> Path | None:
    """Find the directory with the real MNIST: the one that is named, else the first that has it."""
    wanted = [Path(named)] if named else list(folders)
    return next((each.absolute() for each in wanted if (each / "MNIST" / "raw").is_dir()), None)


def _count(gpus: int) -> str:
    return f"{gpus} {'GPU' if gpus == 1 else 'GPUs'}"
