import ctypes
import subprocess
import sys

import pytest

# A process of its own, as the setting stays: 80 MB asked for and freed, again and again.
_PROGRAM = """
import ctypes, resource, sys
from clusterddp.training import memory
if sys.argv[1] == "keep":
    memory.keep_freed()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
def use():
    blocks = [libc.malloc(20 << 20) for _ in range(4)]
    for block in blocks:
        ctypes.memset(block, 1, 20 << 20)
    for block in blocks:
        libc.free(block)
use(), use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="no glibc")
def test_memory_that_is_freed_and_asked_for_again_costs_no_page_faults() -> None:
    def faults(mode: str) -> int:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM, mode], capture_output=True, text=True, check=True
        )
        return int(done.stdout)

    assert faults("keep") < 500
    assert faults("give back") > 10_000
