"""Tests of what this machine's processors are found by."""

from pathlib import Path

import pytest

from clusterddp.processes import hardware
from clusterddp.processes.hardware import file_system_type


@pytest.mark.parametrize(
    ("files", "whose"),
    [
        ({}, ""),
        ({"dev/kfd": ""}, "AMD"),
        ({"sys/class/drm/renderD128/device/vendor": "0x8086\n"}, "Intel"),
        ({"sys/class/drm/renderD128/device/vendor": "0x1a03\n"}, ""),
    ],
)
def test_a_driver_is_known_by_its_device(
    files: dict[str, str], whose: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "NVIDIA_DRIVER", (tmp_path / "driver",))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert hardware.gpu_driver(tmp_path) == whose
    (tmp_path / "driver").touch()
    assert hardware.gpu_driver(tmp_path) == "NVIDIA"


def fast_device(
    root: Path, name: str, driver: str, layer: str = "", state: str = "4: ACTIVE",
    rate: str = "200 Gb/sec (4X HDR)",
) -> None:  # fmt: skip
    """Make the files of an RDMA device with one port, as the kernel shows them."""
    device = root / "sys/class/infiniband" / name
    (device / "ports/1").mkdir(parents=True)
    layer = layer or ("Unspecified" if driver == "efa" else "InfiniBand")
    for file, text in {"state": state, "link_layer": layer, "rate": rate}.items():
        (device / "ports/1" / file).write_text(f"{text}\n")
    drivers = root / "sys/bus/pci/drivers" / driver
    drivers.mkdir(parents=True, exist_ok=True)
    (device / "device").mkdir()
    (device / "device/driver").symlink_to(drivers)


def test_only_active_devices_that_are_fast_count_as_a_fast_network(tmp_path: Path) -> None:
    assert hardware.fast_networks(tmp_path) == {}
    fast_device(tmp_path, "mlx5_2", "mlx5_core", state="1: DOWN")
    fast_device(tmp_path, "mlx5_3", "mlx5_core", "Ethernet", rate="25 Gb/sec (1X EDR)")
    assert hardware.fast_networks(tmp_path) == {}
    fast_device(tmp_path, "mlx5_1", "mlx5_core")
    fast_device(tmp_path, "mlx5_0", "mlx5_core")
    fast_device(tmp_path, "mlx5_4", "mlx5_core", "Ethernet", rate="400 Gb/sec (4X NDR)")
    fast_device(tmp_path, "rdmap16s27", "efa")
    (tmp_path / "sys/class/cxi/cxi0").mkdir(parents=True)
    assert hardware.fast_networks(tmp_path) == {
        "InfiniBand": ["mlx5_0", "mlx5_1"], "RoCE": ["mlx5_4"], "EFA": ["rdmap16s27"],
        "Slingshot": ["cxi0"],
    }  # fmt: skip


MOUNTS = r"""
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:40 / /shared rw shared:5 master:2 - nfs4 server:/export rw
31 30 0:41 / /shared/fast rw - lustre mgs:/fast rw
32 22 0:42 / /with\040blank rw - beegfs beegfs rw
33 22 0:43 / /twice rw - xfs /dev/sdb rw
34 22 0:44 / /twice rw - tmpfs none rw
a line of no form
""".splitlines()


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/me", "ext4"),
        ("/", "ext4"),
        ("/shared", "nfs4"),
        ("/shared/runs", "nfs4"),
        ("/sharedother", "ext4"),
        ("/shared/fast/runs", "lustre"),
        ("/with blank/runs", "beegfs"),
        ("/twice/runs", "tmpfs"),
    ],
)
def test_a_paths_file_system_is_that_of_its_nearest_mount(path: str, kind: str) -> None:
    assert file_system_type(path, MOUNTS) == kind


def test_without_a_mount_the_type_is_unknown() -> None:
    assert file_system_type("/home", []) == "unknown"
