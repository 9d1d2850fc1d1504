"""Processes of this machine, as proc(5) shows them."""

import os
import signal
import subprocess
import sys

from clusterddp.processes.table import hears


def test_a_process_hears_what_it_does_not_ignore_until_it_is_reaped() -> None:
    words = "import signal; signal.signal(signal.SIGUSR1, signal.SIG_IGN); print(1); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", words], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout
        child.stdout.readline()
        assert hears(child.pid, signal.SIGTERM)
        assert not hears(child.pid, signal.SIGUSR1)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is not reaped
        assert hears(child.pid, signal.SIGTERM)
        assert not hears(child.pid, signal.SIGUSR1)
    finally:
        child.kill()
        child.communicate()
    assert not hears(child.pid, signal.SIGTERM)
