"""The judgement of runs that another one waits for, and what Slurm is asked to wait for."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from clusterddp import polling
from clusterddp.errors import RequestError, SlurmError
from clusterddp.request.resources import Resources
from clusterddp.request.spec import JobSpec
from clusterddp.request.sweep import Sweep
from clusterddp.run import events
from clusterddp.run.run_dir import RunDir, SweepDir
from clusterddp.slurm.states import HELD, JobState, State
from clusterddp.status import chain
from clusterddp.status.chain import Awaited, Readiness
from clusterddp.status.state import RunState
from clusterddp.status.status import RunStatus, run_status

DUE = {
    #            ok          any         failed
    "created": ("held", "held", "held"),
    "queued": ("waits", "waits", "waits"),
    "running": ("waits", "waits", "waits"),
    "done": ("met", "met", "never"),
    "failed": ("never", "met", "met"),
    "cancelled": ("never", "met", "never"),
    "stopped": ("held", "met", "held"),
    "unknown": ("unknown", "unknown", "unknown"),
    "forgotten": ("never", "met", "met"),
}


def awaited(name: str, state: str, condition: str = "ok", **more: Any) -> Awaited:
    status = RunStatus(name, state, **{"job_id": "12", "launcher": "sbatch", **more})
    return Awaited.of(RunDir(Path("jobs", name)), condition, [status])


@pytest.mark.parametrize("state", DUE)
def test_each_state_meets_a_condition_or_not(state: str) -> None:
    assert {*DUE} - {"forgotten"} == {*RunState}
    gone = {"is_forgotten": True} if state == "forgotten" else {}
    shown = "unknown" if gone else state
    judged = [awaited("a", shown, how, **gone).readiness.value for how in ("ok", "any", "failed")]
    assert tuple(judged) == DUE[state]


@pytest.mark.parametrize(
    ("states", "due"),
    [
        # of the trials        ok       any      failed
        ("done done", ("met", "met", "never")),
        ("done failed", ("never", "met", "met")),
        ("done failed queued", ("waits", "waits", "waits")),
        ("stopped done", ("held", "met", "held")),
        ("stopped failed", ("never", "met", "met")),
        ("cancelled done", ("never", "met", "never")),
        ("created done", ("held", "held", "held")),
        ("unknown failed", ("unknown", "unknown", "unknown")),
    ],
)
def test_a_sweep_comes_to_an_end_with_its_last_trial(states: str, due: tuple[str, ...]) -> None:
    known = [RunStatus(f"s-{i}", state) for i, state in enumerate(states.split())]
    judged = [chain.judge_all(how, known).value for how in ("ok", "any", "failed")]
    assert tuple(judged) == due


def test_a_sweep_is_waited_for_by_its_arrays(tmp_path: Path) -> None:
    known = [
        RunStatus("s-0", "running", job_id="15", array_task="7_0", launcher="sbatch"),
        RunStatus("s-1", "queued", job_id="7_1", launcher="sbatch"),
        RunStatus("s-2", "queued", job_id="21", launcher="sbatch"),
        RunStatus("s-3", "failed", job_id="9_3", launcher="sbatch"),
    ]
    seen = Awaited.of(SweepDir(tmp_path / "s"), "any", known)
    assert chain.dependency([seen]) == "afterany:7,afterany:21"
    assert (seen.text, seen.description) == ("s:any", "s (running: 2 queued, 1 running, 1 failed)")


def test_slurm_is_asked_to_wait_for_jobs_whatever_their_end() -> None:
    seen = [
        awaited("a", "running"), awaited("b", "done"),
        awaited("c", "queued", "failed", array_task="89_3"), awaited("d", "running"),
    ]  # fmt: skip
    assert chain.dependency(seen) == "afterany:12,afterany:89_3"
    assert chain.dependency(seen, ["singleton", ""]) == "singleton,afterany:12,afterany:89_3"
    assert chain.dependency(seen[1:2], [""]) == ""
    assert [each.text for each in seen] == ["a", "b", "c:failed", "d"]


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (awaited("a", "failed", detail="exit code 3"), "a (failed: exit code 3) has not ended"),
        (awaited("a", "stopped"), "Submit it first: 'clusterddp resume a'"),
        (awaited("a", "unknown"), "its state is unknown"),
        (awaited("a", "running", launcher="local"), "has no Slurm job to wait for"),
    ],
)
def test_what_can_never_begin_is_refused(seen: Awaited, words: str) -> None:
    with pytest.raises(RequestError) as refusal:
        chain.check([awaited("z", "done"), seen])
    assert words in str(refusal.value)


def queue(folder: Path, name: str, *after: str, **more: Any) -> RunDir:
    """Make a run, or a sweep, whose job waits in the queue for others."""
    path = folder / "jobs" / name
    runs = tuple((str(folder / "jobs" / each), "ok") for each in after)
    spec = JobSpec(
        run_name=name, run_dir=str(path), resources=Resources(), after=runs,
        **{"command": ("true",), **more},
    )  # fmt: skip
    run = SweepDir(path) if spec.sweep else RunDir(path)
    run.make()
    run.spec.write_text(spec.to_json())
    for index in range(len(spec.sweep)):
        queue(folder, f"{name}-{index}", *after)
    events.add(run.events, events.Submitted(job_id="12", launcher="sbatch"))
    return run


TRIALS: dict[str, Any] = {"command": ("echo", "{n}"), "sweep": Sweep(("n",), (("0",), ("1",)))}


@pytest.mark.parametrize(
    ("runs", "again", "words"),
    [
        ({"b": [], "a": ["b"]}, "b", "a waits for b, so b would wait for itself. Cancel a first"),
        ({"b": [], "c": ["b"], "a": ["c"]}, "b", "a waits for c, c waits for b, so b would"),
        ({"s": [], "a": ["s"]}, "s-1", "a waits for s, so s-1 would wait for itself"),
        ({"s": [], "a": ["s-1"]}, "s", "a waits for s-1, so s would wait for itself"),
        ({"b": [], "s": ["b"], "a": ["s-1"]}, "b", "a waits for s-1, s-1 waits for b"),
        ({"b": [], "a": ["b"]}, "e", ""),
        ({"b": [], "c": ["d"], "d": ["c"], "a": ["c"]}, "b", ""),
        ({"a": ["gone"]}, "b", ""),
    ],
)
def test_runs_that_would_wait_for_each_other_are_refused(
    tmp_path: Path, runs: dict[str, list[str]], again: str, words: str
) -> None:
    made = {
        name: queue(tmp_path, name, *after, **(TRIALS if name == "s" else {}))
        for name, after in runs.items()
    }
    path = tmp_path / "jobs" / again
    spec = SweepDir(path).load_spec() if again == "s" else request(tmp_path, run_name=again)
    if again == "s-1":
        spec = made["s"].load_spec().trial_spec(1)
    status = RunStatus("a", "queued", job_id="12", launcher="sbatch")
    seen = [Awaited.of(made["a"], "ok", [status])]
    if not words:
        chain.check(seen, spec)
        return
    with pytest.raises(RequestError) as refusal:
        chain.check(seen, spec)
    assert words in str(refusal.value)
    events.add(made["a"].events, events.Started(job_id="12", attempt=1))
    chain.check(seen, spec)  # which has begun, and waits no more


def test_a_held_job_that_cannot_be_told_of_a_new_one_is_named_with_the_remedy(
    waiting: RunDir, changes: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    events.add(waiting.events, events.Submitted(job_id="5", launcher="sbatch"))
    events.add(waiting.events, events.Waits(job_id="5", runs=("a",), held=True))
    a = RunDir(waiting.path.with_name("a"))
    a.make()
    events.add(a.events, events.DependentAdded(by=str(waiting.path)))

    def refuse(*_: str) -> None:
        raise SlurmError("Circular job dependency")

    monkeypatch.setattr(chain.slurm, "dependency_of", refuse)
    for job, words in (
        (JobState(State.PENDING, HELD), "Slurm holds it (Circular job dependency)"),
        (JobState(State.UNKNOWN, problem="no answer"), "'scontrol release 5'"),
        (JobState(State.PENDING, "Dependency"), "b will check a at its start, not before"),
    ):
        monkeypatch.setattr(chain.slurm, "query", lambda ids, job=job: dict.fromkeys(ids, job))
        chain.update_waiting_jobs(a)
        assert words in capsys.readouterr().err
    assert changes == []


def test_a_rehearsal_waits_for_nothing_that_goes_on() -> None:
    chain.check([awaited("a", "done")], has_queue=False)
    with pytest.raises(RequestError, match="has no queue to wait in"):
        chain.check([awaited("a", "running")], has_queue=False)


@pytest.mark.parametrize("condition", ["ok", "any", "failed"])
def test_a_run_whose_directory_is_gone_comes_to_no_end(tmp_path: Path, condition: str) -> None:
    [seen] = chain.check_awaited(request(tmp_path, after=((str(tmp_path / "jobs/a"), condition),)))
    assert (seen.readiness, seen.description) == (
        Readiness.NEVER,
        f"a (gone: no {tmp_path}/jobs/a)",
    )


def request(folder: Path, **more: Any) -> JobSpec:
    name = more.pop("run_name", "b")
    fields = {"command": ("true",), **more}
    return JobSpec(
        run_name=name, run_dir=str(folder / "jobs" / name), resources=Resources(), **fields
    )


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"after": (("jobs/a", "ok"),)}, "not an absolute path"),
        ({"after": (("/jobs/a", "done"),)}, "'done' is not one of ok, any, failed"),
        ({"after": (("/jobs/a\n", "ok"),)}, "control character"),
        ({"after": (("/jobs/a", "ok"),), "launcher": "submitit"}, "does not check other runs"),
    ],
)
def test_a_request_that_cannot_wait_is_refused(
    tmp_path: Path, more: dict[str, Any], words: str
) -> None:
    with pytest.raises(RequestError) as refusal:
        request(tmp_path, **more)
    assert words in str(refusal.value)


def test_a_request_does_not_wait_for_itself_or_for_any_of_several_jobs(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="b cannot wait for itself"):
        request(tmp_path, after=((str(tmp_path / "jobs/b"), "ok"),))
    with pytest.raises(RequestError, match="conflicts with --dependency afterok:1"):
        dataclasses.replace(
            request(tmp_path, after=(("/jobs/a", "ok"),)),
            resources=Resources(dependency="afterok:1?afterok:2"),
        )


def test_a_trial_does_not_wait_for_its_sweep_nor_a_sweep_for_its_trial(tmp_path: Path) -> None:
    sweep = request(tmp_path, command=("echo", "{n}"), sweep=Sweep(("n",), (("0",), ("1",))))
    path = sweep.run_dir
    trial = sweep.trial_spec(1)
    for spec, after, words in (
        (trial, path, "b-1 is a trial of b and cannot wait for it"),
        (sweep, f"{path}-1", "b cannot wait for itself"),
    ):
        with pytest.raises(RequestError, match=words):
            dataclasses.replace(spec, after=((after, "any"),))
    dataclasses.replace(trial, after=((f"{path}-0", "ok"),))
    dataclasses.replace(sweep, after=((f"{path}-2", "ok"),))


def test_the_record_of_a_request_names_the_runs_where_there_are_some(tmp_path: Path) -> None:
    plain, waits = request(tmp_path), request(tmp_path, after=(("/jobs/a b", "any"),))
    assert '"after"' not in plain.to_json()
    assert JobSpec.from_json(waits.to_json()) == waits
    assert JobSpec.from_script("\n".join(waits.to_script()), waits.run_dir) == waits


@pytest.fixture
def waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run that waits for the run `a`, whose job 12 runs as far as Slurm tells; its own is 5."""
    spec = request(tmp_path, after=((str(tmp_path / "jobs/a"), "ok"),))
    run = RunDir(Path(spec.run_dir))
    run.make(run.logs)
    run.spec.write_text(spec.to_json())
    monkeypatch.setattr(chain, "check_awaited", lambda _: [awaited("a", "running")])
    monkeypatch.setattr(chain.slurm, "ending", lambda *_: chain.slurm.Ending.NONE)
    return run


