"""All clusters of site.cfg at once: `--on all runs`, `--on any submit …`.

A process asks each, side by side. A silent one costs some seconds.
"""

import json
import os
import shlex
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import click

from clusterddp import formatting, log
from clusterddp.errors import EXIT_DONE, EXIT_FAILED, RequestError
from clusterddp.remote import cluster, session

ALL, ANY = "all", "any"
_REACH_SECONDS, _ANSWER_SECONDS = 5.0, 60.0
"""How long a login may take, and then an answer, with which clusterddp and code may be carried."""


def run(name: str, argv: Sequence[str]) -> int:
    """Run a command on the cluster or clusters that `--on` names; return its exit code.

    Raises RequestError, or ConnectionError.
    """
    command = next(iter(argv), "")
    if name == ALL:
        if command != "runs":
            raise RequestError(f"--on all {command}: only 'runs' asks all clusters. [CD1405]")
        if any(word.partition("=")[0] == "--watch" for word in argv):
            raise RequestError(
                "--on all runs asks each cluster once. Leave out --watch, or name a cluster. "
                "[CD1405]"
            )
        return _runs(argv)
    if name == ANY:
        if command != "submit":
            raise RequestError(f"--on any {command}: only 'submit' chooses a cluster. [CD1405]")
        name = _soonest(argv)
    return session.run(name, argv)


def _clusters() -> list[cluster.Cluster]:
    """Return those that ssh reaches. Raises RequestError without one."""
    found = cluster.with_hosts(os.environ, Path.cwd())
    if not found:
        raise RequestError(
            "site.cfg names no cluster with a host. Add [cluster:NAME] with host = HOST. [CD1405]"
        )
    for each in found:
        if each.name in (ALL, ANY):  # it would ask itself, without an end
            raise RequestError(
                f"[cluster:{each.name}]: --on {each.name} asks every cluster. Rename it. [CD1405]"
            )
    return found


def _runs(argv: Sequence[str]) -> int:
    """Print the runs of all clusters; the exit code is 1 if one did not answer."""
    as_json = "--json" in argv
    answers = _asked(_clusters(), [*argv, *([] if as_json else ["--json"])])
    found = [
        each | {"cluster": name, "next_command": _there(name, each.get("next_command"))}
        for name, (value, _) in answers.items()
        for each in (value if isinstance(value, list) else [])
        if isinstance(each, dict)
    ]
    if as_json:
        click.echo(json.dumps(found))
    elif found:
        rows = [("CLUSTER", "NAME", "STATE", "JOBID", "STEP", "DETAIL"), *map(_row, found)]
        click.echo(formatting.table(rows))
    silent = {name: why for name, (_, why) in answers.items() if why}
    if not (found or silent or as_json):
        click.echo("no runs")
    for name, why in silent.items():
        log.warning(f"{name} shows no runs: {why} [CD1402]")
    return EXIT_FAILED if silent else EXIT_DONE


def _there(name: str, command: Any) -> str:
    """Return a command of a cluster's answer as it is typed here."""
    words = str(command or "")
    before, _, after = words.partition("clusterddp ")
    return words if before or not after else f"clusterddp --on {shlex.quote(name)} {after}"


def _row(fields: dict[str, Any]) -> tuple[str, ...]:
    values = [fields.get(name) for name in ("cluster", "name", "state", "job_id", "step", "detail")]
    return tuple(formatting.line("-" if each in (None, "") else str(each)) for each in values)


def _soonest(argv: Sequence[str]) -> str:
    """Return the cluster whose forecast is the soonest, after a table of all.

    Raises RequestError if none gives one. A refusal by Slurm can be wrong, so it only ranks
    last; but no cluster is chosen blindly.
    """
    end = [*argv, "--"].index("--")
    asked = [word for word in argv[:end] if word != "--wait"]
    answers = _asked(_clusters(), [*asked, "--test-only", "--json", *argv[end:]])
    ranked = sorted((_start(value), name) for name, (value, _) in answers.items())
    rows = [("CLUSTER", "STARTS IN", "SLURM SAYS")]
    for start, name in ranked:
        value, why = answers[name]
        words = why or str(value.get("forecast", "") if isinstance(value, dict) else "")
        known = start != float("inf")
        rows.append((name, formatting.duration(start) if known else "?", formatting.line(words)))
    click.echo(formatting.table(rows), err=True)
    start, name = ranked[0]
    if start == float("inf"):
        raise RequestError(
            f"no cluster says when the run would start. Choose one: --on {shlex.quote(name)}. "
            "[CD1405]"
        )
    return name


def _start(answer: object) -> float:
    value = answer.get("start_in_seconds") if isinstance(answer, dict) else None
    return float(value) if isinstance(value, int | float) else float("inf")


def _asked(found: Sequence[cluster.Cluster], argv: Sequence[str]) -> dict[str, tuple[object, str]]:
    """Ask all; map each name to what its JSON says, or None and why not."""
    with ThreadPoolExecutor(len(found)) as threads:
        answers = list(threads.map(partial(_ask, argv=argv), found))
    return {each.name: answer for each, answer in zip(found, answers, strict=True)}


def _ask(where: cluster.Cluster, argv: Sequence[str]) -> tuple[object, str]:
    own = session.command(where.name, argv)
    try:
        # ConnectTimeout is not enough: a host can accept a connection and stay silent.
        reached = _call(session.reach(where.host), _REACH_SECONDS)
        answer = reached if reached.returncode else _call(own, _ANSWER_SECONDS)
        if not answer.returncode:
            return json.loads(answer.stdout), ""
        _, _, words = answer.stderr.strip().rpartition("\n")
        said = formatting.line(words.removeprefix("clusterddp: "))
        return None, said or f"exit code {answer.returncode}"
    except subprocess.TimeoutExpired as late:
        return None, f"no answer in {formatting.setting(late.timeout)}"
    except ValueError:
        return None, "its answer is not JSON"


def _call(argv: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
        timeout=seconds, check=False,
    )  # fmt: skip
