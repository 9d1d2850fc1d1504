"""The environments of the benchmarks' peers: what is said where one cannot be made."""

from pathlib import Path

import pytest

from benchmarks import peers

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def nothing_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Environments lie in the test's own directory, and no answer of another test is remembered."""
    monkeypatch.setenv("CLUSTERDDP_BENCH_PEERS", str(tmp_path / "peers"))
    peers._made.cache_clear()


def test_without_a_package_index_there_is_a_reason_and_no_interpreter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert peers.python(["no-such-peer"]) is None
    assert "no-such-peer" in peers.why_not(["no-such-peer"])
    assert peers.versions(["no-such-peer"]) == {}


def test_a_folder_that_cannot_be_made_is_a_reason_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CLUSTERDDP_BENCH_PEERS", str(tmp_path / "file" / "peers"))
    assert peers.python(["any"]) is None
    assert "file" in peers.why_not(["any"])


def test_what_is_installed_here_is_seen_there_and_made_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """click is here already, so that pip has nothing to fetch."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    first = peers.python(["click"])
    assert first is not None, peers.why_not(["click"])
    assert peers.versions(["click"], of=["click", "jinja2"]).keys() == {"click", "jinja2"}
    peers._made.cache_clear()  # as in another process
    assert peers.python(["click"]) == first
    assert capfd.readouterr().err.count("installing click") == 1
