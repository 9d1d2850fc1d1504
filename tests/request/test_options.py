"""One row gives an option all its names; site.cfg is read strictly, its mistakes are named."""

import dataclasses
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from clusterddp.cli.main import cli
from clusterddp.cli.options import options
from clusterddp.errors import OptionError, RequestError
from clusterddp.request import options as table
from clusterddp.request.options import COUNT, PASSED_ON, Choice, check_fields, option, options_of
from clusterddp.request.spec import OPTIONS, REQUEST
from clusterddp.request.train_config import TRAINING, TrainConfig

SITE_CFG = Path(__file__).parent.parent.parent / "site.cfg"


@dataclasses.dataclass(frozen=True)
class Licences:
    """A record with options of each kind, as a new one would be added."""

    licences: int = option(1, "Licences to hold.", COUNT, "--licenses -L SBATCH_LICENSES N")
    server: str = option("near", "Server to ask.", Choice(("near", "far")))
    tools: tuple[str, ...] = option((), "Tools to load.", name="tool")

    def __post_init__(self) -> None:
        check_fields(self)


def given(argv: list[str], **environ: str) -> dict[str, Any]:
    """The values that a command with these options gets."""

    @click.command()
    @options(options_of(Licences, "Licences"))
    def command(**values: Any) -> dict[str, Any]:
        return values

    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        values = command.main(argv, standalone_mode=False)
    assert isinstance(values, dict)
    return values


def test_a_row_gives_flags_variable_type_default_and_help() -> None:
    assert given([]) == {"licences": 1, "server": "near", "tool": ()}
    for argv in (["--licences=2"], ["--licenses", "2"], ["-L2"]):
        assert given(argv)["licences"] == 2
    assert given([], CLUSTERDDP_LICENCES="3")["licences"] == 3
    assert given([], CLUSTERDDP_TOOL="a b\nc")["tool"] == ("a b", "c")
    with pytest.raises(click.BadParameter, match="'away' is not one of"):
        given(["--server=away"])
    rows = {row.name: row for row in options_of(Licences, "Licences")}
    assert (rows["licences"].directive, rows["licences"].variable) == (
        "licenses",
        "SBATCH_LICENSES",
    )
    assert (rows["licences"].metavar, rows["licences"].group) == ("N", "Licences")


def test_a_row_checks_its_field_and_the_error_carries_the_option() -> None:
    for values, words in (
        ({"licences": 0}, "--licences: 0 is not valid. Use a positive whole number."),
        ({"server": "away"}, "--server: 'away' is not one of near, far."),
    ):
        with pytest.raises(OptionError, match=re.escape(words)) as caught:
            Licences(**values)  # type: ignore[arg-type]
        assert caught.value.option == words.partition(":")[0]


def test_no_two_options_share_a_name() -> None:
    names = [*(flag for row in OPTIONS.values() for flag in row.flags), *PASSED_ON]
    names += [row.variable for row in REQUEST if row.variable]
    assert [name for name, count in Counter(names).items() if count > 1] == []
    assert len(OPTIONS) == len(REQUEST) + len(TRAINING)


def test_every_field_of_the_training_is_an_option() -> None:
    fields = [field.name for field in dataclasses.fields(TrainConfig)]
    assert [*(row.parameter for row in TRAINING), "hang_timeout"] == fields


