"""Names the machine that figures are from: processors, what they compute with, memory."""

import os
import platform
from pathlib import Path

NO_BF16 = "bf16 not measured: this CPU has neither AVX-512 nor AMX"
_CPUINFO = Path("/proc/cpuinfo")
# Of x86, as /proc/cpuinfo has them: by these oneDNN chooses its kernels.
_KINDS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")


def named(cpuinfo: Path = _CPUINFO) -> str:
    """As in `2 CPUs (AMD EPYC 9R14: AVX512_BF16, AVX512F, AVX2; no AMX_BF16), 24 GiB`."""
    try:
        text = cpuinfo.read_text()
    except OSError:  # macOS
        text = ""
    name = " ".join(_of_cpuinfo(text, "model name").split())
    flags = _of_cpuinfo(text, "flags").split()
    kinds = ", ".join(kind.upper() for kind in _KINDS if kind in flags)
    lacking = ", ".join(kind.upper() for kind in _KINDS if kind not in flags)
    if flags and lacking:
        kinds += f"{'; ' * bool(kinds)}no {lacking}"
    name = name or platform.processor() or platform.machine()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} CPUs ({name}{f': {kinds}' if kinds else ''}), {memory:.0f} GiB"


def precisions(cpuinfo: Path = _CPUINFO) -> tuple[str, ...]:
    """fp32, and bf16 unless oneDNN has no kernel of it for this CPU: five times as slow as fp32."""
    flags = set(_of_cpuinfo(cpuinfo.read_text(), "flags").split()) if cpuinfo.exists() else set()
    return ("fp32", "bf16") if not flags or flags & set(_KINDS[:3]) else ("fp32",)


def _of_cpuinfo(text: str, label: str) -> str:
    """What the first processor has under a label; empty where it has none (proc_cpuinfo(5))."""
    rows = (line.partition(":") for line in text.splitlines())
    return next((value.strip() for key, _, value in rows if key.strip() == label), "")
