"""Codes of messages: none is forgotten, each has its page, and docs/errors.md is made of these."""

import ast
import functools
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterddp import errors
from clusterddp.explained import FOLDER, catalogue, code_of, find, is_code, with_words
from clusterddp.launchers import SHIPPED, full_name
from clusterddp.run.events import Cause
from clusterddp.status import end_codes

ROOT = Path(__file__).parent.parent
CODE = re.compile(r"\bCD\d{4}\b")


@functools.cache
def sources() -> dict[Path, ast.Module]:
    """The package's modules; read when a test asks, as seconds would be lost at each collection."""
    paths = sorted((ROOT / "clusterddp").rglob("*.py"))
    return {path: ast.parse(path.read_text()) for path in paths}


def calls(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else ""
            yield getattr(function, "id", name), node


def last_words(message: ast.expr) -> str:
    """The end of a message, as far as it is written out: also where `coded` adds it.

    The code of an error that is passed on stands for any.
    """
    if ast.unparse(message) == "error.code":
        return "CD0000"
    if isinstance(message, ast.Call) and getattr(message.func, "id", "") == "coded":
        return f" [{last_words(message.args[1])}]"
    if isinstance(message, ast.JoinedStr):
        message = message.values[-1]
    return str(message.value) if isinstance(message, ast.Constant) else ""


def test_the_end_of_a_message_is_its_code() -> None:
    error = errors.RequestError("no such run [CD0501]")
    assert (str(error), error.code, errors.coded(error)) == (
        "no such run", "CD0501", "no such run [CD0501]",
    )  # fmt: skip
    assert errors.SlurmError("squeue: no answer").code == "CD0401"
    assert errors.OptionError("--sweep", " lr: no values").code == "CD1101"
    assert errors.RequestError(str(error), code=error.code).code == "CD0501"
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.code) == ("no such run", "CD0501")


def family() -> dict[str, str]:
    """The classes of our errors, also those of single modules, and their codes."""
    known = {"ClusterDDPError": errors.ClusterDDPError.code}
    classes = [n for tree in sources().values() for n in tree.body if isinstance(n, ast.ClassDef)]
    for _ in range(4):  # as deep as the classes derive
        for each in classes:
            bases = [base.id for base in each.bases if isinstance(base, ast.Name)]
            for base in set(bases) & set(known):
                own = [
                    statement.value.value
                    for statement in each.body
                    if isinstance(statement, ast.Assign)
                    and getattr(statement.targets[0], "id", "") == "code"
                    and isinstance(statement.value, ast.Constant)
                ]
                known[each.name] = str(own[0]) if own else known[base]
    return known


def test_every_error_and_warning_has_a_code() -> None:
    classes, forgotten = family(), []
    assert classes["RequeueRefused"] == "CD0406" and not classes["RequestError"]
    for path, tree in sources().items():
        for name, call in calls(tree):
            is_warning = ast.unparse(call.func) in ("log.warning", "warning")
            if not is_warning and (name not in classes or classes[name]):
                continue
            given = any(keyword.arg == "code" for keyword in call.keywords)
            ends = any(re.search(r" \[CD\d{4}\]$", last_words(each)) for each in call.args)
            if not given and not ends:
                forgotten.append(f"{path}:{call.lineno}: {name} without a code")
    assert not forgotten, "\n".join(forgotten)


def test_every_cause_of_an_end_has_a_code() -> None:
    """A failure has one by its words, and a run that is done needs none."""
    assert {*Cause} - {*end_codes.BY_CAUSE} == {Cause.DONE, Cause.FAILED}


def test_every_code_has_its_page_and_every_page_its_code() -> None:
    used = {
        code
        for path, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for code in CODE.findall(node.value)
        if "explain" not in path.parts[-1] and path.parent != FOLDER
    } - {"CD0123"}  # that of docstrings
    assert used == set(catalogue())


def test_every_page_is_whole() -> None:
    for page in catalogue().values():
        assert all((page.title, page.cause, page.check, page.remedy, page.example)), page.code
        assert "`" in page.check or "message" in page.check.lower(), f"{page.code}: a command"
        assert not page.title.endswith("."), page.code
        assert page.code in page.example, f"{page.code}: the example ends with it"
        commands = re.findall(r"`[^`]+`", page.text.partition("```text")[0])
        assert not any("\n" in command for command in commands), f"{page.code}: copied whole"
        for named in CODE.findall(page.text):
            assert named in catalogue(), f"{page.code} names {named}"
        typed = " ".join(commands)
        for template in re.findall(r"--template ([a-z][\w.-]*)", typed):
            assert full_name(template) in SHIPPED, f"{page.code} names {template}"
        for document in re.findall(r"docs/([\w-]+\.md)", page.text):
            assert (ROOT / "docs" / document).is_file(), f"{page.code} names {document}"


@pytest.mark.parametrize("asked", ["CD0401", "cd401", "401", "[CD0401]", "0401"])
def test_a_code_is_found_as_it_is_typed(asked: str) -> None:
    assert code_of(asked) == "CD0401"


def test_pages_are_found_by_their_words() -> None:
    assert "CD0903" in [page.code for page in with_words(["Firewall", "interface"])]
    assert [page.code for page in find(["cd1212", "401"])] == ["CD1212", "CD0401"]
    assert find(["75"]) == with_words(["75"]) and len(find([])) == len(catalogue())
    assert "CD1211" in [page.code for page in with_words(["exit code", "137"])]
    assert with_words(["no page has these"]) == [] and code_of("firewall") == ""
    assert is_code("CD0419") and not is_code("") and not is_code("137")


def test_the_docs_name_no_code_that_there_is_not() -> None:
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = path.read_text()
        assert set(CODE.findall(text)) <= set(catalogue()), path.name
        anchors = re.findall(r"errors\.md#([\w-]+)", text)
        assert {anchor.upper() for anchor in anchors} <= set(catalogue()), path.name
