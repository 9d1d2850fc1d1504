"""Every block of every page is held by what its language allows.

What is held elsewhere as well is named there: commands and their options in test_docs_commands,
the changes of scripts in test_examples. A block that fits nothing has to be what the code prints.
"""

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import click
import pytest
import submitit

from clusterddp.cli.main import cli
from clusterddp.request.options import read_site
from clusterddp.request.spec import OPTIONS
from clusterddp.scripts import sbatch_file
from tests import forked
from tests.cli.made_runs import Workplace, ended, submitted, workplace
from tests.test_docs_commands import commands_of
from tests.waiting import PATIENCE

__all__ = ["workplace"]

ROOT = Path(__file__).parents[1]
BASH = str(shutil.which("bash"))
BESIDE = ("README.md", "SKILL.md", "CONTRIBUTING.md", "examples/README.md", "benchmarks/README.md")
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *(ROOT / name for name in BESIDE)]
LANGUAGES = {"bash", "console", "text", "ini", "toml", "json", "python", "jinja", "diff"}
EXAMPLES = {"docs/from-one-device.md", "docs/resumable.md", "examples/README.md"}
"""Pages whose changes tests/test_examples.py puts into the scripts of examples/."""
FRAMEWORKS = {
    f"docs/{name}.md" for name in ("lightning", "coming/lightning", "transformers", "accelerate")
}
"""Pages whose changes the scripts of tests/on_slurm/frameworks have."""
RUN_BY = {
    "docs/python.md": "tests/test_docs_python.py",
    "docs/start.md": "tests/test_start_page.py",
    "docs/resumable.md": "tests/test_examples.py",
    "docs/scripts.md": "tests/test_scripts_page.py",
    "docs/tutorial.md": "tests/test_tutorial.py",
}
OTHERS = [f"docs/coming/{name}.md" for name in ("nemo-run", "submitit")]
"""Pages whose Python is for another tool."""
NOT_PRINTED = {
    "CONTRIBUTING.md": "the floors: a test of their own",
    "benchmarks/README.md": "the machine that was measured",
}
SHORT = (
    *(" failed first: ", "clusterddp explain ", "test accuracy ", " cannot create a run: "),
    *(", called from ", " other nodes", " have their defaults; ", "running for "),
    *("to remove: ", "BEST-TRIAL", "clusterddp report ", "waits for "),
)
NCCL = "NCCL version "
"""NCCL's own lines begin so."""
"""What the code prints in messages that are mostly names."""


class Block(NamedTuple):
    page: str
    line: int
    language: str
    text: str


@cache
def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, each with what its language and its first line make it."""
    fenced = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    name, made = str(page.relative_to(ROOT)), []
    for each in fenced.finditer(page.read_text()):
        line = each.string.count("\n", 0, each.start()) + 1
        made += [Block(name, line, kind, text) for kind, text in kinds(each[1], each[2])]
    return made


def kinds(language: str, text: str) -> Iterator[tuple[str, str]]:
    """What a block holds: a console's lines are commands, after `$`, and what they print."""
    if language == "console":
        yield "shell", "".join(f"{line}\n" for line in re.findall(r"^\$ (.*)$", text, re.MULTILINE))
        yield "shown", re.sub(r"^\$ .*\n", "", text, flags=re.MULTILINE)
    elif language == "bash":
        yield "sbatch" if re.match(r"#!/bin/bash|#SBATCH ", text) else "shell", text
    elif language == "text":
        yield "tree" if re.match(r"\S+/ +\S", text) else "shown", text
    else:
        yield language, text


ALL = [block for page in PAGES for block in blocks(page)]


def of_language(language: str) -> list[Block]:
    return [block for block in ALL if block.language == language]


def of(language: str) -> Any:
    chosen = of_language(language)
    return pytest.mark.parametrize("block", chosen, ids=[f"{b.page}:{b.line}" for b in chosen])


def test_every_block_has_a_language_that_is_held() -> None:
    fences = re.compile(r"^```(\S*)\n.*?^```$", re.MULTILINE | re.DOTALL)
    for page in PAGES:
        text = page.read_text()
        assert {*fences.findall(text)} <= LANGUAGES, page
        indented = re.search(r"^[^\s*\d-].*\n\n    \S.*", fences.sub("", text), re.MULTILINE)
        assert not indented, f"{page}: an indented block: {indented}"
    assert {block.page for block in of_language("diff")} == {*EXAMPLES, *FRAMEWORKS, "README.md"}


