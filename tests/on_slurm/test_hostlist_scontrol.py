"""Our reading of host lists, held against the real `scontrol show hostnames`.

Seen with Slurm 22.05 and 24.11. A hundred lists at a time go to one scontrol, told apart by a host
name between them.
"""

import random
import subprocess
from collections.abc import Iterator, Sequence
from typing import Protocol

import pytest

from clusterddp.errors import RequestError
from clusterddp.slurm.forms import expand_nodelist

pytestmark = pytest.mark.slurm

MARKER = "end-of-list"
LISTS = 2000
BATCH = 100


class Cluster(Protocol):
    def run(
        self, argv: Sequence[str], *, timeout: float = ...
    ) -> subprocess.CompletedProcess[str]: ...


def scontrol(cluster: Cluster, text: str) -> list[str]:
    """Return what scontrol makes of a list: its hosts, or nothing where it refuses."""
    lines = cluster.run(["scontrol", "show", "hostnames", text], timeout=60).stdout.splitlines()
    return [line for line in lines if line and not line.startswith("Invalid hostlist")]


def scontrol_each(cluster: Cluster, lists: Sequence[str]) -> Iterator[list[str]]:
    """Return the hosts of each list, which must all be valid, at one process for all of them."""
    hosts: list[str] = []
    for host in scontrol(cluster, "".join(f"{text},{MARKER}," for text in lists)):
        if host == MARKER:
            yield hosts
            hosts = []
        else:
            hosts.append(host)
    assert not hosts


def random_range(rng: random.Random) -> str:
    low = rng.choice([rng.randrange(12), rng.randrange(120), rng.randrange(2000)])
    width = rng.choice([0, 0, 1, 2, 3, 5])
    if rng.random() < 0.4:
        return f"{low:0{width}d}"
    high_width = rng.choice([width, width, 0, 4])
    return f"{low:0{width}d}-{low + rng.randrange(12):0{high_width}d}"


def random_name(rng: random.Random) -> str:
    parts = [rng.choice(["", "a", "node", "gpu-", "rack1-", "10.0.0.", "x_y.z", "n0", "n10"])]
    for _ in range(rng.choice([0, 1, 1, 1, 2, 2, 3, 4])):
        items = [random_range(rng) for _ in range(rng.choice([1, 1, 2, 3]))]
        parts.append(f"[{','.join(items)}]")
        parts.append(rng.choice(["", "n", "-", ".s", "c0", "7"]))
    if len(parts) > 1:
        parts.pop()  # Slurm 22.05 refuses a suffix: tested apart
    return "".join(parts) or "login"


def random_list(rng: random.Random) -> str:
    while True:
        text = ",".join(random_name(rng) for _ in range(rng.choice([1, 1, 2, 3, 5])))
        if len(expand_nodelist(text)) <= 300:
            return text


def test_thousands_of_random_lists_expand_as_scontrol_expands_them(cluster: Cluster) -> None:
    rng = random.Random(20221)
    lists = [random_list(rng) for _ in range(LISTS)]
    assert sum(text.count("[") >= 2 for text in lists) > LISTS / 10
    for start in range(0, LISTS, BATCH):
        batch = lists[start : start + BATCH]
        for text, hosts in zip(batch, scontrol_each(cluster, batch), strict=True):
            assert expand_nodelist(text) == hosts, text


@pytest.mark.parametrize(
    "text",
    [
        *("a[3-1]", "a[010-9]", "a[]", "a[1,]", "a[,1]", "a[1,,2]", "a[-1]", "a[x]", "a[1-x]"),
        *("a[1-2-3]", "a[0x1-3]", "a[1-3-]"),
    ],
)
def test_what_scontrol_refuses_is_refused(cluster: Cluster, text: str) -> None:
    assert scontrol(cluster, text) == []
    with pytest.raises(RequestError):
        expand_nodelist(text)


# What scontrol repairs, or reads as something that no one meant; Slurm itself never writes it. The
# answer of Slurm 22.05, and that of 24.11 where it differs.
REFUSED_BY_US_ALONE: dict[str, tuple[list[str], list[str]]] = {
    "a[1": (["a]"], []),
    "a[": (["a]"], []),
    "a[[1-2]]": ([], ["a[1]", "a[2]"]),
    "a[1]b]": ([], ["a1b]"]),
    "a[1-2]]": ([], ["a1]", "a2]"]),
    "a]": (["a]"], ["a]"]),
    "a[1-]": (["a1"], ["a1"]),
    "a,b,": (["a", "b"], ["a", "b"]),
    ",a": (["a"], ["a"]),
    "a,,b": (["a", "b"], ["a", "b"]),
    "a[+1-2]": (["a01", "a02"], ["a01", "a02"]),
    "a b": (["a", "b"], ["a", "b"]),
    "a;b": (["a;b"], ["a;b"]),
}


@pytest.mark.parametrize("text", REFUSED_BY_US_ALONE)
def test_what_scontrol_repairs_is_refused(cluster: Cluster, text: str) -> None:
    assert scontrol(cluster, text) in REFUSED_BY_US_ALONE[text]
    with pytest.raises(RequestError):
        expand_nodelist(text)


def test_a_suffix_is_expanded_as_scontrol_does_where_it_does(cluster: Cluster) -> None:
    expected = ["gpu01-ib", "gpu02-ib"]
    assert scontrol(cluster, "gpu[01-02]-ib") in ([], expected)  # refused by 22.05
    assert expand_nodelist("gpu[01-02]-ib") == expected


def test_a_random_mutilation_never_escapes_as_anything_but_a_request_error() -> None:
    rng = random.Random(7)
    for _ in range(LISTS):
        characters = list(random_list(rng))
        for _ in range(rng.choice([1, 1, 2, 3])):
            place = rng.randrange(len(characters) + 1)
            characters[place : place + rng.randrange(2)] = rng.choice("[],-0 a\n")
        try:
            expand_nodelist("".join(characters))
        except RequestError as error:
            assert str(error).isprintable()