def test_site_cfg_names_every_option_that_takes_a_list() -> None:
    [listed] = re.findall(r"A list \((.*?)\)", SITE_CFG.read_text())
    assert set(listed.split(", ")) == {row.name for row in REQUEST if row.type is tuple}


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"CLUSTERDDP_SIGNAL": "USR1@90", "CLUSTERDDP_TIME": "1"}, "CLUSTERDDP_SIGNAL"),
        ({"SBATCH_SIGNAL": "B:USR1@90", "CLUSTERDDP_TIME": "1"}, "SBATCH_SIGNAL"),
        ({"CLUSTERDDP_NODELIST": "h[1-2]"}, "CLUSTERDDP_NODELIST"),
        ({"CLUSTERDDP_CUDA_GRAPH": "on", "CLUSTERDDP_COMPILE": "1"}, "CLUSTERDDP_CUDA_GRAPH"),
        ({"CLUSTERDDP_ENV": "RANK=1"}, "CLUSTERDDP_ENV"),
        ({"CLUSTERDDP_INIT_FROM": "gone"}, "CLUSTERDDP_INIT_FROM"),
    ],
)
def test_a_contradiction_names_the_source_of_the_option_that_nobody_typed(
    settings: dict[str, str], where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    environ = {name: None for name in os.environ if name.startswith("SBATCH_")}
    result = CliRunner().invoke(cli, ["submit", "--dry-run"], env={**environ, **settings})
    assert isinstance(result.exception, RequestError)
    assert str(result.exception).endswith(f"(from {where})")


def write(folder: Path, content: str, name: str = "site.cfg") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


def test_a_cluster_stands_over_the_defaults(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "[defaults]\npartition = gpu\ntime = 60\n[cluster:big]\npartition = huge\n"
        "[environment]\nNCCL_DEBUG = WARN\nMixed_Case = a=b\n",
    )
    settings = table.read_site(path, "big", OPTIONS)
    assert settings.values == {"partition": "huge", "time": "60"}
    assert settings.sources["partition"] == f"{path} [cluster:big]"
    assert settings.sources["time"] == f"{path} [defaults]"
    assert settings.environment == {"NCCL_DEBUG": "WARN", "Mixed_Case": "a=b"}
    assert settings.clusters == ("big",)


def test_values_are_taken_as_they_are(tmp_path: Path) -> None:
    path = write(
        tmp_path, "[defaults]\nsetup = echo $(x) %(y)s ; # not a comment\n    second line\n"
    )
    assert table.read_site(path, None, OPTIONS).values == {
        "setup": "echo $(x) %(y)s ; # not a comment\nsecond line"
    }


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[defaults]\npartitoin = x\n", ["[defaults]", "partitoin", "did you mean 'partition'"]),
        ("[default]\n", ["[default]", "did you mean 'defaults'"]),
        ("[cluster:a]\nnode = 1\n", ["[cluster:a]", "did you mean 'nodes'"]),
        ("nodes = 1\n", ["line 1", "[defaults]"]),
        ("[defaults]\nnodes\n", ["site.cfg"]),
        ("[defaults]\nnodes = 1\nnodes = 2\n", ["nodes", "already exists"]),
        ("[defaults]\n[defaults]\n", ["already exists"]),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, content: str, words: list[str]) -> None:
    path = write(tmp_path, content)
    with pytest.raises(RequestError) as caught:
        table.read_site(path, None, OPTIONS)
    for word in [str(path), *words]:
        assert word in str(caught.value)


def test_an_unknown_cluster_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    path = write(tmp_path, "[cluster:a]\n[cluster:b]\n")
    with pytest.raises(RequestError, match="defines a, b"):
        table.read_site(path, "c", OPTIONS)
    with pytest.raises(RequestError, match=r"no site\.cfg"):
        table.read_site(None, "c", OPTIONS)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "site.cfg").write_bytes(b"[defaults]\nsetup = \xff\n")
    with pytest.raises(RequestError, match="UTF-8"):
        table.read_site(tmp_path / "site.cfg", None, OPTIONS)


def test_a_folder_in_its_place_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="directory"):
        table.read_site(tmp_path, None, OPTIONS)


def test_the_first_of_the_places_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = write(tmp_path, "", "etc/site.cfg")
    monkeypatch.setattr(table, "SYSTEM_FILE", system)
    environ = {"HOME": str(tmp_path / "home")}
    assert table.find_site(None, environ, tmp_path) == system
    home = write(tmp_path, "", "home/.config/clusterddp/site.cfg")
    assert table.find_site(None, environ, tmp_path) == home
    xdg = write(tmp_path, "", "xdg/clusterddp/site.cfg")
    with_xdg = {**environ, "XDG_CONFIG_HOME": str(tmp_path / "xdg")}
    assert table.find_site(None, with_xdg, tmp_path) == xdg
    here = write(tmp_path, "")
    assert table.find_site(None, environ, tmp_path) == here
    named = write(tmp_path, "", "named.cfg")
    environ["CLUSTERDDP_SITE"] = str(named)
    assert table.find_site(None, environ, tmp_path) == named
    assert table.find_site(str(here), environ, tmp_path) == here


def test_a_named_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="there is no file"):
        table.find_site(str(tmp_path / "none.cfg"), {}, tmp_path)


def test_what_a_file_lacks_of_another_one_is_told(tmp_path: Path) -> None:
    before, now, broken = (tmp_path / name for name in ("before", "now", "broken"))
    before.write_text("[defaults]\nmem = 4G\n[environment]\nA = 1\nB = 1\n[cluster:b]\n")
    now.write_text("[defaults]\npartition = gpu\n[environment]\nB = 2\n")
    broken.write_text("mem = 4G\n")
    assert table.missing_settings(now, before, OPTIONS) == ["mem", "A", "[cluster:b]"]
    assert table.missing_settings(before, now, OPTIONS) == ["partition"]
    assert table.missing_settings(now, broken, OPTIONS) == []
