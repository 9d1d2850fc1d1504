"""docs/json.md: each field that it promises is in what the command prints, with its type.

The loop of docs/scripts.md runs.
"""

import json
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clusterddp.cli.main import COMMANDS
from tests.checkpoints.made_checkpoints import attempt
from tests.cli.commands.test_bad_nodes import marked_bad
from tests.cli.commands.test_doctor import Site
from tests.cli.made_reports import achieve
from tests.cli.made_runs import FAILURE, Workplace, ended, started, submitted, workplace

__all__ = ["workplace"]

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "json.md").read_text()
RULES = (ROOT / "docs" / "scripts.md").read_text()
NUMBER = (int, float)
TYPES: dict[str, tuple[type, ...]] = {
    "text": (str,),
    "number": NUMBER,
    "true or false": (bool,),
    "object": (dict,),
}
PROMISED = {
    section.partition("\n")[0]: dict(re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", section, re.M))
    for section in PAGE.split("\n## ")[1:]
    if "| field | type |" in section
}


def one_run(workplace: Workplace) -> None:
    done = [submitted("1"), started("1"), ended("1", 1, first_failure=FAILURE)]
    run = workplace.run("one", *done, age=60)
    achieve(run, weights_sha256="ab", finished=time.time())
    attempt(run, 1, 100, 200, best=100)
    workplace.command("squeue", "exit 0")


def queue(workplace: Workplace) -> None:
    workplace.command("sbatch", "echo 7")
    workplace.command("squeue", "echo '7|PENDING|(Resources)'")
    workplace.command("scancel", "exit 0")
    workplace.command("work", "exit 0")


def submit(workplace: Workplace) -> Any:
    queue(workplace)
    return answer(workplace, "submit", "--run-name=one", "--json", "--", "work")


def submit_sweep(workplace: Workplace) -> Any:
    queue(workplace)
    lr = ("--sweep=lr=1,2", "--run-name=lr", "--json", "--", "work", "{lr}")
    return answer(workplace, "submit", *lr)


def answer(workplace: Workplace, *argv: str) -> Any:
    got = workplace.invoke(*argv)
    assert got.code in (0, 1), got
    return json.loads(got.out)


def of_one(*argv: str) -> Callable[[Workplace], Any]:
    """Return what has a command print its JSON of one run."""

    def shown(workplace: Workplace) -> Any:
        one_run(workplace)
        return answer(workplace, *argv, "--json")

    return shown


def of_sweep(*argv: str) -> Callable[[Workplace], Any]:
    def shown(workplace: Workplace) -> Any:
        achieve(workplace.sweep("lr", ("lr", "seed"), ("0.1", "0"), ("0.1", "1")).trial(0))
        workplace.command("squeue", "exit 0")
        return answer(workplace, *argv, "lr", "--json")

    return shown


def ending(command: str) -> Callable[[Workplace], Any]:
    def shown(workplace: Workplace) -> Any:
        queue(workplace)
        workplace.run("one", submitted("7"))
        return answer(workplace, command, "one", "--json")

    return shown


def nodes(workplace: Workplace) -> Any:
    marked_bad(workplace.root, "h02", by="preflight", reason="link at 90 Mb/s")
    return answer(workplace, "bad-nodes", "--json")


def doctor(workplace: Workplace) -> Any:
    Site(workplace)
    return answer(workplace, "doctor", "--python", "python", "--json")


def check(workplace: Workplace) -> Any:
    (workplace.folder / "job.sbatch").write_text(
        "#!/bin/bash\n#SBATCH --nodes=2\npython train.py\n#SBATCH --time=10\n"
    )
    return answer(workplace, "check", "job.sbatch", "--json")


def explain(workplace: Workplace) -> Any:
    return answer(workplace, "explain", "CD1212", "--json")


SHOWN = {
    "submit": submit,
    "submit of a sweep": submit_sweep,
    "status": of_one("status", "one"),
    "status of a sweep": of_sweep("status"),
    "report": of_one("report", "one"),
    "report of a sweep": of_sweep("report"),
    "checkpoints": of_one("checkpoints", "one"),
    "bad-nodes": nodes,
    "doctor": doctor,
    "stop": ending("stop"),
    "cancel": ending("cancel"),
    "check": check,
    "explain": explain,
}


def test_each_table_of_the_page_is_tried() -> None:
    assert [*PROMISED] == [*SHOWN]
    assert {name.partition(" ")[0] for name in PROMISED} <= {*COMMANDS}


@pytest.mark.parametrize("name", SHOWN)
def test_what_is_promised_is_printed(name: str, workplace: Workplace) -> None:
    shown = SHOWN[name](workplace)
    is_list = re.search(rf"^## {name}\n\nA list", PAGE, re.M) is not None
    assert isinstance(shown, list) == is_list
    assert shown
    for record in shown if is_list else [shown]:
        for field, kind in PROMISED[name].items():
            assert field in record, field
            assert is_of(kind, record[field]), (field, kind, record[field])


def test_runs_prints_what_status_prints(workplace: Workplace) -> None:
    one_run(workplace)
    [shown] = answer(workplace, "runs", "--json")
    assert {*shown} == {*answer(workplace, "status", "one", "--json")}


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("status of a sweep", "trials"), ("report of a sweep", "rows"), ("doctor", "checks"),
    ],
)  # fmt: skip
def test_the_objects_of_a_list_have_what_the_page_names(
    name: str, field: str, workplace: Workplace
) -> None:
    [row] = re.findall(rf"^\| `{field}` \|.*$", section_of(name), re.M)
    named = re.findall(r"`(\w+)`", row)[1:]
    shown = SHOWN[name](workplace)[field]
    assert shown and named and all({*named} <= {*each} for each in shown)


