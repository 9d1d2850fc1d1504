"""What one node measures by itself."""

import pytest

from clusterddp.preflight import probe


def test_a_burst_of_load_leaves_the_quickest_of_several_loops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticks = iter([0.0, 0.1, 1.0, 1.03, 2.0, 2.2])
    monkeypatch.setattr(probe.time, "perf_counter", lambda: next(ticks))
    monkeypatch.setattr(probe, "_SPIN_TURNS", 1)
    monkeypatch.setattr(probe, "_SPIN_PAUSE_SECONDS", 0.0)
    assert probe.quickest_spin(3) == pytest.approx(0.03)
