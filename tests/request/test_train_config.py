import importlib.util
import sys
from pathlib import Path

import pytest

from clusterddp.request.train_config import TrainConfig

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
