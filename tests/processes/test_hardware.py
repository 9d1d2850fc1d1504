"""Tests of what this machine's processors are found by."""

from pathlib import Path

import pytest

from clusterddp.processes import hardware


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
