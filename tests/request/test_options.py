"""One row gives an option all its names; the table of rows is consistent."""

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
        ({"licences": 0}, "--licences: 0 is not a positive whole number."),
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
    assert [row.parameter for row in TRAINING] == fields


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
        ({"CLUSTERDDP_RESUME": "gone"}, "CLUSTERDDP_RESUME"),
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
