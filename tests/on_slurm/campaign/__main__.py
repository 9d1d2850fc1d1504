"""The campaign's one command: boots clusters, carries faults out, prints the table."""

from __future__ import annotations

import argparse
import fnmatch
import random
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tests.on_slurm.campaign import FAULTS_OF_ALL_SUBJECTS, memory
from tests.on_slurm.campaign.fault import Fault
from tests.on_slurm.campaign.place import Result, Site
from tests.on_slurm.campaign.spares import at_random
from tests.on_slurm.cluster import ClusterError, why_unavailable

AT_ONCE = 4
"""Faults at work at the same time: most of what they take is waiting for Slurm."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 when every row was as expected, 1 when any differed, 130 after Ctrl-C."""
    arguments = parse(argv)
    faults = chosen(arguments.names)
    if arguments.random:
        seed = random.randrange(10_000) if arguments.seed is None else arguments.seed
        print(f"--random {arguments.random} --seed {seed} --of {arguments.of}", flush=True)
        in_memory = arguments.of == "memory"
        draw = memory.at_random if in_memory else lambda *drawn: [at_random(*drawn)]
        faults = draw(seed, arguments.random)
    if arguments.list:
        for fault in faults:
            print(f"{fault.subject:<10} {fault.name:<34} {fault.expected}")
        return 0
    reason = why_unavailable()
    if reason:
        print(f"no Slurm can be booted here: {reason}", file=sys.stderr)
        return 1
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return campaign(faults, arguments.data_dir, arguments.keep, arguments.at_once)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except ClusterError as error:
        print(error, file=sys.stderr)
        return 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.on_slurm.campaign", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="rows, with * and ?; all without")
    drawn = "N faults in a row, drawn, in jobs with a spare; in place of rows"
    parser.add_argument("--random", type=int, metavar="N", help=drawn)
    parser.add_argument("--seed", type=int, help="that they are drawn by; drawn as well without")
    of = "subject that --random draws from; default: %(default)s"
    parser.add_argument("--of", choices=["spares", "memory"], default="spares", help=of)
    parser.add_argument("--list", action="store_true", help="name the rows and end")
    parser.add_argument(
        "--data-dir", type=Path, help="a directory with MNIST/raw; synthetic without"
    )
    parser.add_argument(
        "--keep", type=Path, help="copy the directories of rows that differ to here"
    )
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help="default: %(default)s")
    return parser.parse_args(argv)


def chosen(names: Sequence[str]) -> list[Fault]:
    faults = FAULTS_OF_ALL_SUBJECTS
    if not names:
        return list(faults.values())
    found = [f for f in faults.values() if any(fnmatch.fnmatch(f.name, name) for name in names)]
    if not found:
        sys.exit(f"no row is named {' or '.join(names)}; see --list")
    return found


def campaign(
    faults: Sequence[Fault], data_dir: Path | None, keep: Path | None, at_once: int
) -> int:
    began = time.monotonic()
    results: list[Result] = []
    with Site(data_dir.resolve() if data_dir else None, keep) as site:
        for config in sorted({config for fault in faults for config in fault.needs}):
            baseline = site.measure(config)
            seen = f"{baseline.wall_seconds:.0f} s, weights {baseline.weights[:12]}"
            print(f"uninterrupted, {config}: {seen}", flush=True)
        # Those on clusters of their own first: they wait longest.
        order = sorted(faults, key=lambda fault: fault.conf is None)
        # What is slow to write is large in memory too.
        with ThreadPoolExecutor(at_once) as pool, ThreadPoolExecutor(1) as one_at_a_time:
            pools = [one_at_a_time if fault.disk == "slow" else pool for fault in order]
            try:
                work = [
                    each.submit(site.carry_out, fault)
                    for each, fault in zip(pools, order, strict=True)
                ]
                for done in as_completed(work):
                    result = done.result()
                    results.append(result)
                    mark = "ok     " if result.ok else "DIFFERS"
                    told = (
                        _first_line(result.seen) if result.ok and len(faults) > 1 else result.seen
                    )
                    print(f"{mark} {result.fault.name} ({result.wall_seconds:.0f} s): {told}",
                          flush=True)  # fmt: skip
            except BaseException:
                site.stopping.set()
                one_at_a_time.shutdown(wait=False, cancel_futures=True)
                pool.shutdown(wait=True, cancel_futures=True)
                raise
    names = [fault.name for fault in faults]
    results.sort(key=lambda result: names.index(result.fault.name))
    print(table(results))
    differing = [result for result in results if not result.ok]
    minutes = (time.monotonic() - began) / 60
    print(f"{len(results)} faults, {len(differing)} differ, {minutes:.1f} minutes")
    return 1 if differing else 0


def table(results: Sequence[Result]) -> str:
    """The rows in columns. Seconds lost: beyond the uninterrupted run, which had all cores."""
    rows = [("FAULT", "EXPECTED", "LOST", "SEEN")]
    for result in results:
        lost = "" if result.lost_seconds is None else f"{result.lost_seconds:.0f} s"
        seen = _first_line(result.seen)
        rows.append((result.fault.name, result.fault.expected, lost,
                     seen if result.ok else f"DIFFERS: {seen}"))  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = []
    for name, expected, lost, seen in rows:
        lines.append(f"{name:<{widths[0]}}  {expected:<{widths[1]}}  {lost:>{widths[2]}}  {seen}")
    return "\n".join(lines)


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""


if __name__ == "__main__":
    sys.exit(main())
