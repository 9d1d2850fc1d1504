from pathlib import Path

import pytest

from clusterddp.training.free_memory import free_bytes

MIB = 1 << 20


def host(root: Path, files: dict[str, str]) -> Path:
    """A host with 1,000 MiB available, and these files."""
    meminfo = "MemTotal: 9999999 kB\nMemFree: 5 kB\nMemAvailable: 1024000 kB\n"
    for path, content in {"proc/meminfo": meminfo, **files}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(content)
    return root


def limit(folder: str, allowed: str, used: int, cache: int = 0) -> dict[str, str]:
    """Of the unified hierarchy."""
    return {
        f"sys/fs/cgroup/{folder}/memory.max": f"{allowed}\n",
        f"sys/fs/cgroup/{folder}/memory.current": f"{used}\n",
        f"sys/fs/cgroup/{folder}/memory.stat": f"anon 5\ninactive_file {cache}\n",
    }


def test_without_a_limit_it_is_what_the_host_has(tmp_path: Path) -> None:
    assert free_bytes(host(tmp_path, {})) == 1000 * MIB
    assert free_bytes(host(tmp_path, {"proc/self/cgroup": "0::/\n"})) == 1000 * MIB


def test_a_host_that_does_not_tell(tmp_path: Path) -> None:
    assert free_bytes(tmp_path) is None


def test_the_tightest_limit_above_the_process_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/slurm/job_7/step_0\n",
        **limit("slurm/job_7", str(300 * MIB), 200 * MIB, cache=50 * MIB),
        **limit("slurm/job_7/step_0", "max", 200 * MIB),
        **limit("slurm", str(900 * MIB), 200 * MIB),
        **limit("elsewhere", str(MIB), 0),
    }
    assert free_bytes(host(tmp_path, files)) == 150 * MIB


def test_a_limit_of_the_older_hierarchy(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "9:cpu,cpuacct:/job\n4:memory:/job\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(100 * MIB),
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": str(90 * MIB),
        "sys/fs/cgroup/memory/job/memory.stat": "cache 1\ntotal_inactive_file 1048576\n",
    }
    assert free_bytes(host(tmp_path, files)) == 11 * MIB


@pytest.mark.parametrize("used", [100, 400])
def test_what_is_used_up_leaves_nothing(tmp_path: Path, used: int) -> None:
    files = {"proc/self/cgroup": "0::/job\n", **limit("job", str(100 * MIB), used * MIB)}
    assert free_bytes(host(tmp_path, files)) == 0