def test_the_skill_names_no_state_and_no_field_that_is_not_promised() -> None:
    skill = (ROOT / "SKILL.md").read_text()
    states = re.findall(r"^\| (\w+) \|", skill.partition("| state |")[2], re.M)
    assert {*states} <= {
        *re.findall(r"\w+", PAGE.partition("| `state` | text |")[2].splitlines()[0])
    }
    fields = {name for name in re.findall(r"`(\w+)`", skill) if "_" in name}
    assert fields <= {*PROMISED["status"]}


def test_the_loop_resumes_what_was_interrupted_and_tells_the_end(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first job ends by the time limit, with its ranks saved; the second one is done."""
    queue(workplace)
    workplace.command("python", "exit 0")
    (workplace.folder / "train.py").touch()
    workplace.command("clusterddp", f'exec {sys.executable} -m clusterddp "$@"')
    ends = iter([("75", "time limit"), ("0", "done")])

    plain = time.sleep

    def sleep(seconds: float) -> None:
        if threading.current_thread() is not threading.main_thread():
            plain(seconds)  # one that another test has left behind
            return
        workplace.command("squeue", "exit 0")  # the job has left the queue
        code, cause = next(ends)
        with (workplace.root / "big" / "events.jsonl").open("a") as file:
            for event in (started("7"), ended("7", int(code), cause=cause)):
                print(json.dumps({"time": time.time(), **event}), file=file)

    monkeypatch.setattr(time, "sleep", sleep)
    [loop] = re.findall(r"^```python\n(.*?)^```", RULES, re.M | re.S)
    with pytest.raises(SystemExit) as left:
        exec(compile(loop, "docs/scripts.md", "exec"), {})
    assert left.value.code == 0
    asked = [call.split()[1] for call in workplace.calls if call.startswith("clusterddp")]
    assert asked == ["submit", "status", "status", "resume", "status"]


def section_of(name: str) -> str:
    return next(text for text in PAGE.split("\n## ") if text.startswith(f"{name}\n"))


def is_of(kind: str, value: object) -> bool:
    """Return whether a value is of a type in the page's words: `list of texts`, `text or null`."""
    if kind.endswith(" or null"):
        return value is None or is_of(kind.removesuffix(" or null"), value)
    if kind.startswith("list of "):
        each = kind.removeprefix("list of ").rstrip("s")
        return isinstance(value, list) and all(is_of(each, item) for item in value)
    return isinstance(value, TYPES[kind]) and isinstance(value, bool) == (kind == "true or false")
