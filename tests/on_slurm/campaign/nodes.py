"""Faults of the cluster itself: nodes lost, orphans of lost nodes, slurmctld away."""

from __future__ import annotations

from tests.on_slurm.campaign.fault import fault
from tests.on_slurm.campaign.run import Differs, Run, Trial, slurm

# A lost node is noticed after five seconds rather than minutes.
SOON = {"SlurmdTimeout": "5"}
ON_BOTH = ["--nodelist", "h[01-02]"]


def _lose(trial: Trial, host: str, *options: str) -> tuple[Run, str]:
    run = trial.start(*options)
    run.wait_step(60)
    struck = run.struck()
    trial.cluster.kill_host(host)
    if trial.cluster.processes(host):
        raise run.differs(f"{host} still runs {trial.cluster.processes(host)}")
    if len(trial.cluster.hosts) == 2:  # otherwise the third host takes its place
        run.wait(lambda: "PENDING" in " ".join(run.queued()), "the job in the queue again")
        trial.cluster.start_slurmd(host)
    run.wait_attempt(2)
    return run, run.check_same(struck)


@fault("node-lost-comes-back", conf=SOON)
def node_lost_comes_back(trial: Trial) -> str:
    return _lose(trial, "h02", *ON_BOTH)[1]


@fault("first-node-lost-comes-back", conf=SOON)
def first_node_lost_comes_back(trial: Trial) -> str:
    """The node of rank 0 and of the batch script."""
    return _lose(trial, "h01", *ON_BOTH)[1]


def _lost_for_good(trial: Trial, host: str) -> str:
    run, seen = _lose(trial, host)
    hosts = run.attempts[-1].read_record().hosts
    if host in hosts:
        raise run.differs(f"it runs on {hosts}")
    return f"{seen}; on {' '.join(hosts)}"


@fault("node-lost-for-good", conf=SOON, hosts=3)
def node_lost_for_good(trial: Trial) -> str:
    return _lost_for_good(trial, "h02")


@fault("first-node-lost-for-good", conf=SOON, hosts=3)
def first_node_lost_for_good(trial: Trial) -> str:
    return _lost_for_good(trial, "h01")


@fault("slurmd-restarted", conf={})
def slurmd_restarted(trial: Trial) -> str:
    """A slurmd alone: its job does not notice."""
    run = trial.start()
    run.wait_step(60)
    struck = run.struck()
    trial.cluster.kill_slurmd("h01")
    trial.cluster.start_slurmd("h01")
    return run.check_same(struck, causes=["done"])


def _orphan(trial: Trial, strike: str, *options: str) -> str:
    """A rank that lives on where Slurm has given it up, beside its successor."""
    run = trial.start(*options, config="one", pace=0.3)
    run.wait_step(45)
    struck = run.struck()
    orphan = run.task(0)
    host = run.attempts[0].read_record().hosts[0]
    if strike == "daemons":
        trial.cluster.kill_slurmd(host, steps=True)
    else:
        trial.cluster.set_link(host, up=False)
    run.wait(lambda: len(run.attempts) == 2, "a successor")
    run.gone(orphan)
    if strike == "network for a while":
        run.wait(lambda: run.causes, "the last word of the orphan's script")
        trial.cluster.set_link(host, up=True)
        run.wait(lambda: not run.processes(host, ""), "the end of the orphan's script")
    run.wait_attempt(2)
    seen = run.check_same(struck, seconds=240)
    if "superseded" not in run.rank_logs + run.log:
        raise run.differs("nobody says that the first attempt is superseded")
    if len(run.attempts) != 2:
        raise run.differs(f"{len(run.attempts)} attempts: the orphan's script started another")
    return f"{seen}; the orphan ended as superseded"


@fault("orphan-of-killed-daemons", conf=SOON, needs=("one",))
def orphan_of_killed_daemons(trial: Trial) -> str:
    return _orphan(trial, "daemons")


@fault("orphan-behind-a-cut-network", conf=SOON, needs=("one",))
def orphan_behind_a_cut_network(trial: Trial) -> str:
    return _orphan(trial, "network")


@fault("orphan-back-on-the-network", conf=SOON, needs=("one",))
def orphan_back_on_the_network(trial: Trial) -> str:
    """Its script may start the run again after a crash, and must not: it is superseded."""
    return _orphan(trial, "network for a while", "--retries", "3")


