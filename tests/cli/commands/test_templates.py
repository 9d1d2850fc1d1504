"""`templates` lists, shows and copies what `submit` would use."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from clusterddp.cli.main import cli
from clusterddp.errors import RequestError
from clusterddp.launchers import SHIPPED
from clusterddp.launchers.sbatch import shipped_folder


def test_the_listed_templates_are_those_shipped_for_a_person() -> None:
    listed = CliRunner().invoke(cli, ["templates", "list"]).output
    shipped = {path.name for path in shipped_folder().glob("*.j2")} - {"_submitit.sbatch.j2"}
    assert set(SHIPPED) == shipped
    for name in shipped:
        assert name in listed


@pytest.mark.parametrize("name", SHIPPED)
def test_show_prints_the_file(name: str) -> None:
    shown = CliRunner().invoke(cli, ["templates", "show", name])
    assert shown.output == (shipped_folder() / name).read_text()
    short = name.removesuffix(".sbatch.j2")
    assert CliRunner().invoke(cli, ["templates", "show", short]).output == shown.output


def test_a_copy_renders_like_the_original(tmp_path: Path) -> None:
    copied = CliRunner().invoke(cli, ["templates", "copy", "ddp.sbatch.j2", str(tmp_path)])
    assert copied.stdout.splitlines()[0] == str(tmp_path / "ddp.sbatch.j2")
    common = ["submit", "--dry-run", "--run-name", "a", "--", "true"]
    own = CliRunner().invoke(cli, [*common[:-2], "--template-dir", str(tmp_path), *common[-2:]])
    assert own.output == CliRunner().invoke(cli, common).output


def test_a_file_that_is_there_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    result = CliRunner().invoke(cli, ["templates", "copy", "ddp.sbatch.j2", str(tmp_path / "mine")])
    assert isinstance(result.exception, RequestError)
    assert (tmp_path / "mine").read_text() == "mine"


def test_an_unknown_template_is_refused_with_the_known_ones() -> None:
    result = CliRunner().invoke(cli, ["templates", "show", "gone"])
    assert result.exit_code == 2
    assert "torchrun.sbatch.j2" in result.output
