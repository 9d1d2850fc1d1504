"""What the batch process reads of a run: its request and its events, and each of them once."""

import json
import subprocess
import sys

from clusterddp.request.resources import Resources
from clusterddp.request.spec import JobSpec
from clusterddp.run.attempt import Attempt
from tests.cli.made_runs import Workplace, submitted, workplace

__all__ = ["workplace"]

# Begins an attempt of the run in a directory, has a rank of it fail, and ends it; prints the files
# that were opened for reading, at the beginning and at the end.
PROGRAM = """
import json, os, sys
from pathlib import Path
from clusterddp import log
from clusterddp.batch.begin import begin_attempt
from clusterddp.batch.finish import finish
from clusterddp.batch.job import JobStart
from clusterddp.run.history import Policy
from clusterddp.run.run_dir import RunDir

opened = []

def watch(event, arguments):
    if event == "open" and arguments[2] & os.O_ACCMODE == os.O_RDONLY:
        opened.append(str(arguments[0]).rpartition("/")[2])

sys.addaudithook(watch)
job = JobStart(RunDir(Path(sys.argv[1])), "17", 0, "h01")
log.to(lambda line: None).__enter__()
attempt = begin_attempt(job, 20, 0.0, lambda run: [])
begun, opened = opened, []
Path(attempt.outcomes, "rank-0.json").write_text(sys.argv[2])
policy = Policy.of(job.run.read_spec())
opened.clear()
finish(job, attempt, 1, policy)
print(json.dumps([begun, opened]))
"""


def test_a_failing_command_has_its_events_and_its_request_read_once(workplace: Workplace) -> None:
    run = workplace.run("own", submitted("17"))
    spec = JobSpec("own", str(run.path), Resources(), command=("python", "train.py"))
    run.spec.write_text(spec.to_json())
    workplace.command("scontrol", "exit 1")
    ended = {
        "rank": 0, "local_rank": 0, "node_rank": 0, "host": "h01", "pid": 1, "job_id": "17",
        "restart": 0, "step_id": "0", "started": 100.0, "ended": 150.0, "exit_code": 1,
    }  # fmt: skip
    argv = [sys.executable, "-c", PROGRAM, str(run.path), json.dumps(ended)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    begun, finished = json.loads(done.stdout.splitlines()[-1])
    assert Attempt(run, 1).path.is_dir()
    # Once more when the attempt can be seen: a stop that came meanwhile has found none to mark.
    assert (begun.count("events.jsonl"), begun.count("spec.json")) == (2, 1)
    assert (finished.count("events.jsonl"), finished.count("spec.json")) == (1, 1)
