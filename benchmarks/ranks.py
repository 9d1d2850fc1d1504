"""`DistEnv.from_environ` in a step of 10,000 nodes with 8 tasks each, as every task runs it."""

import functools
import re
from collections.abc import Mapping

from benchmarks.pairs import Row, alternate, timed
from clusterddp.ranks.dist_env import DistEnv
from clusterddp.slurm.forms import expand_nodelist

NODES, TASKS_PER_NODE = 10_000, 8
_PAIRS = 100

_NODE = NODES - 1
_STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": str(_NODE * TASKS_PER_NODE + 3),
    "SLURM_LOCALID": "3",
    "SLURM_NODEID": str(_NODE),
    "SLURM_STEP_NUM_TASKS": str(NODES * TASKS_PER_NODE),
    "SLURM_STEP_NUM_NODES": str(NODES),
    "SLURM_STEP_TASKS_PER_NODE": f"{TASKS_PER_NODE}(x{NODES})",
}
_INTEGERS = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_TASKS")
_LISTS = {
    "one range": f"gpu[00001-{NODES:05}]",
    # The longest list that so many nodes can give: no two of them are neighbours.
    "10,000 single nodes": f"gpu[{','.join(f'{2 * n:05}' for n in range(NODES))}]",
}


def measure() -> list[Row]:
    """Two rows for each host list: against a naive reading, and against its expansion alone."""
    return [row for form, hosts in _LISTS.items() for row in _rows(form, hosts)]


def naive(environ: Mapping[str, str]) -> tuple[list[int], list[int], list[str]]:
    """The shortest code that reads the same: no checks, one bracket, no suffix, one layout."""
    numbers = [int(environ[name]) for name in _INTEGERS]
    layout = re.fullmatch(r"(\d+)\(x(\d+)\)", environ["SLURM_STEP_TASKS_PER_NODE"])
    bracket = re.fullmatch(r"(.*)\[(.*)\]", environ["SLURM_STEP_NODELIST"])
    assert layout and bracket
    hosts = []
    for item in bracket[2].split(","):
        first, _, last = item.partition("-")
        width = len(first)
        hosts += [
            f"{bracket[1]}{number:0{width}}" for number in range(int(first), int(last or first) + 1)
        ]
    return numbers, [int(layout[1])] * int(layout[2]), hosts


def _rows(form: str, hosts: str) -> list[Row]:
    environ = {**_STEP, "SLURM_STEP_NODELIST": hosts}
    derive = functools.partial(DistEnv.from_environ, environ)
    read, expand = functools.partial(naive, environ), functools.partial(expand_nodelist, hosts)
    derived = derive()
    assert list(derived.hostnames) == expand() == read()[2], "both read the same hosts"
    assert derived.world_size == sum(read()[1])
    rows = []
    for name, baseline in (("a naive regex, unchecked", read), ("expand_nodelist only", expand)):
        before, seconds = alternate(timed(baseline), timed(derive), pairs=_PAIRS)
        rows.append(Row(f"DistEnv, {NODES:,} nodes x 8, {form}", name, before, seconds))
    return rows