def test_the_changes_of_the_readme_are_those_of_the_resumable_page() -> None:
    [short] = [b.text for b in of_language("diff") if b.page == "README.md"]
    changes = re.findall(r"^[+-].+$", short, re.MULTILINE)
    page = (ROOT / "docs/resumable.md").read_text()
    assert len(changes) > 5 and [line for line in changes if line not in page] == []


@pytest.fixture
def desk(workplace: Workplace) -> Workplace:
    """A directory with all that the pages' commands name, and a Slurm whose queue is empty."""
    shutil.copytree(ROOT / "examples", workplace.folder, dirs_exist_ok=True)
    for name in re.findall(r"\b[\w-]+\.(?:py|sif|sbatch|tgz)\b", "\n".join(b.text for b in ALL)):
        (workplace.folder / name).touch()
    (workplace.folder / "package").mkdir()
    (workplace.folder / "package" / "module.py").write_text("def function(): ...\n")
    for block in of_language("toml"):
        (workplace.folder / block.text.split()[1].rstrip(":")).write_text(block.text)
    for name in ("pretrain", "big", "RUN"):
        workplace.run(name, submitted("7"), ended("7", 75))
    sweep = workplace.sweep("lr", ("lr",), *((str(n),) for n in range(4)))
    shutil.copy(workplace.root / "big" / "spec.json", sweep.trial(3).spec)
    for name in ("squeue", "python", "torchrun"):
        workplace.command(name, "exit 0")
    workplace.monkeypatch.setenv("WANDB_API_KEY", "a value")  # a page exports it
    return workplace


def test_a_shell_takes_every_command_and_clusterddp_its_arguments(desk: Workplace) -> None:
    """A submission is dry-run as it stands; of another command the arguments are read."""
    wrong = []
    for block in of_language("shell"):
        bash_takes(block.text)
        for line in block.text.replace("\\\n", "").splitlines():
            refused = refusal(desk, line)
            wrong += [f"{block.page}:{block.line}: {line}: {refused}"] if refused else []
    assert not wrong, "\n".join(wrong)


def refusal(desk: Workplace, line: str) -> str:
    """Why a line cannot be typed; empty where it can, and of a pattern such as `[OPTIONS]`."""
    for module in re.findall(r"\bpython3? -m ([\w.]+)", line):
        if not importlib.util.find_spec(module):
            return f"there is no module {module}"
    for typed in commands_of(line):
        words = ["1" if word == "N" else word.rstrip("…") for word in typed if word != "…"]
        if "[OPTIONS]" not in words:
            try:
                (dry_run if words[0] == "submit" else read_arguments)(desk, words)
            except (AssertionError, click.ClickException) as error:
                return str(error)
    return ""


def dry_run(desk: Workplace, words: list[str]) -> None:
    place = [*words, "--"].index("--")
    options = [word for word in words[:place] if word not in ("--wait", "--test-only")]
    if "--save-config" in options:
        (desk.folder / options[options.index("--save-config") + 1]).unlink()
    got = desk.invoke(*options, "--dry-run", *words[place:])
    assert got.code == 0, got.err


def read_arguments(_: Workplace, words: list[str]) -> None:
    command: click.Command | None = cli
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        command, words = command.get_command(click.Context(command), words[0]), words[1:]
    assert command is not None, "there is no such command"
    command.make_context("", words, **cli.context_settings)


def bash_takes(script: str) -> None:
    done = subprocess.run([BASH, "-n"], input=script, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), script


@of("sbatch")
def test_a_batch_script_is_bash_with_directives_that_sbatch_has(block: Block) -> None:
    bash_takes(block.text)
    read = sbatch_file.read(block.text).directives
    assert len({each.line for each in read}) == block.text.count("#SBATCH ")
    assert all(each.is_read and not sbatch_file.nearest_name(each.name) for each in read)


def test_import_prints_what_its_page_shows(workplace: Workplace) -> None:
    script, line, notes = (b.text for b in blocks(ROOT / "docs/import.md")[1:])
    (workplace.folder / "job.sbatch").write_text(script)
    got = workplace.invoke("import", "job.sbatch")
    assert (got.out, got.err) == (line, notes)


