"""Processes of this machine, as proc(5) shows them."""

import os
import signal
import subprocess
import sys

from clusterddp.processes.table import hears


def test_a_signal_tells_something_to_a_process_that_lives_and_does_not_ignore_it() -> None:
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
        assert not hears(child.pid, signal.SIGTERM)
    finally:
        child.kill()
        child.communicate()
    assert not hears(child.pid, signal.SIGTERM)
