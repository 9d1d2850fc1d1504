"""Whether the process of a local run is seen."""

import os
import signal
import subprocess
import sys
import time

from clusterddp.run.local_process import process_alive
from clusterddp.run.submission import Submission


def test_a_local_process_is_seen_until_it_is_gone() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    mine = Submission("1", "local", pid=process.pid, submitted=time.time())
    try:
        assert process_alive(mine) is True
        process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert process_alive(mine) is False  # a zombie runs nothing
    finally:
        process.kill()
        process.communicate()
    assert process_alive(mine) is False


def test_a_process_that_only_inherited_the_number_is_not_ours() -> None:
    assert process_alive(Submission("1", "local", pid=os.getpid(), submitted=1000.0)) is False


def test_a_process_of_another_machine_cannot_be_seen() -> None:
    assert process_alive(Submission("1", "local", pid=os.getpid(), host="elsewhere")) is None
    assert process_alive(Submission("1", "local")) is None
