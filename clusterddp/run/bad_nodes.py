"""Bad nodes, in a file of the output root that all its runs share.

A node is blamed with what was measured or seen, and is left out of the next starts until a person
clears it or its time is over.
"""

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from clusterddp.run import events, files
from clusterddp.run.attempt import Attempt

BY_PREFLIGHT = "preflight"
"""It failed a check ahead of the tasks, or answered none."""
BY_LOSS = "lost"
"""It was lost while tasks ran there."""

FILE_NAME = "bad-nodes.jsonl"
EXPIRES_SECONDS = 24 * 3600.0


@dataclass(frozen=True)
class BadNode:
    """Node that is left out, or, with `expires` 0, that was cleared."""

    host: str
    reason: str = ""
    by: str = ""
    run: str = ""
    job_id: str = ""
    attempt: int | None = None
    time: float = 0.0
    expires: float = 0.0


def blame(attempt: Attempt, job_id: str, nodes: Mapping[str, str], by: str) -> None:
    """Record nodes as bad, in the run's events and in the output root. Raises OSError.

    nodes: what was measured or seen, by the node's name.
    """
    run, now = attempt.run, time.time()
    events.add(
        run.events, events.NodesBlamed, job_id=job_id, attempt=attempt.number, nodes=nodes, by=by
    )
    for host, reason in nodes.items():
        node = BadNode(
            host, reason, by, run.name, job_id, attempt.number, now, now + EXPIRES_SECONDS
        )
        files.append_json_line(run.path.parent / FILE_NAME, vars(node))


def clear(root: Path, hosts: Collection[str]) -> None:
    """Take nodes off the list of an output root. Raises OSError."""
    for host in hosts:
        files.append_json_line(root / FILE_NAME, vars(BadNode(host, time=time.time())))


def read(root: Path) -> dict[str, BadNode]:
    """Return the nodes of an output root that are bad now, by name. Raises OSError."""
    nodes = {node.host: node for node in files.read_lines(BadNode, root / FILE_NAME)}
    return {host: node for host, node in nodes.items() if node.expires > time.time()}
