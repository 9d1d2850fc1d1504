"""The table of Slurm's versions: what is read from daemons, and a release that cannot be had."""

from pathlib import Path

import pytest

from tests.on_slurm import versions
from tests.on_slurm.cluster import SlurmCluster


def test_the_version_is_the_daemons_own_word(cluster: SlurmCluster) -> None:
    said = cluster.run(["sinfo", "--version"], check=True).stdout.split()[-1]
    assert versions.version(cluster) == said


@pytest.mark.parametrize(("required", "code"), [("0", 0), ("1", 1)])
def test_a_release_that_cannot_be_had_is_skipped_only_where_it_is_not_required(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    required: str, code: int,
) -> None:  # fmt: skip
    monkeypatch.setenv("CLUSTERDDP_REQUIRE_SLURM", required)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert versions.main(["--release", "trixie", "--roots", str(tmp_path)]) == code
    assert "trixie " + ("failed" if code else "skipped") in capsys.readouterr().out
    assert not (tmp_path / "trixie").exists()


@pytest.mark.slow
def test_a_skip_for_the_version_is_neither_passed_nor_failed(tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text(
        "import pytest\n"
        "def test_passes(): pass\n"
        "def test_skips(): pytest.skip('something is missing')\n"
        "def test_is_for_later_versions(record_property):\n"
        f"    record_property({versions.SKIPPED_FOR_VERSION!r}, True)\n"
        "    pytest.skip('too old')\n"
    )
    names = [
        [name.partition("::")[2] for name in names]
        for names in versions._test(None, [str(tmp_path / "test_x.py")])
    ]
    assert names == [["test_passes"], ["test_skips"]]
