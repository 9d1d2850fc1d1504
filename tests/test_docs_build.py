"""The pages that are made from the code, the site and the man pages."""

import html
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import docs_build
from clusterddp import errors
from clusterddp.cli.main import cli

ROOT = Path(__file__).parents[1]


def test_the_reference_is_what_the_code_says() -> None:
    made = docs_build.reference()
    kept = {path.name: path.read_text() for path in docs_build.REFERENCE.iterdir()}
    assert kept == made, "run: python -m docs_build reference"
    assert docs_build.ERRORS.read_text() == docs_build.errors_page()


def test_the_reference_names_every_command_and_option() -> None:
    made = docs_build.reference()
    headings = re.findall(r"^##+ clusterddp (.*)$", made["commands.md"], re.MULTILINE)
    assert {"submit", "data fetch", "bad-nodes clear"} <= {*headings}
    for option in ("--nodes, -N N", "--lr X", "--requeue"):
        assert f"| `{option}" in made["options.md"]
    assert "| `SBATCH_TIMELIMIT`" not in made["options.md"]  # it is --time's
    assert "<br><small>`#SBATCH --time`, `SBATCH_TIMELIMIT`</small> |" in made["options.md"]
    assert "| `--requeue[=expedite], --no-requeue` |" in made["options.md"]
    assert "| `--no-requeue` |" not in made["options.md"]
    assert "\\`" not in "".join(made.values())  # code is code
    assert "### NodesMarkedBad\n\n`nodes_marked_bad`: Nodes marked bad" in made["fields.md"]


def test_the_page_of_the_exit_codes_has_every_error() -> None:
    text = (ROOT / "docs/endings.md").read_text()
    listed = re.findall(r"^\| `(\w+Error)` \| (\d+) \|", text, re.MULTILINE)
    classes = [each for each in vars(errors).values() if inspect.isclass(each)]
    ours = [each for each in classes if issubclass(each, errors.ClusterDDPError)]
    assert listed == [(each.__name__, str(each.exit_code)) for each in ours]


def test_every_option_has_words_and_shows_its_default() -> None:
    made = docs_build.reference()
    for page, least in (("options.md", 110), ("commands.md", 80)):
        rows = re.findall(r"^\| `-.*$", made[page], re.MULTILINE)
        assert len(rows) > least
        assert [row for row in rows if row.endswith("|  |")] == []
    assert "| `--check-python, --no-check-python` | off |" in made["options.md"]
    assert "| `--tasks-per-node, --ntasks-per-node N` | one per GPU, or one |" in made["options.md"]
    for name, command in docs_build.commands():
        for option in command.params:
            value = isinstance(option, click.Option) and not option.hidden and option.default
            if isinstance(value, str | int | float) and not isinstance(value, bool):
                assert option.show_default, (name, option.opts)


@pytest.mark.parametrize("name", ["clusterddp", *(name for name, _ in docs_build.commands())])
def test_no_line_of_help_is_wider_than_80_columns(name: str) -> None:
    for flag in ("--help", "--help-all") if name == "clusterddp submit" else ("--help",):
        shown = CliRunner().invoke(cli, [*name.split()[1:], flag], env={"COLUMNS": "80"}).output
        assert [line for line in shown.splitlines() if len(line) > 80] == []


