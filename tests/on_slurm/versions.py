"""Runs the tests that Slurm's version matters for on several versions, and prints a table of them.

This machine's own Slurm, and those of other Debian releases, each from a root file system that
debootstrap makes once and keeps in a directory. The versions in the table are from the daemons.

    python -m tests.on_slurm.versions
    python -m tests.on_slurm.versions --release trixie --check "main job" --check "quick faults"
"""

from __future__ import annotations

import argparse
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.on_slurm.cluster import (
    DEFAULT_ROOT,
    ROOT_VARIABLE,
    ClusterError,
    SlurmCluster,
    why_unavailable,
)

OWN = "own"
"""Stands for this machine's Slurm among the releases."""
RELEASES = (OWN, "trixie", "sid")
DEFAULT_ROOTS = Path("/var/cache/clusterddp-roots")
PACKAGES = (
    *("slurm-wlm", "munge", "iproute2", "procps", "util-linux", "mount"),
    # What this machine's Python links, under the names of Debian 13 and later.
    *("libffi8", "libssl3t64", "libsqlite3-0", "libbz2-1.0", "liblzma5", "libreadline8t64"),
    *("libncursesw6", "libexpat1", "libuuid1", "zlib1g", "libstdc++6"),
)
NO_RESULT = "no result"
SKIPPED_FOR_VERSION = "skipped_for_version"
"""What a test records of itself (record_property) before it skips as its Slurm is too old."""
_FAULTS = "tests/on_slurm/test_faults.py::test_a_run_outlives"
# Of each column of the table the tests, as pytest takes them.
CHECKS: dict[str, tuple[str, ...]] = {
    "main job": (
        "tests/on_slurm/test_submit.py::test_the_main_job_trains_on_eight_ranks_of_two_hosts",
    ),
    "submitit": (
        "tests/on_slurm/test_launchers.py::"
        "test_one_request_trains_to_the_same_weights_under_every_launcher[one bucket]",
    ),
    "ordinary user": ("tests/on_slurm/test_user.py",),
    "preemption": (f"{_FAULTS}[preempt-with-grace]",),
    "requeue": (
        f"{_FAULTS}[requeue-from-outside]",
        "tests/on_slurm/test_life.py::"
        "test_an_expedited_requeue_is_slurms_own_or_refused_with_the_version",
        "tests/on_slurm/test_life.py::test_a_stopped_run_is_not_held_by_an_expedited_requeue",
    ),
    "stacks": ("tests/on_slurm/test_stacks.py",),
    "quick faults": ("tests/on_slurm/test_faults.py",),
}


class Unavailable(Exception):
    """A release's Slurm cannot be had on this machine; the text says why."""


