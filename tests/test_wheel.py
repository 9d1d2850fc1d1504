"""What the wheels carry: the package, and the templates inside it."""

import importlib.util
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from clusterddp.version import __version__

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("wheel"))


def build(project: Path, folder: Path) -> Path:
    pytest.importorskip("hatchling", reason="builds the wheel without a network")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=project, check=True, capture_output=True,
    )  # fmt: skip
    [built] = folder.glob("*.whl")
    return built


def test_the_wheel_holds_the_templates_and_sites_where_the_package_looks_for_them(
    wheel: Path,
) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for template in (ROOT / "templates").glob("*.j2"):
        assert f"clusterddp/templates/{template.name}" in names
    for site in (ROOT / "clusterddp" / "sites").glob("*.cfg"):
        assert f"clusterddp/sites/{site.name}" in names
    assert not [name for name in names if "__pycache__" in name]
    assert "clusterddp/cli/commands/submit.py" in names
    pages = ("page.html.j2", "parts.html.j2", "sweep.html.j2", "page.css")
    assert {f"clusterddp/reporting/{page}" for page in pages} <= names
    assert "clusterddp/explained/04-slurm.md" in names
    assert not [name for name in names if name.startswith(("tests/", "jobs/", "benchmarks/"))]


def test_the_wheel_brings_the_man_pages_to_where_man_looks(wheel: Path) -> None:
    names = [name.partition(".data/data/")[2] for name in zipfile.ZipFile(wheel).namelist()]
    assert {"share/man/man1/clusterddp.1", "share/man/man1/clusterddp-submit.1"} <= {*names}


def test_the_description_has_links_only_where_there_is_an_address(wheel: Path) -> None:
    """A package index shows the README by itself: no file of the repository is beside it."""
    from hatch_build import with_address  # imports hatchling

    metadata = zipfile.ZipFile(wheel).read("clusterddp-" + __version__ + ".dist-info/METADATA")
    page = metadata.decode()
    assert "# clusterddp" in page and "see limitations." in page
    assert not re.search(r"\]\((?!http)", page)
    text = (ROOT / "README.md").read_text()
    linked = with_address(text, "https://example.org/blob/")
    assert "[limitations](https://example.org/blob/docs/limitations.md)" in linked
    assert linked.count("](https:") == text.count("](")


def test_templates_are_found_from_an_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = "from clusterddp.launchers.sbatch import shipped_folder; print(shipped_folder())"
    shown = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(tmp_path / "site")}, cwd=tmp_path,
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    assert shown.strip() == str(tmp_path / "site/clusterddp/templates")


def test_the_client_starts_where_nothing_else_is_installed(tmp_path: Path) -> None:
    """-S: Python without its site-packages, among them torch."""
    site, tools, work = (tmp_path / name for name in ("site", "bin", "work"))
    zipfile.ZipFile(build(ROOT / "client", tmp_path)).extractall(site)
    for name in ("click", "jinja2", "markupsafe", *(["tomli"] * (sys.version_info < (3, 11)))):
        spec = importlib.util.find_spec(name)
        assert spec and spec.origin
        (site / name).symlink_to(Path(spec.origin).parent)
    for folder in (tools, work):
        folder.mkdir()
    (tools / "ssh").write_text("#!/bin/sh\nexit 255\n")
    (tools / "ssh").chmod(0o755)

    def run(*argv: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-S", "-m", "clusterddp", *argv],
            env={"PYTHONPATH": str(site), "PATH": str(tools), "HOME": str(tmp_path)},
            cwd=work, capture_output=True, text=True, check=False,
        )  # fmt: skip

    assert "submit" in run("--help").stdout
    for command in (["runs"], ["submit", "--nodes", "2", "--", "python", "train.py"]):
        answer = run("--on", "near", *command)
        assert answer.returncode == 1
        assert "Nothing was done there" in answer.stderr
    assert "torch" not in " ".join(each.name for each in site.iterdir())
