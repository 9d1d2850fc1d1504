"""`site` shows the settings in effect and their sources."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from clusterddp.cli.main import cli
from clusterddp.errors import RequestError
from clusterddp.request.sites import read_sites
from clusterddp.request.spec import OPTIONS
from tests.cli.commands.test_submit import elsewhere

__all__ = ["elsewhere"]


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
    assert set(settings) == set(OPTIONS)
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


def test_defaults_are_listed_only_with_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTERDDP_NODES", "3")
    for argv, count in ((["site"], 1), (["site", "--all"], len(OPTIONS))):
        lines = CliRunner().invoke(cli, argv).output.splitlines()
        assert sum(line.endswith(("  default", "  CLUSTERDDP_NODES")) for line in lines) == count


def test_without_a_site_cfg_it_says_so() -> None:
    said, looked, *_ = CliRunner().invoke(cli, ["site"]).output.splitlines()
    assert said == "site.cfg: none found"
    assert looked.endswith("home/.config/clusterddp/site.cfg, /etc/clusterddp/site.cfg")


def test_the_files_that_another_one_hides_are_named(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = elsewhere / "home/.config/clusterddp/site.cfg"
    own.parent.mkdir(parents=True)
    own.write_text("[defaults]\npartition = a\n")
    assert "skipped" not in CliRunner().invoke(cli, ["site"]).output
    here = elsewhere / "site.cfg"
    here.write_text("# all comments\n")
    lines = CliRunner().invoke(cli, ["site"]).output.splitlines()
    assert lines[:2] == [f"site.cfg: {here}", f"skipped: {own}"]
    monkeypatch.setenv("CLUSTERDDP_SITE", "site.cfg")
    assert CliRunner().invoke(cli, ["site"]).output.splitlines()[1] == f"skipped: {own}"
    shown = json.loads(CliRunner().invoke(cli, ["site", "--site", str(own), "--json"]).output)
    assert (shown["site"], shown["ignored_files"]) == (str(own), [str(here)])


@pytest.mark.parametrize(
    ("content", "environment", "words"),
    [
        ("[defaults]\ntime = soon\n", {}, ["--time", "'soon'", "site.cfg [defaults]"]),
        ("[cluster:big]\nmem = lots\n", {}, ["--mem", "'lots'", "site.cfg [cluster:big]"]),
        ("[defaults]\nnodes = two\n", {}, ["'two'", "site.cfg [defaults]"]),
        ("[defaults]\nsignal = USR3\n", {}, ["--signal", "USR3"]),
        ("[defaults]\ntemplate = gone\n", {},
         ["--template: 'gone' does not exist", "site.cfg [defaults]"]),
        ("[defaults]\ntemplate-dir = /gone\n", {}, ["--template-dir", "/gone"]),
        ("[defaults]\ngpus-per-node = 4\n", {"SBATCH_TIMELIMIT": "x"}, ["SBATCH_TIMELIMIT"]),
        ("", {"CLUSTERDDP_PARTITION": "a b"}, ["'a b'", "CLUSTERDDP_PARTITION"]),
    ],
)  # fmt: skip
def test_a_value_that_is_none_is_refused_as_a_submission_would(
    content: str, environment: dict[str, str], words: list[str], elsewhere: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (elsewhere / "site.cfg").write_text(content or "[cluster:big]\n")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    cluster = ["--cluster", "big"] if "[cluster:big]" in content else []
    for form in ([], ["--json"]):
        result = CliRunner().invoke(cli, ["site", *cluster, *form])
        assert isinstance(result.exception, RequestError)
        for word in words:
            assert word in str(result.exception)
    assert [path.name for path in elsewhere.iterdir()] == ["site.cfg"]


def test_the_settings_are_shown_beside_the_refusal(elsewhere: Path) -> None:
    (elsewhere / "site.cfg").write_text("[defaults]\ntime = soon\npartition = a\n")
    shown = CliRunner().invoke(cli, ["site"]).output
    assert [line.split()[:2] for line in shown.splitlines() if line.startswith("partition")] == [
        ["partition", "a"]
    ]


def test_the_list_has_a_star_at_the_cluster_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "Frontier")
    lines = CliRunner().invoke(cli, ["site", "list"]).output.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("*")] == ["frontier"]
    assert lines.pop(0).split() == ["NAME", "CLUSTER", "TESTED"]
    assert len(lines) == len(read_sites()) and all("not tried" in line for line in lines)
    rows = json.loads(CliRunner().invoke(cli, ["site", "list", "--json"]).output)
    assert [row["name"] for row in rows] == list(read_sites())
    assert [row["name"] for row in rows if row["fits"]] == ["frontier"]
    assert set(rows[0]) == {"name", "title", "pages", "read", "tried", "hosts", "fits"}


def test_a_login_node_is_known_where_slurm_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_CLUSTER_NAME", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("socket.gethostname", lambda: "daint-ln003")
    rows = json.loads(CliRunner().invoke(cli, ["site", "list", "--json"]).output)
    assert [row["name"] for row in rows if row["fits"]] == ["daint"]


def test_a_file_in_use_is_in_force_unless_one_is_nearer(elsewhere: Path) -> None:
    place = elsewhere / "home" / ".config" / "clusterddp" / "site.cfg"
    done = CliRunner().invoke(cli, ["site", "use", "lumi"])
    assert (done.exit_code, done.stdout) == (0, f"{place}\n")
    assert "not tried" in done.stderr and "comes before" not in done.stderr
    shown = json.loads(CliRunner().invoke(cli, ["site", "--json"]).output)
    assert shown["site"] == str(place)
    assert shown["settings"]["partition"] == {
        "value": "standard-g",
        "source": f"{place} [defaults]",
    }
    (elsewhere / "site.cfg").write_text("[defaults]\n")
    again = CliRunner().invoke(cli, ["site", "use", "frontier", "--force"])
    assert f"the previous file is now {place}.old" in again.stderr
    assert f"{elsewhere / 'site.cfg'} takes precedence over it" in again.stderr


@pytest.mark.parametrize(
    "options", [["--site", "a.cfg"], ["--cluster", "big"], ["--json"], ["--site=a", "--json"]]
)
@pytest.mark.parametrize("what", [["list"], ["use", "lumi"]])
def test_an_option_that_would_be_ignored_is_refused(
    options: list[str], what: list[str], elsewhere: Path
) -> None:
    error = CliRunner().invoke(cli, ["site", *options, *what]).exception
    assert isinstance(error, RequestError) and error.exit_code == 2
    assert options[0].partition("=")[0] in str(error) and f"'{what[0]}'" in str(error)
    assert ("Put --json after" in str(error)) == (options == ["--json"] and what == ["list"])
    assert list(elsewhere.iterdir()) == []


def test_a_name_that_is_none_is_refused_with_the_nearest(elsewhere: Path) -> None:
    result = CliRunner().invoke(cli, ["site", "use", "perlmuter"])
    assert isinstance(result.exception, RequestError)
    assert "(did you mean 'perlmutter'?)" in str(result.exception)
    assert not (elsewhere / "home").exists()
