"""The claim on a run: held by one process, taken over from one that has died, gone with its end."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from clusterddp import log
from clusterddp.errors import RequestError
from clusterddp.request.spec import submission_comment
from clusterddp.run.run_dir import RunDir
from clusterddp.submission.claim import EXPIRES_SECONDS, claimed
from tests.waiting import dying_with_us


def names(run: RunDir) -> list[str]:
    return sorted(path.name for path in run.path.iterdir())


def submit(run: RunDir) -> list[str]:
    """Go through a claim as a submission does; returns what was said."""
    lines: list[str] = []
    with log.to(lines.append), claimed(run) as claim:
        claim.use()
    return lines


def test_claims_follow_one_another_and_leave_nothing(run: RunDir) -> None:
    for _ in range(3):
        assert submit(run) == []
        assert names(run) == []


def test_a_held_claim_is_refused_with_its_holder(run: RunDir) -> None:
    with claimed(run), pytest.raises(RequestError) as caught, claimed(run):
        pass
    said = str(caught.value)
    assert f"{run.name} is being resumed by process {os.getpid()} on {socket.gethostname()}" in said
    assert f"remove {run.path}/resume-0001.claim" in said
    assert submit(run) == []


def test_a_refused_submission_leaves_no_claim(run: RunDir) -> None:
    with pytest.raises(RequestError, match="sbatch refused"), claimed(run) as claim:
        claim.use()
        raise RequestError("sbatch refused it")
    assert names(run) == []
    with pytest.raises(KeyboardInterrupt), claimed(run) as claim:
        claim.use()
        raise KeyboardInterrupt
    assert names(run) == []


def test_a_claim_that_a_full_disk_has_cut_holds_nobody_up(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, *_: object) -> None:
        os.close(descriptor)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("clusterddp.files.os.fdopen", full)
        with pytest.raises(RequestError, match="No space left"):
            submit(run)
    assert names(run) == []
    assert submit(run) == []


HOLD = """
import sys
from pathlib import Path
from clusterddp.run.run_dir import RunDir
from clusterddp.submission.claim import claimed
with claimed(RunDir(Path(sys.argv[1]))):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_the_claim_of_a_killed_process_is_taken_over(run: RunDir) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run.path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=dying_with_us(),  # noqa: PLW1509
    )  # fmt: skip
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RequestError, match=f"by process {holder.pid} on"):
            submit(run)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    finally:
        holder.kill()
        holder.communicate()
    [said] = submit(run)
    assert "died while it resumed" in said
    assert submission_comment(run.name) in said
    assert names(run) == []


def claim_of_old(run: RunDir, content: str) -> Path:
    path = run.path / "resume-0004.claim"
    path.write_text(content)
    return path


@pytest.mark.parametrize(
    "content",
    [
        json.dumps({"host": "elsewhere", "pid": 1, "time": 1.0}),
        "",  # it is being written
        "[]",
        '{"pid": "many", "host": 3}',
    ],
)
def test_what_cannot_be_looked_at_is_held_for_a_while(run: RunDir, content: str) -> None:
    path = claim_of_old(run, content)
    with pytest.raises(RequestError, match=r"is being resumed by .*remove .*0004\.claim"):
        submit(run)
    then = path.stat().st_mtime - EXPIRES_SECONDS - 1
    os.utime(path, (then, then))
    assert len(submit(run)) == 1
    assert names(run) == []


def test_a_claim_that_was_taken_over_submits_nothing(run: RunDir) -> None:
    with pytest.raises(RequestError, match="submitted nothing"), claimed(run) as claim:
        (run.path / "resume-0002.claim").write_text("")
        claim.use()
    assert names(run) == ["resume-0002.claim"]


def test_a_directory_that_cannot_be_written_is_said(run: RunDir) -> None:
    run.path.rmdir()
    with pytest.raises(RequestError, match="Nothing was changed"):
        submit(run)


def test_one_that_was_resumed_meanwhile_is_not_submitted(run: RunDir) -> None:
    with pytest.raises(RequestError, match="submitted nothing"), claimed(run) as claim:
        claim.path.unlink()  # taken over, as it had expired, and done
        submit(run)
        claim.use()
    assert names(run) == []
