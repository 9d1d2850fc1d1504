"""What the benchmarks say of the machine that their figures are from."""

from pathlib import Path

import pytest

from benchmarks import hardware


@pytest.mark.parametrize(
    ("flags", "kinds"),
    [
        ("fpu avx2 avx512f avx512bw avx512_bf16", "AVX512_BF16, AVX512F, AVX2; no AMX_BF16"),
        ("avx2 avx512f avx512_bf16 amx_tile amx_bf16", "AMX_BF16, AVX512_BF16, AVX512F, AVX2"),
        ("fpu avx2", "AVX2; no AMX_BF16, AVX512_BF16, AVX512F"),
        ("fpu", "no AMX_BF16, AVX512_BF16, AVX512F, AVX2"),
    ],
)
def test_the_processor_is_named_with_what_it_computes_with(
    flags: str, kinds: str, tmp_path: Path
) -> None:
    one = f"processor\t: 0\nmodel name\t: AMD EPYC  9R14 \nflags\t\t: {flags}\n\n"
    (tmp_path / "cpuinfo").write_text(one + one.replace("EPYC", "other"))
    assert f" CPUs (AMD EPYC 9R14: {kinds}), " in hardware.named(tmp_path / "cpuinfo")
    assert ("bf16" in hardware.precisions(tmp_path / "cpuinfo")) == ("avx512f" in flags)


def test_a_machine_without_cpuinfo_is_named_all_the_same(tmp_path: Path) -> None:
    assert " CPUs (" in hardware.named(tmp_path / "none")