def test_check_prints_what_its_page_shows(workplace: Workplace) -> None:
    [shown] = [b for b in blocks(ROOT / "docs/check.md") if b.language == "shown"]
    [line] = re.findall(r"^ +is: +(.*)$", shown.text, re.MULTILINE)
    script = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --time=10\n#SBATCH --ntasks-per-node=1\n"
    (workplace.folder / "job.sbatch").write_text(f"{script}\n\n\n{line}\n")
    assert shown.text.strip() in workplace.invoke("check", "job.sbatch").out


@of("ini")
def test_a_site_cfg_has_keys_that_there_are(block: Block, tmp_path: Path) -> None:
    path = tmp_path / "site.cfg"
    path.write_text(block.text)
    for section in [None, *re.findall(r"^\[cluster:(\w+)\]", block.text, re.MULTILINE)]:
        assert read_site(path, section, OPTIONS).values


@of("jinja")
def test_a_template_gives_a_script(block: Block, desk: Workplace) -> None:
    (desk.folder / "own.sbatch.j2").write_text(block.text)
    got = desk.invoke("submit", "--nodes=1", "--template", "./own.sbatch.j2", "--dry-run")
    assert got.code == 0, got.err
    own = [line for line in block.text.splitlines() if not line.startswith("{")]
    assert all(line in got.out.splitlines() for line in own)
    bash_takes(got.out)


@of("python")
def test_python_compiles_and_what_it_imports_of_us_is_there(block: Block) -> None:
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("clusterddp"):
            module = importlib.import_module(str(node.module))
            assert all(hasattr(module, each.name) for each in node.names)
    if block.page in RUN_BY:
        assert Path(block.page).name in (ROOT / RUN_BY[block.page]).read_text()
    else:
        assert block.page in ("docs/signals.md", "docs/sweeps.md", *OTHERS), "no test runs it"


def test_the_lines_of_the_sweeps_page_record_a_metric(tmp_path: Path) -> None:
    [block] = [b for b in of_language("python") if b.page == "docs/sweeps.md"]
    script = f"import torch\nmodel, accuracy = torch.nn.Linear(1, 1), 0.875\n{block.text}"
    forked.run("-c", script, cwd=tmp_path).check_returncode()
    [metrics] = tmp_path.glob("jobs/*/metrics.jsonl")
    assert json.loads(metrics.read_text().splitlines()[-1])["accuracy"] == 0.875


def test_the_script_of_the_signals_page_saves_exits_and_resumes(tmp_path: Path) -> None:
    [block] = [b for b in of_language("python") if b.page == "docs/signals.md"]
    signalled = block.text.replace(
        "# train", "; step == 500 and signal.raise_signal(signal.SIGTERM)"
    )
    assert signalled != block.text
    for script, code, said in ((signalled, 75, ""), (block.text, 0, "done at step 10000\n")):
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=tmp_path, env={**os.environ, "RANK": "0"},
            capture_output=True, text=True, timeout=PATIENCE, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (code, said), done.stderr
        assert (tmp_path / "state-0").read_text() == "500"


