"""Whole lives of programs, in rounds."""

from pathlib import Path

import pytest

from benchmarks import launch
from benchmarks.launch import BASELINE, Life


@pytest.mark.parametrize("failures", [1, 2])
def test_a_baseline_that_fails_is_measured_again_once(
    failures: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [failures]

    def live(*_: object) -> Life:
        if left[0]:
            left[0] -= 1
            raise RuntimeError("exit codes [0, -6]")
        return Life(first_step=1.0, whole=2.0, peak_mib=3.0)

    monkeypatch.setattr(launch, "_live", live)
    starts: dict[str, launch.Start] = {BASELINE: lambda *_: []}
    if failures == 1:
        assert len(launch.rounds(starts, tmp_path, 2)[BASELINE]) == 2
    else:
        with pytest.raises(RuntimeError, match="-6"):
            launch.rounds(starts, tmp_path, 2)
