"""The exit codes that the reference lists are those with which commands end."""

import re
from pathlib import Path

import click
import pytest

import docs_build
from tests.cli.made_runs import Workplace, workplace

__all__ = ["workplace"]

_CODES = re.compile(r"^##+ (clusterddp [a-z -]+)\n(?:(?!##).*\n)*?.*\bExit codes: (.*)$", re.M)


@pytest.fixture(scope="module")
def listed() -> dict[str, str]:
    """Return the codes of each command, as the page has them."""
    return dict(_CODES.findall(docs_build.reference()["commands.md"]))


def test_every_command_has_a_line(listed: dict[str, str]) -> None:
    leaves = {
        name
        for name, command in docs_build.commands()
        if not isinstance(command, click.Group) or command.invoke_without_command
    }
    assert {*listed} == leaves


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("submit --nodes 0", 2),
        ("check nothing", 2),
        ("check good.sh", 1),
        ("import nothing", 2),
        ("debug --run-name a/b", 2),
        ("debug --procs 2 --container-image x.sif --start-method fork", 2),
        ("compare --nodes 2 --wrong", 2),
        ("train --rank 0", 2),
        ("env", 0),
        ("env --from torch.env", 1),
        ("env --from nothing", 2),
        ("exec -- nothing", 127),
        ("exec -- ./good.sh", 126),
        ("runs", 0),
        ("status nothing", 2),
        ("logs nothing", 2),
        ("stacks nothing", 2),
        ("checkpoints nothing", 2),
        ("report nothing", 2),
        ("stop nothing", 2),
        ("cancel nothing", 2),
        ("resume nothing", 2),
        ("clean", 0),
        ("clean nothing", 2),
        ("rm nothing", 2),
        ("bad-nodes", 0),
        ("bad-nodes clear h1", 2),
        ("data check", 1),
        ("data check --dataset nothing", 2),
        ("data import .", 1),
        ("data import nothing", 2),
        ("data generate --train-images 20 --test-images 10", 0),
        ("data generate --train-images 0", 2),
        ("data fetch --data-dir=", 2),
        ("templates list", 0),
        ("templates show ddp", 0),
        ("templates show nothing", 2),
        ("templates copy ddp mine.j2", 0),
        ("templates copy ddp good.sh", 2),
        ("site", 0),
        ("site --site nothing", 2),
        ("site list", 0),
        ("site use nothing", 2),
        ("explain CD0401", 0),
        ("explain xyzzy", 2),
        ("completion bash", 0),
        ("completion none", 2),
    ],
)
def test_a_command_ends_with_a_code_that_is_listed(
    line: str, code: int, listed: dict[str, str], workplace: Workplace
) -> None:
    torch = "RANK=3\nWORLD_SIZE=2\nMASTER_ADDR=a\nMASTER_PORT=1\nLOCAL_RANK=0\n"
    Path("torch.env").write_text(torch)
    Path("good.sh").write_text("#!/bin/bash\n#SBATCH --nodes=2\ntorchrun train.py\n")
    got = workplace.invoke(*line.split())
    assert got.code == code, got.err
    of = max((name for name in listed if f"clusterddp {line} ".startswith(f"{name} ")), key=len)
    assert re.search(rf"\b{code}\b", listed[of]), listed[of]
