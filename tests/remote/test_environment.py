"""Environments that `env create --on` makes from what a work tree lists."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from clusterddp.errors import RequestError
from clusterddp.remote import environment
from tests.remote.sshd import Host


@pytest.fixture
def wheels(tmp_path: Path) -> str:
    """The lines of a requirements.txt that installs one small package from here."""
    info = "own-1.0.dist-info"
    with zipfile.ZipFile(tmp_path / "own-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("own.py", "")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return f"--no-index\n--find-links={tmp_path}\nown\n"


def python_of(host: Host, *more: str) -> str:
    answer = host.run("submit", "--dry-run", "--json", "--dataset=synthetic", *more)
    assert answer.returncode == 0, answer.stderr
    script: str = json.loads(answer.stdout)["script"]
    return script


def test_runs_from_a_work_tree_use_the_environment_of_its_list(host: Host, wheels: str) -> None:
    listed, included = host.work / "requirements.txt", host.work / "base.txt"
    listed.write_text("-r base.txt\n")
    included.write_text(wheels)
    (host.work / "http.py").write_text("raise SystemExit('a module of the work tree')\n")
    answer = host.run("env", "create")
    assert answer.returncode == 0, answer.stderr
    assert " has the packages of requirements.txt" in answer.stdout
    place = Path(answer.stdout.split()[0])
    assert place.parent == host.there / "envs"
    assert "does not bring torch" in answer.stderr
    assert [*place.glob("lib/python3*/site-packages/own.py")]
    assert f"{place}/bin/python" in python_of(host)
    assert str(place) not in python_of(host, "--container-image=docker://torch")
    assert "pip" not in host.run("env", "create").stderr, "it is there"
    included.write_text(f"{wheels}# changed\n")
    assert str(place) not in python_of(host)
    (place / "complete").unlink()
    included.write_text(wheels)
    assert str(place) not in python_of(host), "a part is not used"


def test_nothing_is_left_of_one_that_cannot_be_made(host: Host) -> None:
    before = [*(host.there / "envs").glob("*")]
    (host.work / "requirements.txt").write_text("--no-index\nno-such-package\n")
    answer = host.run("env", "create")
    assert answer.returncode == 2
    assert answer.stderr.strip().endswith("[CD1407]")
    assert [*(host.there / "envs").glob("*")] == before


@pytest.mark.parametrize("line", ["-e .", ".", "./lib", "own @ file:///srv/own", ".[extra]"])
def test_a_directory_of_code_is_not_installed(host: Host, line: str) -> None:
    (host.work / "requirements.txt").write_text(f"torch\n{line}\n")
    answer = host.run("env", "create")
    assert answer.returncode == 2
    assert "Remove that line. [CD1407]" in answer.stderr


def test_a_work_tree_without_a_list_is_refused(host: Host) -> None:
    answer = host.run("env", "create")
    assert answer.returncode == 2
    assert "none of uv.lock, requirements.txt, pyproject.toml" in answer.stderr


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('[project]\ndependencies = ["torch>=2.4", "own"]\n', ["torch>=2.4", "own"]),
        ("[tool.ruff]\n", None),
        ("project = 3\n", None),
        ("[project\n", None),
    ],
)
def test_packages_of_a_pyproject(tmp_path: Path, text: str, found: list[str] | None) -> None:
    path = tmp_path / "pyproject.toml"
    path.write_text(text)
    if found:
        assert environment._dependencies(path) == found
    else:
        with pytest.raises(RequestError):
            environment._dependencies(path)


def test_uv_takes_the_versions_of_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in: no uv is certain to be here."""
    uv = tmp_path / "uv"
    uv.write_text(
        '#!/bin/sh\necho "$@" >>"$0.calls"\nmkdir -p "$UV_PROJECT_ENVIRONMENT/bin"\n'
        'ln -s /bin/true "$UV_PROJECT_ENVIRONMENT/bin/python"\n'
    )
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    top = tmp_path / "trees/abc"
    top.mkdir(parents=True)
    (top / "uv.lock").write_text("version = 1\n")
    monkeypatch.setenv("CLUSTERDDP_TREE", str(top))
    environment.create(top, lambda _: None)
    [call] = (tmp_path / "uv.calls").read_text().splitlines()
    assert call.startswith("sync --frozen --no-install-workspace --no-editable --python=")
    assert environment.find(tmp_path / "envs", top, top)
