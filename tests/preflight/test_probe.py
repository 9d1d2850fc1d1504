"""What one node measures by itself."""

from pathlib import Path

import pytest

from clusterddp import polling
from clusterddp.preflight import gpus, probe
from clusterddp.preflight.gpu_state import Reading


def test_a_burst_of_load_leaves_the_quickest_of_several_loops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticks = iter([0.0, 0.1, 1.0, 1.03, 2.0, 2.2])
    monkeypatch.setattr(probe.time, "perf_counter", lambda: next(ticks))
    monkeypatch.setattr(probe, "_SPIN_TURNS", 1)
    monkeypatch.setattr(probe, "_SPIN_PAUSE_SECONDS", 0.0)
    assert probe.quickest_spin(3) == pytest.approx(0.03)


def test_ports_are_read_with_their_rates_and_the_states_of_those_that_are_down(
    tmp_path: Path,
) -> None:
    ports = {
        "mlx5_0/ports/1": ("4: ACTIVE", "5: LinkUp", "400 Gb/sec (4X NDR)"),
        "mlx5_1/ports/1": ("1: DOWN", "3: Disabled", "40 Gb/sec (4X QDR)"),
        "mlx4_0/ports/2": ("4: ACTIVE", "5: LinkUp", "2.5 Gb/sec (1X SDR)"),
        "mlx5_2/ports/1": (),  # not readable
    }
    for name, texts in ports.items():
        (tmp_path / name).mkdir(parents=True)
        for file, text in zip(("state", "phys_state", "rate"), texts, strict=False):
            (tmp_path / name / file).write_text(f"{text}\n")
    rates, states = probe.infiniband_ports(tmp_path)
    assert rates == {"mlx5_0/1": 400.0, "mlx5_1/1": 0.0, "mlx4_0/2": 2.5}
    assert states == {"mlx5_1/1": "DOWN, Disabled"}
    assert probe.infiniband_ports(tmp_path / "none") == ({}, {})


@pytest.mark.parametrize(("busy", "said"), [(2, ""), (9, "GPU 0: 4.0 GiB in use")])
def test_memory_of_a_gpu_that_is_released_soon_is_no_fault(
    busy: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [0]

    def inspect(granted: int, visible: list[str]) -> dict[str, Reading]:
        assert (granted, visible) == (2, ["6", "7"])
        asked[0] += 1
        return {
            "0": Reading(4 << 30 if asked[0] <= busy else 5, lanes=8, max_lanes=16),
            "1": Reading(fabric_state=1, nvlinks=17, max_nvlinks=18),
        }

    monkeypatch.setattr(gpus, "inspect", inspect)
    monkeypatch.setattr(gpus, "check", lambda *_: (2, "one is slow"))
    monkeypatch.setattr(polling, "wait_until", lambda ask, *_, **__: any(ask() for _ in range(3)))
    found = probe.measure_gpus({"CUDA_VISIBLE_DEVICES": "6,7"}, 2)
    assert (found.gpus_granted, found.gpus_seen, found.gpu_fault) == (2, 2, "one is slow")
    assert asked[0] == 3  # the last answer counts, and NVML need not start again
    assert found.memory_fault.startswith(said) and bool(found.memory_fault) == bool(said)
    assert found.fabric_fault.startswith("GPU 1: ")
    assert found.link_fault == "GPU 0: 8 of 16 PCIe lanes"
    assert (found.nvlinks, found.max_nvlinks) == (17, 18)


def test_without_gpus_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(gpus, "inspect")
    assert probe.measure_gpus({}, 0) == probe.NodeMeasurements()


@pytest.mark.parametrize(
    ("address", "pattern", "switch"),
    [
        ("top.s2.h03", "switch.switch.node", "s2"),  # as 22.05 has them
        ("s1.h03.cluster", "switch.node", "s1"),
        ("h03", "node", ""),  # topology/default
        ("h03", "switch.node", ""),
        ("b1.h03", "block.node", ""),
        ("", "", ""),
    ],
)
def test_the_leaf_switch_is_the_last_one_above_the_node(
    address: str, pattern: str, switch: str
) -> None:
    environ = {"SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}
    assert probe.leaf_switch(environ) == switch
    assert probe.leaf_switch({}) == ""