@pytest.mark.parametrize("page", OTHERS)
def test_the_python_of_another_tool_runs_with_a_stand_in_for_it(
    page: str, workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of submitit, which the tests need anyway, `submit` alone is a stand-in's."""
    workplace.command("srun", "exit 0")
    monkeypatch.setattr(submitit.AutoExecutor, "submit", MagicMock())
    [block] = [b for b in of_language("python") if b.page == page]
    for node in ast.walk(ast.parse(block.text)):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            if name.split(".")[0] not in {*sys.stdlib_module_names, "submitit"}:
                monkeypatch.setitem(sys.modules, name, MagicMock())
    exec(compile(block.text, page, "exec"), {"model": None})


@of("tree")
def test_a_tree_has_names_that_the_code_has(block: Block) -> None:
    """Those in its first column, but for what stands for a run, a number, a version."""
    column = re.findall(r"^ {0,9}((?:[^\s,]+, )*[^\s,]+) ", block.text, re.MULTILINE)
    parts = re.split(r"[\s,/]+|<\w+>|\blr\b|-?\d+\b|\b[RN]+\b|\bJOB\b", " ".join(column))
    texts = "\n".join(texts_of_the_code())
    assert [part for part in parts if part not in texts] == []


def test_the_floors_are_those_of_the_package() -> None:
    [floors] = [b.text for b in of_language("shown") if b.text.startswith("cli ")]
    ours = [*(ROOT / "clusterddp").iterdir()]
    assert {*re.findall(r"^(\w+)  ", floors, re.MULTILINE)} <= {path.stem for path in ours}
    packages = {path.name for path in ours if (path / "__init__.py").is_file()}
    assert [name for name in packages if not re.search(rf"\b{name}\b", floors)] == []


@cache
def texts_of_the_code() -> tuple[str, ...]:
    """What strings of the package hold, docstrings left out."""
    found: list[str] = []
    for path in (ROOT / "clusterddp").rglob("*.py"):
        tree = ast.parse(path.read_text())
        said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        found += [
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
            if id(node) not in said
        ]
    return tuple(found)


@cache
def messages() -> frozenset[tuple[str, ...]]:
    """Strings of the package, and click's own: the parts of each between its values, in order.

    Those of fewer than two words in a row would be found anywhere.
    """
    found = set()
    for path in ((ROOT / "clusterddp").rglob("*.py"), [Path(click.exceptions.__file__)]):
        for tree in (ast.parse(each.read_text()) for each in path):
            nodes = [*ast.walk(tree)]
            known = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
            for node in nodes:  # an f-string ahead of its parts
                values = node.values if isinstance(node, ast.JoinedStr) else [node]
                if id(node) not in known:
                    constants = [v.value if isinstance(v, ast.Constant) else "{}" for v in values]
                    found.add(parts_of("".join(c for c in constants if isinstance(c, str))))
                known.update(map(id, values))
    return frozenset(parts for parts in found if any(len(words(part)) > 1 for part in parts))


def parts_of(message: str) -> tuple[str, ...]:
    """The parts of a message between its values, those without a word left out."""
    parts = re.split(r"\{[^}]*\}|%\w| \[CD\d+\]", message)
    return tuple(" ".join(part.split()) for part in parts if words(part))


def words(text: str) -> list[re.Match[str]]:
    return [*re.finditer(r"[A-Za-z][a-z'-]+", text)]


def places(parts: tuple[str, ...], text: str) -> list[tuple[int, int]]:
    """Where all parts of a message stand in a text, in order; it may be cut off by an ellipsis."""
    found: list[tuple[int, int]] = []
    for part in parts:
        begin = found[-1][1] if found else 0
        at = text.find(part, begin)
        if at < 0:
            ends = [each.start() for each in re.finditer(" *…", text) if each.start() >= begin]
            for end in ends:
                shown = text[begin:end]
                size = next(n for n in range(len(part), -1, -1) if shown.endswith(part[:n]))
                if len(words(part[:size])) > 1:
                    return [*found, (end - size, end)]
            is_known = any(len(words(each)) > 1 for each in parts[: len(found)])
            return found if ends and is_known else []
        found.append((at, at + len(part)))
    return found


def share_printed(text: str) -> float:
    """The share of a text's words that stand in messages: names and errors of others are values."""
    text = " ".join(re.sub(r"\[CD\d+\]", "", text).split())
    spans = [place for parts in messages() for place in places(parts, text)]
    own = [any(a <= w.start() and w.end() <= b for a, b in spans) for w in words(text)]
    return sum(own) / max(len(own), 1)


def is_printed(text: str) -> bool:
    return share_printed(text) > 1 / 3 or any(phrase in text for phrase in SHORT)


def test_what_is_shown_is_what_the_code_prints() -> None:
    shown = [b for b in of_language("shown") if b.page not in NOT_PRINTED]
    ours = [b for b in shown if not b.text.startswith(NCCL)]
    assert [f"{b.page}:{b.line}: {b.text}" for b in ours if not is_printed(b.text)] == []
    assert [each for each in SHORT if not any(each in text for text in texts_of_the_code())] == []
    assert not is_printed("rank 3 on h02 was the one to go wrong first, by its own ValueError")
    for end in ("", ". …", " … [CD0504]"):
        moon = "clusterddp: the moon cannot be written: cheese everywhere, apples too"
        assert not is_printed(moon + end)