@fault("slurmctld-restarted", conf={})
def slurmctld_restarted(trial: Trial) -> str:
    run = trial.start()
    run.wait_step(60)
    struck = run.struck()
    trial.cluster.restart_slurmctld()
    return run.check_same(struck, causes=["done"])


@fault("slurmctld-away-at-requeue", conf={})
def slurmctld_away_at_requeue(trial: Trial) -> str:
    run = trial.start("--retries", "1")
    run.wait_step(60)
    struck = run.struck()
    trial.cluster.kill_slurmctld()
    run.gone(run.kill(1))
    run.wait_said("trying again")
    trial.cluster.start_slurmctld()
    run.wait_attempt(2)
    return run.check_same(struck, causes=["failed", "done"])


@fault("slurmctld-killed-at-submission", conf={})
def slurmctld_killed_at_submission(trial: Trial) -> str:
    """It may forget the job and issue its number to another: the run goes by its own name."""
    # It writes its jobs down at once, and then not for five seconds.
    slurm(trial, "sbatch", "--wrap", "true", "--output", "/dev/null")
    run = trial.start(pace=0.05)
    trial.cluster.kill_slurmctld()
    trial.cluster.start_slurmctld()
    forgotten = not run.queued()
    other = trial.start(name="other", pace=0.05)
    again = other.job_id == run.job_id
    other.wait_attempt(1)
    _is_not(run, forgotten, "queued", "running", "done")
    other.check_same(seconds=200)
    _is_not(run, forgotten, "done")
    if forgotten:
        done = trial.clusterddp("resume", "run")
        if done.returncode != 0:
            raise run.differs(f"resume: exit {done.returncode}: {done.stderr}")
    _release(run)
    seen = run.check_same(seconds=200)
    number = ", its number issued again" if again else ""
    return f"{seen}; the job was {'forgotten' if forgotten else 'kept'}{number}"


def _is_not(run: Run, forgotten: bool, *states: str) -> None:
    state = run.status()["state"]
    if forgotten and state in states:
        raise run.differs(f"status says {state} of a job that slurmctld has forgotten")


def _release(run: Run) -> None:
    """A job that a restarted slurmctld has held back is let go, as an operator would."""
    for job in run.queued():
        job_id = job.split()[0]
        try:
            slurm(run.trial, "scontrol", "release", job_id)
        except Exception as error:
            raise Differs(f"scontrol release {job_id}: {error}") from error


@fault("requeue-not-configured", conf={"JobRequeue": "0"})
def requeue_not_configured(trial: Trial) -> str:
    """JobRequeue=0: the script's own --requeue overrides it."""
    run = trial.start()
    run.wait_step(60)
    struck = run.struck()
    slurm(trial, "scancel", "--batch", "--signal=USR1", run.job_id)
    run.wait_attempt(2)
    return run.check_same(struck, causes=["signal", "done"])


@fault("requeue-refused", conf={"JobRequeue": "0"})
def requeue_refused(trial: Trial) -> str:
    """JobRequeue=0, and no directive that overrides it: a job goes on in its place."""
    run = trial.start("--omit-directive", "requeue")
    run.wait_step(60)
    struck = run.struck()
    first = run.job_id
    slurm(trial, "scancel", "--batch", "--signal=USR1", first)
    run.wait_attempt(2)
    seen = run.check_same(struck, causes=["signal", "done"])
    if run.job_id == first:
        raise run.differs("it went on in the same job")
    return f"{seen}; a job in its place"


@fault("no-requeue", conf={"JobRequeue": "0"})
def no_requeue(trial: Trial) -> str:
    """--no-requeue causes no other job; a person's resume goes on."""
    run = trial.start("--no-requeue")
    run.wait_step(60)
    struck = run.struck()
    slurm(trial, "scancel", "--batch", "--signal=USR1", run.job_id)
    run.check_failed("clusterddp resume", states=("stopped",), usable=struck.step)
    done = trial.clusterddp("resume", "run")
    if done.returncode != 0:
        raise run.differs(f"resume: exit {done.returncode}: {done.stderr}")
    return run.check_same(struck, causes=["signal", "done"]) + "; by resume"