@dataclass(frozen=True)
class Row:
    """One Slurm and what its tests came to."""

    slurm: str
    """The version, as slurmctld and slurmd tell it."""
    debian: str
    results: Mapping[str, str]
    """By check: `passed`, `16 of 17 passed` or why there is no result."""
    ok: bool


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 when every test passed, 1 when one did not, 130 after Ctrl-C.

    A Slurm that cannot be had is passed over; with CLUSTERDDP_REQUIRE_SLURM=1 it is a failure.
    """
    arguments = parse(argv)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    checks = list(dict.fromkeys(arguments.check or CHECKS))
    required = os.environ.get("CLUSTERDDP_REQUIRE_SLURM") == "1"
    rows, ok = [], True
    try:
        for release in dict.fromkeys(arguments.release or RELEASES):
            try:
                root = root_for(release, arguments.roots)
                if arguments.only_roots:
                    continue
                row = run(root, checks)
            except (Unavailable, ClusterError) as error:
                print(f"{release} {'failed' if required else 'skipped'}: {error}", flush=True)
                ok = ok and not required
            else:
                rows.append(row)
                ok = ok and row.ok
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    if not arguments.only_roots:
        print(table(rows, checks))
    return 0 if ok else 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.on_slurm.versions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--release", action="append", choices=RELEASES,
        help="a Debian release, or this machine's own Slurm; again for more; all without",
    )  # fmt: skip
    parser.add_argument(
        "--check", action="append", choices=list(CHECKS),
        help="a column of the table; again for more; all without",
    )  # fmt: skip
    parser.add_argument(
        "--roots", type=Path, default=DEFAULT_ROOTS, metavar="DIR",
        help="the directory that keeps the root file systems; default: %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--only-roots", action="store_true", help="make the root file systems; run no test"
    )
    if DEFAULT_ROOT is not None:
        parser.error(f"{ROOT_VARIABLE} is set: each release has its own root")
    return parser.parse_args(argv)


def root_for(release: str, roots: Path) -> Path | None:
    """The root file system to boot a release from; None for this machine's own.

    Raises Unavailable when its Slurm cannot be had.
    """
    if reason := why_unavailable() if release == OWN else _why_no_root():
        raise Unavailable(reason)
    return None if release == OWN else root_of(release, roots.resolve())


def run(root: Path | None, checks: Sequence[str]) -> Row:
    """The row of one release, of its root. Raises ClusterError where its Slurm does not boot."""
    with SlurmCluster(hosts=1, root=root) as cluster:
        slurm = version(cluster)
        debian = cluster.run(["cat", "/etc/debian_version"], check=True).stdout.strip()
    print(f"== Slurm {slurm}, Debian {debian}", flush=True)
    passed, failed = _test(root, [test for check in checks for test in CHECKS[check]])
    results = {}
    for check in checks:
        counts = [
            sum(_belongs(name, CHECKS[check]) for name in names) for names in (passed, failed)
        ]
        results[check] = _told(*counts)
    # Tests that were killed have no result, and have not passed.
    ok = not failed and all(result != NO_RESULT for result in results.values())
    return Row(slurm, debian, results, ok)


def version(cluster: SlurmCluster) -> str:
    """The release that the daemons say they are; ClusterError when they disagree."""
    config = cluster.run(["scontrol", "show", "config"], check=True).stdout
    nodes = cluster.run(["scontrol", "show", "node"], check=True).stdout
    told = set(re.findall(r"^SLURM_VERSION\s*= (\S+)", config, re.MULTILINE))
    told |= set(re.findall(r" Version=(\S+)", nodes))
    if len(told) != 1:
        raise ClusterError(f"slurmctld and slurmd say {sorted(told)}, expected one version")
    return told.pop()


def table(rows: Sequence[Row], checks: Sequence[str]) -> str:
    """Format the rows in Markdown, as docs/compatibility.md has them."""
    lines = [["Slurm", "Debian", *checks], ["---"] * (2 + len(checks))]
    lines += [[row.slurm, row.debian, *(row.results[check] for check in checks)] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# -- tests ---------------------------------------------------------------------------------------


def _test(root: Path | None, tests: Sequence[str]) -> tuple[list[str], list[str]]:
    """The tests that passed and those that did not, by their ids; a skipped one did not.

    One that was skipped for the version is in neither.
    """
    env = dict(os.environ, CLUSTERDDP_REQUIRE_SLURM="1")
    if root:
        env[ROOT_VARIABLE] = str(root)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "-p", "no:cacheprovider", "-o", "junit_family=xunit1"]
        if files := len({test.partition("::")[0] for test in tests}) - 1:  # several wait at once
            options += ["-n", str(min(files + 1, 3)), "--dist", "loadfile"]
        argv = [sys.executable, "-m", "pytest", *options, f"--junitxml={report}", *_once(tests)]
        with subprocess.Popen(argv, env=env) as process:
            try:
                process.wait()
            except BaseException:
                process.send_signal(signal.SIGINT)  # it takes its clusters down
                process.wait(60)
                raise
        if not report.exists():
            return [], [f"pytest: exit code {process.returncode}"]
        cases = list(ET.parse(report).getroot().iter("testcase"))
    passed, failed = [], []
    for case in cases:
        if case.find(f"properties/property[@name='{SKIPPED_FOR_VERSION}']") is not None:
            continue
        wrong = any(child.tag in ("failure", "error", "skipped") for child in case)
        (failed if wrong else passed).append(f"{case.get('file')}::{case.get('name')}")
    return passed, failed


def _once(tests: Sequence[str]) -> list[str]:
    """Those that no other one contains: pytest would run what is named twice once more."""
    return [
        test
        for test in dict.fromkeys(tests)
        if test.partition("::")[0] not in tests or "::" not in test
    ]


def _belongs(test: str, selection: Sequence[str]) -> bool:
    return any(test == chosen or test.startswith(f"{chosen}::") for chosen in selection)


def _told(passed: int, failed: int) -> str:
    if not passed + failed:
        return NO_RESULT
    if failed:
        return f"{passed} of {passed + failed}"
    return "passed" if passed == 1 else f"{passed} passed"


# -- root file systems ---------------------------------------------------------------------------


def _why_no_root() -> str | None:
    if os.geteuid() != 0:
        return "debootstrap and namespaces need root"
    return None


def root_of(release: str, roots: Path) -> Path:
    """The root file system of a Debian release with Slurm in it, made where it is not there yet.

    Raises Unavailable when it cannot be made.
    """
    root = roots / release
    roots.mkdir(parents=True, exist_ok=True)
    with (roots / f"{release}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be making it
        if not root.is_dir():
            _make_root(release, root)
    return root


def _make_root(release: str, root: Path) -> None:
    if shutil.which("debootstrap") is None:
        raise Unavailable("not installed: debootstrap (apt-get install debootstrap)")
    unfinished = root.with_name(f"{release}.unfinished")
    if unfinished.exists():
        shutil.rmtree(unfinished)
    argv = [
        "debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", release,
        str(unfinished), *_mirror(),
    ]  # fmt: skip
    print(f"making the root file system {root}", flush=True)
    # debootstrap mounts /proc and /sys below its target: in a namespace, nothing can stay mounted.
    private = ["unshare", "--mount", "--propagation", "private", "--"]
    done = subprocess.run(
        [*private, *argv], env=os.environ | _proxy(), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        log = (done.stdout + done.stderr).splitlines()[-5:]
        shutil.rmtree(unfinished, ignore_errors=True)
        raise Unavailable("\n".join([f"debootstrap: exit code {done.returncode}", *log]))
    shutil.rmtree(unfinished / "var/cache/apt", ignore_errors=True)
    unfinished.rename(root)


def _mirror() -> list[str]:
    """The mirror of Debian that this machine's apt uses; empty for debootstrap's own choice."""
    argv = ["apt-get", "indextargets", "--format", "$(LABEL) $(REPO_URI)", "Created-By: Packages"]
    for line in subprocess.run(
        argv, capture_output=True, text=True, check=False
    ).stdout.splitlines():
        label, _, address = line.partition(" ")
        if label == "Debian":
            return [address]
    return []


def _proxy() -> dict[str, str]:
    """The proxy that this machine's apt uses, as debootstrap's downloads take it."""
    argv = ["apt-config", "shell", "http_proxy", "Acquire::http::Proxy"]
    told = subprocess.run(argv, capture_output=True, text=True, check=False).stdout.strip()
    value = told.removeprefix("http_proxy=").strip("'")
    return {"http_proxy": value} if value and value != "DIRECT" else {}


if __name__ == "__main__":
    sys.exit(main())
