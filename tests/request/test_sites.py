"""The files for public clusters: each says what it is, and is put in place whole or not at all."""

import re
from datetime import date
from pathlib import Path

import pytest

from clusterddp.errors import RequestError
from clusterddp.request import sites
from clusterddp.request.options import find_site, read_site
from clusterddp.request.sites import FOLDER, PublicSite
from clusterddp.request.spec import OPTIONS
from tests.cli.made_runs import Workplace, workplace  # noqa: F401
from tests.hostile import CARRIED, REFUSED

NAMES = sorted(path.stem for path in FOLDER.glob("*.cfg"))
PAGE = (FOLDER.parents[1] / "docs" / "sites.md").read_text(encoding="utf-8")


def test_every_file_is_known_by_its_name() -> None:
    assert list(sites.read_sites()) == NAMES
    assert re.findall(r"^\| ([a-z][a-z-]+) \| (?!cluster|content)", PAGE, re.MULTILINE) == NAMES


def test_the_site_cfg_is_taken(workplace: Workplace) -> None:  # noqa: F811
    [example] = re.findall(r"^```ini\n(\[defaults\]\n.*?)^```", PAGE, re.M | re.S)
    (workplace.folder / "site.cfg").write_text(example)
    plain, long = workplace.invoke("site"), workplace.invoke("site", "--cluster", "long")
    assert (plain.code, long.code) == (0, 0), plain.err + long.err
    assert "clusters: long" in plain.out
    shown = re.findall(r"^(\w\S*) +(\S+) +/home/you/", PAGE, re.M)
    assert len(shown) > 2
    assert all(re.search(rf"^{key} +{re.escape(value)} ", long.out, re.M) for key, value in shown)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_says_whence_it_is_and_is_a_site_cfg(name: str) -> None:
    site, path = sites.read_sites()[name], FOLDER / f"{name}.cfg"
    assert re.fullmatch(r"[a-z][a-z0-9-]+", name)
    assert site.title and "#" not in site.title
    assert site.pages and all(page.startswith(("https://", "http://")) for page in site.pages)
    assert date.fromisoformat(site.read[:10]) >= date(2026, 11, 23)
    assert site.tried
    settings = read_site(path, None, OPTIONS)
    for section in settings.clusters:
        assert read_site(path, section, OPTIONS).values != settings.values
    # What differs by person is there to fill in, under a key that exists.
    text = path.read_text(encoding="utf-8")
    left_open = re.findall(r"^# ([a-z]+(?:-[a-z]+)*) =", text, re.MULTILINE)
    assert "time" in left_open and set(left_open) <= OPTIONS.keys()
    assert not {"account", "time", "mail-user"} & settings.values.keys()


@pytest.mark.parametrize(
    ("cluster", "host", "fits"),
    [
        ("lumi", "", True),
        ("LUMI", "", True),
        ("", "lumi-uan02.example", True),
        ("", "", False),
        ("lumi2", "my-lumi-uan02.example", False),
    ],
)
def test_a_cluster_is_recognised_by_its_name_or_its_login_nodes(
    cluster: str, host: str, fits: bool
) -> None:
    site = PublicSite("lumi", "LUMI", (), "", "", ("lumi-uan0[1-4].example",))
    other = PublicSite("frontier", "Frontier", (), "", "")
    found = sites.fitting({"lumi": site, "frontier": other}, cluster, host)
    assert found == (["lumi"] if fits else [])


@pytest.mark.parametrize("variable", ["HOME", "XDG_CONFIG_HOME"])
def test_the_file_in_use_is_the_one_that_is_found(tmp_path: Path, variable: str) -> None:
    environ = {variable: str(tmp_path / "it's a home")}
    path, before = sites.use("lumi", environ)
    assert before is None and path.read_bytes() == (FOLDER / "lumi.cfg").read_bytes()
    assert find_site(None, environ, tmp_path) == path
    assert sites.use("lumi", environ) == (path, None)  # a second time is as well
    assert [each.name for each in path.parent.iterdir()] == ["site.cfg"]


def test_a_file_of_ones_own_is_left_or_put_aside(tmp_path: Path) -> None:
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    own = tmp_path / "clusterddp" / "site.cfg"
    own.parent.mkdir()
    own.write_text("[defaults]\naccount = physics\n")
    with pytest.raises(RequestError, match="--force"):
        sites.use("lumi", environ)
    assert own.read_text() == "[defaults]\naccount = physics\n"
    path, before = sites.use("lumi", environ, force=True)
    assert path == own and own.read_bytes() == (FOLDER / "lumi.cfg").read_bytes()
    assert before and before.read_text() == "[defaults]\naccount = physics\n"


def test_what_was_put_aside_is_not_lost_by_a_second_time(tmp_path: Path) -> None:
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    own = tmp_path / "clusterddp" / "site.cfg"
    own.parent.mkdir()
    own.write_text("[defaults]\naccount = physics\n")
    _, before = sites.use("lumi", environ, force=True)
    assert before
    with pytest.raises(RequestError, match=r"site\.cfg\.old already exists.* Move it"):
        sites.use("frontier", environ, force=True)
    assert before.read_text() == "[defaults]\naccount = physics\n"
    assert own.read_bytes() == (FOLDER / "lumi.cfg").read_bytes()
    assert sorted(each.name for each in own.parent.iterdir()) == ["site.cfg", "site.cfg.old"]
    before.write_bytes(own.read_bytes())  # the same once more: nothing is lost
    sites.use("frontier", environ, force=True)
    assert own.read_bytes() == (FOLDER / "frontier.cfg").read_bytes()


def test_a_link_is_a_file_of_ones_own_too(tmp_path: Path) -> None:
    folder = tmp_path / "clusterddp"
    folder.mkdir()
    (folder / "site.cfg").symlink_to(tmp_path / "gone.cfg")
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    with pytest.raises(RequestError, match="already exists"):
        sites.use("lumi", environ)
    sites.use("lumi", environ, force=True)
    assert not (folder / "site.cfg").is_symlink() and not (tmp_path / "gone.cfg").exists()


@pytest.mark.parametrize("name", [*CARRIED, *REFUSED, "../sites/lumi", "lumi.cfg", "LUMI", "*"])
def test_a_name_that_is_none_is_refused_and_nothing_is_written(name: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError) as refused:
        sites.use(name, {"HOME": str(tmp_path)})
    assert str(refused.value).isprintable() and repr(name) in str(refused.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["file", "full"])
def test_a_home_that_cannot_be_written_is_named(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "file":
        (tmp_path / ".config").write_text("not a folder")
    else:

        def full(*_: object, **__: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("os.fdopen", full)
    with pytest.raises(RequestError, match=r"cannot write .*site\.cfg: "):
        sites.use("lumi", {"HOME": str(tmp_path)})
    assert not list(tmp_path.rglob("site.cfg*"))


def test_without_a_home_there_is_no_place() -> None:
    with pytest.raises(RequestError, match="neither HOME nor XDG_CONFIG_HOME"):
        sites.use("lumi", {})
