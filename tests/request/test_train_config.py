import dataclasses
import importlib.util
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from clusterddp.cli.commands import submit
from clusterddp.cli.options import given_by, options
from clusterddp.errors import RequestError
from clusterddp.request.options import Settings
from clusterddp.request.spec import OPTIONS, JobSpec
from clusterddp.request.train_config import RECIPES, TRAINING, TrainConfig, changes

CASES = [
    (TrainConfig(model="keras-convnet"), "--model keras-convnet", "keras"),
    (TrainConfig(tensorboard=True), "--tensorboard", "tensorboard"),
]


@pytest.mark.parametrize(("config", "option", "package"), CASES)
def test_what_is_missing_is_told_with_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, config: TrainConfig, option: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    told = config.missing_package()
    assert told.startswith(f"{option} needs the package {package}")
    assert f"pip install 'clusterddp[{package}]'" in told and sys.executable in told
    assert TrainConfig().missing_package() == ""


@pytest.mark.parametrize(("config", "option", "package"), CASES)
def test_what_is_there_is_found_without_importing_it(
    monkeypatch: pytest.MonkeyPatch, config: TrainConfig, option: str, package: str
) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    monkeypatch.delitem(sys.modules, package, raising=False)
    assert config.missing_package() == ""
    assert package not in sys.modules


@pytest.mark.parametrize(("config", "option", "package"), CASES)
def test_a_folder_of_that_name_is_no_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: TrainConfig, option: str, package: str
) -> None:
    (tmp_path / package / "logs").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, package, raising=False)
    assert config.missing_package().startswith(f"{option} needs the package {package}")


def resolved(argv: list[str], *, settings: bool = True, **default_map: Any) -> TrainConfig:
    """The configuration of a command with training options, typed with these words."""

    @click.pass_context
    def run(ctx: click.Context, **_params: Any) -> TrainConfig:
        return TrainConfig.of(given_by(ctx))

    command = click.command()(options([*TRAINING, OPTIONS["hang-timeout"]], settings=settings)(run))
    site = Settings(sources=dict.fromkeys(default_map, "site.cfg [defaults]"))
    config = command.main(argv, standalone_mode=False, default_map=default_map, obj=site)
    assert isinstance(config, TrainConfig)
    return config


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_gives_every_value_that_nobody_has_given(name: str) -> None:
    settings = RECIPES[name].settings
    expected = TrainConfig(recipe=name, **settings)
    assert resolved(["--recipe", name]) == expected
    for field, value in settings.items():  # so that each is seen to differ where it must
        assert getattr(expected, field) == value


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_sets_fields_that_decide_the_weights_and_no_more(name: str) -> None:
    before = dataclasses.asdict(TrainConfig())
    after = TrainConfig(recipe=name, **RECIPES[name].settings)
    differing = [f for f, value in RECIPES[name].settings.items() if value != before[f]]
    assert len(changes(before, vars(after))) == len(differing)


def test_a_flag_a_variable_and_the_site_come_before_the_recipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CLUSTERDDP_WEIGHT_DECAY", "0.5")
    config = resolved(["--recipe=fast", "--lr=0.02"], epochs="7")
    assert (config.lr, config.weight_decay, config.epochs) == (0.02, 0.5, 7)
    assert config.batch_size == RECIPES["fast"].settings["batch_size"]
    default = TrainConfig()
    config = resolved(["--recipe=fast", f"--epochs={default.epochs}", f"--model={default.model}"])
    assert (config.epochs, config.model) == (default.epochs, default.model)


def test_the_recipe_itself_can_be_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolved([], recipe="fast") == resolved(["--recipe=fast"])
    monkeypatch.setenv("CLUSTERDDP_RECIPE", "accurate")
    assert resolved([]) == resolved(["--recipe=accurate"])
    assert resolved([], settings=False) == TrainConfig()


def test_without_a_recipe_nothing_changes() -> None:
    assert resolved([]) == TrainConfig()


def test_an_unknown_recipe_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(RequestError, match=r"--recipe: 'slow' is not one of fast, accurate\."):
        resolved(["--recipe=slow"])


def test_tasks_get_the_values_and_never_the_name() -> None:
    """A recipe that has changed since, or a value given in its stead, cannot come back."""
    given = resolved(["--recipe=fast", "--lr=0.02", "--epochs=2"])
    argv = given.to_argv()
    assert not [word for word in argv if "recipe" in word]
    assert resolved(argv, settings=False) == dataclasses.replace(given, recipe="")


def test_help_says_what_each_recipe_is() -> None:
    def run(**_: Any) -> None: ...

    command = click.command()(options(TRAINING)(run))
    text = " ".join(CliRunner().invoke(command, ["--help"]).output.split())
    for name, recipe in RECIPES.items():
        assert f"{name}, {recipe.summary}" in text


def test_a_dry_run_shows_the_recipe_with_what_was_given_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(
        submit.command, ["--recipe=fast", "--lr=0.02", "--dry-run", "--run-name=r"]
    )
    assert result.exit_code == 0, result.output
    script = result.output
    words = script[script.index("\nsrun ") :].split()
    assert "--lr=0.02" in words
    for name, value in RECIPES["fast"].settings.items():
        usual = value == getattr(TrainConfig, name)
        assert usual or name == "lr" or f"--{name.replace('_', '-')}={value}" in words
    asked = JobSpec.from_script(script, "/scratch/jobs/demo").train
    assert asked and asked.recipe == "fast"


def test_ranks_of_more_nodes_are_awaited_longer_unless_a_time_is_given() -> None:
    usual = TrainConfig()
    assert usual.rendezvous_seconds(1) == 300
    assert usual.rendezvous_seconds(512) == 555.5
    assert TrainConfig(rendezvous_timeout=20).rendezvous_seconds(512) == 20
    assert not [word for word in usual.to_argv() if "rendezvous" in word]