def test_a_job_that_cannot_go_back_ends_with_the_reason(
    waiting: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: str) -> None:
        raise chain.slurm.RequeueRefused("not on this cluster")

    monkeypatch.setattr(chain.slurm, "requeue_with_dependency", refuse)
    with pytest.raises(chain.NotDue, match=r"cannot wait again for a \(running\): not on") as seen:
        chain.requeue_until_due(waiting, "5", 0)
    assert (seen.value.cause, seen.value.code) == ("failed", "CD0406")
    assert events.read(waiting.events) == []


def test_a_job_that_slurm_holds_in_the_queue_has_not_ended(
    waiting: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave_held(*_: str) -> None:
        raise chain.slurm.StillHeld("Job dependency problem")

    monkeypatch.setattr(chain.slurm, "requeue_with_dependency", leave_held)
    words = chain.requeue_until_due(waiting, "5", 0)
    [event] = events.read(waiting.events)
    assert isinstance(event, events.Waits)
    assert event.held
    for said in (words, event.why):
        assert "a (running); Slurm holds it (Job dependency problem)" in said
        assert "'scontrol release 5'" in said


@pytest.fixture
def changes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What Slurm is asked to change."""
    asked: list[tuple[str, ...]] = []
    for name in ("requeue_with_dependency", "set_dependency", "release"):
        monkeypatch.setattr(chain.slurm, name, lambda *args, name=name: asked.append((name, *args)))
    return asked


@pytest.mark.parametrize(
    ("then", "let_go"),
    [
        ("queued", [("set_dependency", "5", "afterany:12"), ("release", "5")]),
        ("done", [("release", "5")]),
        ("failed", [("release", "5")]),  # its start says so
        ("unknown", [("release", "5")]),  # its start asks for a while
        ("stopped", []),
    ],
)
def test_a_job_is_let_go_where_the_awaited_run_has_gone_on_while_it_was_being_held(
    waiting: RunDir, changes: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, then: str,
    let_go: list[tuple[str, ...]],
) -> None:  # fmt: skip
    monkeypatch.setattr(
        chain, "check_awaited", lambda _: [awaited("a", then if changes else "stopped")]
    )
    assert chain.requeue_until_due(waiting, "5", 0) == "waits for a (stopped)"
    assert changes == [("requeue_with_dependency", "5", ""), *let_go]


def test_a_job_that_cannot_be_let_go_stays_held_with_the_remedy(
    waiting: RunDir, changes: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def refuse(*_: str) -> None:
        raise SlurmError("no answer")

    monkeypatch.setattr(
        chain, "check_awaited", lambda _: [awaited("a", "queued" if changes else "stopped")]
    )
    monkeypatch.setattr(chain.slurm, "set_dependency", refuse)
    chain.requeue_until_due(waiting, "5", 0)
    assert (
        "Slurm holds it (no answer). To have it check again: 'scontrol release 5'"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("state", [State.PENDING, State.COMPLETING])
@pytest.mark.parametrize("held", [True, False])
def test_who_makes_a_new_job_releases_what_slurm_holds_though_no_record_says_so_yet(
    waiting: RunDir, changes: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, state: State,
    held: bool,
) -> None:  # fmt: skip
    job = JobState(state, HELD if held else "Dependency")
    monkeypatch.setattr(chain.slurm, "query", lambda ids: dict.fromkeys(ids, job))
    monkeypatch.setattr(chain.slurm, "dependency_of", lambda _: [])
    events.add(waiting.events, events.Submitted(job_id="5", launcher="sbatch"))
    a = RunDir(waiting.path.with_name("a"))
    a.make()
    events.add(a.events, events.DependentAdded(by=str(waiting.path)))
    chain.update_waiting_jobs(a)
    depends = [("set_dependency", "5", "afterany:12")] if held or state is State.PENDING else []
    assert changes == [*depends, *([("release", "5")] if held else [])]


def test_a_job_that_was_cancelled_meanwhile_is_not_put_back(
    waiting: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain.slurm, "ending", lambda *_: chain.slurm.Ending.CANCELLED)
    with pytest.raises(chain.NotDue) as seen:
        chain.requeue_until_due(waiting, "5", 0)
    assert seen.value.cause == "cancelled"


def test_slurm_is_asked_again_where_it_does_not_answer_and_given_up(
    waiting: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [[awaited("a", "unknown")], [awaited("a", "done")]]
    monkeypatch.setattr(chain, "check_awaited", lambda _: answers.pop(0))
    monkeypatch.setattr(polling, "SLURM_POLL_SECONDS", 0)
    assert chain.requeue_until_due(waiting, "5", 0) == ""
    monkeypatch.setattr(
        chain, "check_awaited", lambda _: [awaited("a", "unknown", detail="no answer")]
    )
    monkeypatch.setattr(polling, "SLURM_RESTART_SECONDS", 0)
    with pytest.raises(chain.NotDue, match=r"because it waits for a: a \(unknown: no answer\)"):
        chain.requeue_until_due(waiting, "5", 0)


@pytest.fixture
def requeued(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The jobs that were put back, with what each waits for."""
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(chain.slurm, "requeue_with_dependency", lambda *asked: calls.append(asked))
    return calls


def test_a_run_waits_until_its_first_attempt_and_is_shown_to(
    waiting: RunDir, requeued: list[tuple[str, ...]]
) -> None:
    events.add(waiting.events, events.Submitted(job_id="5", launcher="sbatch"))
    assert chain.requeue_until_due(waiting, "5", 0) == "waits for a (running)"
    assert requeued == [("5", "afterany:12")]
    for reason, shown in (("Dependency", ["a"]), ("BeginTime", ["a"]), ("Resources", [])):
        status = run_status(waiting, {"5": JobState(State.PENDING, reason)})
        assert (status.state, status.dependencies) == ("queued", shown)
    events.add(waiting.events, events.Started(job_id="5", attempt=1))
    assert chain.requeue_until_due(waiting, "5", 1) == ""


def test_a_trial_waits_again_by_its_name_until_it_begins(
    waiting: RunDir, requeued: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    events.add(waiting.events, events.Submitted(job_id="7_3", launcher="sbatch"))
    assert chain.requeue_until_due(waiting, "9", 0) == "waits for a (running)"
    assert requeued == [("7_3", "afterany:12")]
    status = run_status(waiting, {"7_3": JobState(State.PENDING, "Dependency")})
    assert (status.state, status.dependencies) == ("queued", ["a"])
    events.add(waiting.events, events.CancelRequested(job_id="7_3"))
    assert chain.requeue_until_due(waiting, "9", 1) == ""  # which says so later on
