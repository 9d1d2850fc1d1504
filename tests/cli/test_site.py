"""`site` says what is in force and where it came from."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from clusterddp.cli.main import cli
from clusterddp.cli.settings import setting_names


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    return tmp_path


def test_every_setting_is_shown_with_its_source(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (elsewhere / "site.cfg").write_text(
        "[defaults]\ntime = 60\npartition = a\nsetup =\n    echo 1\n    echo 2\n"
        "[cluster:big]\npartition = b\n[environment]\nA = 1\n"
    )
    monkeypatch.setenv("SBATCH_ACCOUNT", "physics")
    monkeypatch.setenv("CLUSTERDDP_NODES", "3")
    shown = json.loads(CliRunner().invoke(cli, ["site", "--cluster", "big", "--json"]).output)
    path = elsewhere / "site.cfg"
    assert shown["site"] == str(path)
    assert shown["environment"] == {"A": "1"}
    settings = shown["settings"]
    assert set(settings) == setting_names()
    assert settings["time"] == {"value": "60", "source": f"{path} [defaults]"}
    assert settings["partition"] == {"value": "b", "source": f"{path} [cluster:big]"}
    assert settings["setup"] == {"value": ["echo 1", "echo 2"], "source": f"{path} [defaults]"}
    assert settings["account"] == {"value": "physics", "source": "SBATCH_ACCOUNT"}
    assert settings["nodes"] == {"value": 3, "source": "CLUSTERDDP_NODES"}
    assert settings["gpus-per-node"] == {"value": "0", "source": "default"}


def test_the_table_for_people_names_the_same_sources(elsewhere: Path) -> None:
    (elsewhere / "site.cfg").write_text("[defaults]\ntime = 60\n")
    lines = CliRunner().invoke(cli, ["site"]).output.splitlines()
    assert lines[0] == f"site.cfg: {elsewhere / 'site.cfg'}"
    time = next(line for line in lines if line.startswith("time "))
    assert time.split() == ["time", "60", str(elsewhere / "site.cfg"), "[defaults]"]


def test_without_a_site_cfg_it_says_so() -> None:
    assert CliRunner().invoke(cli, ["site"]).output.startswith("site.cfg: none found\n")
