"""Runs what is checked before a release, and prints a table for its notes.

    python -m benchmarks.release --list
    python -m benchmarks.release --only installs --only empty

A check that fails does not stop the others. What this machine cannot run is skipped, with the
reason. Ctrl-C ends the current check and prints the table so far. CONTRIBUTING.md has the steps
that are done by hand.
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

SLURM, GPU, ROOT = "Slurm and root", "a GPU", "root"
_PATIENCE_SECONDS = 60.0
"""For a check that was interrupted: it takes its clusters down."""


@dataclass(frozen=True)
class Check:
    """A line of the checklist."""

    name: str
    command: str
    minutes: int
    """About what it takes on two cores."""
    needs: str = ""


CHECKS = (
    Check("ci", ".ci/run", 55, SLURM),
    Check("release", "python -m pytest -n 3 --dist loadfile -m release", 30, SLURM),
    Check("kept", "python -m pytest -q tests/kept", 2, SLURM),
    # Its rows pair-* are the pairs of losses.
    Check("campaign", "python -m tests.on_slurm.campaign", 240, SLURM),
    Check("drawn", "python -m tests.on_slurm.campaign --random 20", 60, SLURM),
    Check("drawn-memory", "python -m tests.on_slurm.campaign --random 20 --of memory", 60, SLURM),
    Check("slurms", "python -m tests.on_slurm.versions", 60, SLURM),
    Check("integrations", "python -m tests.integrations --slurm", 30, SLURM),
    Check("installs", "python -m tests.installs", 60),
    Check("empty", "python -m tests.empty", 15, ROOT),
    Check("scale", "python -m benchmarks.nodes", 10),
    Check("figures", "python -m benchmarks", 26),
    Check("gpu", "python -m pytest -m gpu", 20, GPU),
)


@dataclass(frozen=True)
class Done:
    """A check that was run or skipped."""

    name: str
    command: str
    result: str
    """`passed`, `failed: exit code N`, `skipped: reason` or `interrupted`."""
    seconds: float


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 when no check failed, 1 when one did, 130 after Ctrl-C."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("benchmarks.release", None, __doc__, formatter_class=formatter)
    names = [check.name for check in CHECKS]
    parser.add_argument("--list", action="store_true", help="print the checklist and end")
    parser.add_argument("--only", action="append", choices=names, help="again for more")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    parser.add_argument(
        "--logs", type=Path, default=Path("build/release"), metavar="DIR",
        help="directory for the output of each check; default: %(default)s",
    )  # fmt: skip
    asked = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background
    chosen = [check for check in CHECKS if not asked.only or check.name in asked.only]
    if asked.list:
        rows = [(c.name, f"`{c.command}`", f"{c.minutes} min", c.needs or "-") for c in chosen]
        print(*table(("check", "command", "takes about", "needs"), rows), sep="\n")
        return 0
    done: list[Done] = []
    for each in carried_out(chosen, asked.logs):
        print(f"== {each.name}: {each.result}", file=sys.stderr, flush=True)
        done.append(each)
    if asked.json:
        print(json.dumps([asdict(each) for each in done], indent=2))
    else:
        rows = [(d.name, f"`{d.command}`", d.result, f"{d.seconds:.0f}") for d in done]
        print(*table(("check", "command", "result", "seconds"), rows), sep="\n")
    if done and done[-1].result == "interrupted":
        return 128 + signal.SIGINT
    return 1 if any(each.result.startswith("failed") for each in done) else 0


def carried_out(checks: Sequence[Check], logs: Path) -> Iterator[Done]:
    """Run one check after the other; after Ctrl-C, the one that was interrupted is the last."""
    logs.mkdir(parents=True, exist_ok=True)
    for check in checks:
        if reason := missing(check.needs):
            yield Done(check.name, check.command, f"skipped: {reason}", 0.0)
            continue
        began = time.monotonic()
        result = run(check, logs / f"{check.name}.log")
        yield Done(check.name, check.command, result, time.monotonic() - began)
        if result == "interrupted":
            return


def missing(needs: str) -> str:
    """Return what a check needs and this machine does not have; empty if it has all."""
    if needs in (SLURM, ROOT) and os.geteuid() != 0:
        return "needs root"
    if needs == SLURM and not shutil.which("slurmctld"):
        return "needs slurmctld"
    if needs == GPU and not shutil.which("nvidia-smi"):
        return "needs a GPU"
    return ""


def run(check: Check, log: Path) -> str:
    """Run a check in a session of its own, with its output in a file; return its result."""
    argv = shlex.split(check.command)
    if argv[0] == "python":
        argv[0] = sys.executable
    # A check whose needs are met must not skip for them.
    env = os.environ | ({"CLUSTERDDP_REQUIRE_SLURM": "1"} if check.needs == SLURM else {})
    with log.open("w") as output:
        # Ctrl-C waits until there is a process to end.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        process = subprocess.Popen(
            argv, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            preexec_fn=partial(signal.pthread_sigmask, signal.SIG_SETMASK, mask),  # noqa: PLW1509 - no thread here
        )  # fmt: skip
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        code = process.wait()
    except KeyboardInterrupt:
        _end(process)
        return "interrupted"
    return "passed" if code == 0 else f"failed: exit code {code}, see {log}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Format rows in Markdown."""
    for row in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(row)} |"


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Interrupt a check once, as a terminal does; kill what has not ended after that."""
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(_PATIENCE_SECONDS)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
