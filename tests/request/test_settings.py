"""site.cfg: found in order, read strictly, its mistakes named."""

from pathlib import Path

import pytest

from clusterddp.errors import RequestError
from clusterddp.request import settings


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
    found = settings.read_site(path, "big")
    assert found.values == {"partition": "huge", "time": "60"}
    assert found.sources["partition"] == f"{path} [cluster:big]"
    assert found.sources["time"] == f"{path} [defaults]"
    assert found.environment == {"NCCL_DEBUG": "WARN", "Mixed_Case": "a=b"}
    assert found.clusters == ("big",)


def test_values_are_taken_as_they_are(tmp_path: Path) -> None:
    path = write(
        tmp_path, "[defaults]\nsetup = echo $(x) %(y)s ; # not a comment\n    second line\n"
    )
    assert settings.read_site(path, None).values == {
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
        settings.read_site(path, None)
    for word in [str(path), *words]:
        assert word in str(caught.value)


def test_an_unknown_cluster_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    path = write(tmp_path, "[cluster:a]\n[cluster:b]\n")
    with pytest.raises(RequestError, match="defines a, b"):
        settings.read_site(path, "c")
    with pytest.raises(RequestError, match=r"no site\.cfg"):
        settings.read_site(None, "c")


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "site.cfg").write_bytes(b"[defaults]\nsetup = \xff\n")
    with pytest.raises(RequestError, match="UTF-8"):
        settings.read_site(tmp_path / "site.cfg", None)


def test_a_folder_in_its_place_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="directory"):
        settings.read_site(tmp_path, None)


def test_the_first_of_the_places_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = write(tmp_path, "", "etc/site.cfg")
    monkeypatch.setattr(settings, "SYSTEM_FILE", system)
    environ = {"HOME": str(tmp_path / "home")}
    assert settings.find_site(None, environ, tmp_path) == system
    home = write(tmp_path, "", "home/.config/clusterddp/site.cfg")
    assert settings.find_site(None, environ, tmp_path) == home
    xdg = write(tmp_path, "", "xdg/clusterddp/site.cfg")
    with_xdg = {**environ, "XDG_CONFIG_HOME": str(tmp_path / "xdg")}
    assert settings.find_site(None, with_xdg, tmp_path) == xdg
    here = write(tmp_path, "")
    assert settings.find_site(None, environ, tmp_path) == here
    named = write(tmp_path, "", "named.cfg")
    environ["CLUSTERDDP_SITE"] = str(named)
    assert settings.find_site(None, environ, tmp_path) == named
    assert settings.find_site(str(here), environ, tmp_path) == here


def test_a_named_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="not found"):
        settings.find_site(str(tmp_path / "none.cfg"), {}, tmp_path)