def test_every_field_has_words() -> None:
    rows = re.findall(r"^\| `.*$", docs_build.reference()["fields.md"], re.MULTILINE)
    assert len(rows) > 250
    assert [row for row in rows if row.endswith("|  |")] == []


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The site: that which CLUSTERDDP_TEST_SITE names, which CI has just built, or built here."""
    if built := os.environ.get("CLUSTERDDP_TEST_SITE"):
        return Path(built)
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    done = subprocess.run(
        [sys.executable, "-m", "docs_build", "site", str(tmp_path / "site")],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return tmp_path / "site"


def test_the_site_has_all_pages_and_every_link_leads_somewhere(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        assert (site / page.relative_to(ROOT / "docs").with_suffix(".html")).is_file()
    assert '<h3 id="cd0101">CD0101: Invalid command line' in (site / "errors.html").read_text()
    assert 'href="examples/one_device.py"' in (site / "from-one-device.html").read_text()
    assert "<code>--template NAME|FILE</code>" in (site / "reference/options.html").read_text()


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    """Not even the search, which the plugin `offline` would give a script of unpkg.com."""
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert (
            re.findall('<(?:script|link|img|iframe)[^>]*(?:src|href)="(?:https?:)?//', text) == []
        )
        assert re.search('<script src="[./]*iframe-worker.js">', text), page
    assert (site / "iframe-worker.js").is_file()


def test_a_link_that_leads_nowhere_fails_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    for name in ("docs", "examples", "benchmarks"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("mkdocs.yml", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    with (tmp_path / "docs" / "start.md").open("a") as page:
        page.write("\n[1](life.md#nowhere) [2](nothing.md) [3](../examples/none.py)\n")
    monkeypatch.setattr(docs_build, "ROOT", tmp_path)
    with pytest.raises(SystemExit) as left:
        docs_build.main(["site", str(tmp_path / "site")], standalone_mode=False)
    assert left.value.code == 1
    warned = [line for line in capfd.readouterr().err.splitlines() if line.startswith("WARNING")]
    for broken in ("life.md#nowhere", "nothing.md", "examples/none.py"):
        assert [broken in line for line in warned].count(True) == 1, warned


def headings(page: Path) -> set[str]:
    """The anchors of a page as GitHub makes them: its readers follow the links, too."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    titles = re.findall(r"^#+ (.*?) *$", shown, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_links_of_every_page_lead_to_files_and_headings_in_the_repository_too() -> None:
    wrong = []
    tracked = ["*.md", *(f"{each}/**/*.md" for each in ("docs", "examples", "benchmarks", "tests"))]
    for page in (path for pattern in tracked for path in ROOT.glob(pattern)):
        links = re.findall(r"\]\((?!\w+:)([^)#\s]*)#?([^)\s]*)\)", page.read_text())
        for name, anchor in links:
            target = page.parent / name if name else page
            if not target.exists() or (anchor and anchor not in headings(target)):
                wrong.append(f"{page.relative_to(ROOT)}: {name}#{anchor}")
        for name in re.findall(r"`((?:docs|tests|clusterddp|\.ci)/[\w/.-]+)`", page.read_text()):
            if page.parent.name != "coming" and page.name != "CHANGELOG.md":
                wrong += [] if (ROOT / name).exists() else [f"{page.relative_to(ROOT)}: {name}"]
    assert not wrong


def test_the_drawn_session_has_its_commands_and_fetches_nothing() -> None:
    drawn = docs_build.SESSION_SVG.read_text()
    text = html.unescape(re.sub("<[^>]+>", "", drawn)).replace("\xa0", " ")
    assert [line for line in docs_build.SESSION if f"$ {line}" not in text] == []
    names = {"http://www.w3.org/2000/svg", "https://www.textualize.io"}  # nobody fetches them
    assert {*re.findall(r"https?://[\w./]+", drawn)} <= names


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The man pages, made by a process in which no command has been parsed yet, as for a wheel."""
    folder = tmp_path_factory.mktemp("man")
    subprocess.run([sys.executable, "-m", "docs_build", "man", folder], cwd=ROOT, check=True)
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_man_pages_escape_what_man_would_take_for_its_own(pages: dict[str, str]) -> None:
    assert {"clusterddp.1", "clusterddp-submit.1", "clusterddp-data-fetch.1"} <= {*pages}
    known = {"TH", "SH", "PP", "TP", "BR", "nf", "fi", "nh", "ad"}
    for name, text in pages.items():
        requests = {line[1:3] for line in text.splitlines() if line.startswith((".", "'"))}
        assert requests <= known, name
    assert r"\fB\-\-gpus\-per\-node [TYPE:]N\fR" in pages["clusterddp-submit.1"]


def test_each_man_page_has_its_sections(pages: dict[str, str]) -> None:
    usual = ["NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "EXIT STATUS", "SEE ALSO"]
    for name, text in pages.items():
        sections = re.findall(r"^\.SH (.*)$", text, re.MULTILINE)
        group = name in ("clusterddp-data.1", "clusterddp-templates.1")  # which end with nothing
        if name != "clusterddp.1":
            assert sections == [each for each in usual if each != "EXIT STATUS" or not group], name
        assert "Exit codes" not in text, name
        assert r"\fB\-h, \-\-help\fR" in text, name
        named = re.findall(r"^\.BR (\S+) \(1\)", text.replace("\\", ""), re.MULTILINE)
        assert named and {f"{each}.1" for each in named} <= {*pages}, name
    assert "[RUN]" not in pages["clusterddp-logs.1"].partition(".SH OPTIONS")[2]
    assert ".BR clusterddp\\-data\\-fetch (1)" in pages["clusterddp-data.1"]


@pytest.mark.skipif(not shutil.which("groff"), reason="groff shows man pages")
def test_groff_finds_nothing_wrong_with_the_man_pages(
    pages: dict[str, str], tmp_path: Path
) -> None:
    for name, text in pages.items():
        (tmp_path / name).write_text(text)
    shown = subprocess.run(
        ["groff", "-man", "-ww", "-Tutf8", "-K", "utf8", *sorted(tmp_path.iterdir())],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert shown.stderr == ""
    assert "--gpus-per-node" in re.sub("\x1b\\[[0-9;]*m|.\x08", "", shown.stdout)
