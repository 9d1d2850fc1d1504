import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from clusterddp import log

_ONE_LINE_EACH = "from clusterddp import log; log.info('one'); log.warning('two')"


def test_a_commands_lines_go_to_stderr_and_a_tasks_to_its_own_log(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log.warning("the disk is full")
    with log.to(log.to_stdout):
        log.warning("the disk is full")
    log.info("done")
    out, err = capsys.readouterr()
    assert err == "clusterddp: warning: the disk is full\nclusterddp: done\n"
    assert out == "warning: the disk is full\n"


@pytest.mark.parametrize("fault", [OSError(errno.ENOSPC, "No space left"), ValueError("closed")])
def test_a_log_that_takes_no_line_ends_nothing(fault: Exception) -> None:
    def refuse(line: str) -> None:
        raise fault

    with log.to(refuse):
        log.info("a line")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_process_with_a_full_log_ends_well(unbuffered: str) -> None:
    environ = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", _ONE_LINE_EACH], stderr=full, env=environ, check=False
        )
    assert ended.returncode == 0


def test_an_application_can_take_the_lines_through_logging() -> None:
    program = (
        "import logging, sys; from clusterddp import log\n"
        "logging.basicConfig(stream=sys.stdout, format='%(name)s %(levelname)s %(message)s')\n"
        "logging.getLogger('clusterddp').addHandler(logging.getLogger().handlers[0])\n"
        "log.warning('two')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ended.stdout == "clusterddp WARNING two\n"
