import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import clusterddp
from clusterddp import JobSpec, Resources, TrainConfig, launch, render, submit
from clusterddp.cli.main import cli
from clusterddp.errors import RequestError, TrainingError
from clusterddp.files import write_record
from clusterddp.run import attempt as attempts
from clusterddp.run.events import Failure
from clusterddp.run.outcome import failure_of
from clusterddp.run.records import FinalRecord, Outcome, TaskError
from clusterddp.run.run_dir import RunDir
from clusterddp.worker import workstation
from tests.event_lines import kinds, read_events
from tests.waiting import PATIENCE

FLAGS = ["--run-name=one", "--nodes=2", "--gpus-per-node=4", "--dataset=synthetic", "--epochs=3"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, synthetic_dir: Path) -> Path:
    """A directory to submit from: a sbatch that keeps what it is sent, and a dataset in data/."""
    (tmp_path / "bin").mkdir()
    program(
        tmp_path,
        "sbatch",
        f'case "$*" in *--test-only*) ;; *) cat > "{tmp_path}/sent";; esac\necho 7',
    )
    monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "data").symlink_to(synthetic_dir)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def program(folder: Path, name: str, body: str) -> None:
    """A stand-in for one of Slurm's commands."""
    path = folder / "bin" / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def spec(folder: Path, **more: Any) -> JobSpec:
    return JobSpec(
        run_name="one", run_dir=str(Path("jobs/one").absolute()),
        resources=Resources(nodes=2, gpus_per_node=4), python=sys.executable,
        **{"train": TrainConfig(dataset="synthetic", epochs=3, data_dir=f"{folder}/data"), **more},
    )  # fmt: skip


def command(*argv: str) -> int:
    code = cli.main(["submit", *argv], standalone_mode=False)
    assert isinstance(code, int)
    return code


def test_importing_the_package_loads_nothing_and_names_are_known() -> None:
    code = (
        "import sys, clusterddp\n"
        "assert not {'clusterddp.api', 'clusterddp.errors', 'click', 'torch'} & {*sys.modules}\n"
        "from clusterddp import DistEnv, ClusterDDPError, render, submit, launch\n"
        "assert not {'torch', 'torchvision', 'numpy', 'jinja2', 'submitit'} & {*sys.modules}\n"
        "import clusterddp.launchers.sbatch\n"
        "assert clusterddp.render is render"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)
    assert set(clusterddp.__all__) <= set(dir(clusterddp))
    assert all(getattr(clusterddp, name) for name in clusterddp.__all__)
    assert set(clusterddp.__all__) == {*clusterddp._MODULES, "__version__"}
    with pytest.raises(AttributeError, match="no attribute 'lunch'"):
        clusterddp.lunch  # noqa: B018
    assert (Path(clusterddp.__file__).parent / "py.typed").exists()


def test_the_api_loads_no_module_of_the_command_line() -> None:
    code = (
        "import sys, clusterddp.api\n"
        "assert not [name for name in sys.modules if name.startswith('clusterddp.cli')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)


def test_a_run_does_what_the_commands_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = submit(spec(folder))
    assert clusterddp.runs() == [run] == [clusterddp.Run(run.run_dir)]
    asked = dataclasses.replace(spec(folder), slurm_folder=f"{folder}/bin")
    assert (run.name, run.spec) == ("one", asked)
    program(folder, "squeue", "echo '7|PENDING|Priority|'")
    program(folder, "scancel", "exit 0")
    with pytest.raises(RequestError, match=r"has no rank-1\.log \(yet\): it is queued"):
        run.logs(rank=1)
    with pytest.raises(RequestError, match=r"one is already queued .* as job 7\. Follow it with"):
        run.resume()
    stopped = run.stop()
    assert (stopped.requested, stopped.cancelled, stopped.job_id) == (False, True, "7")
    program(folder, "squeue", "echo '7|CANCELLED|None|'")
    assert run.wait().state == "cancelled"
    assert run.cancel().cancelled is False
    job_log = run.run_dir / "logs" / "job.log"
    job_log.write_text("first\nlast\n")
    assert run.logs(job=True) == "first\nlast\n"
    assert run.logs(job=True, lines=1) == "last\n"

    monkeypatch.chdir(folder)
    longer = dataclasses.replace(run.spec.resources, time="1:00:00")
    again = run.resume(dataclasses.replace(run.spec, resources=longer))
    assert (again.job_id, again.source, again.beginning) == ("7", None, "starts from the beginning")
    assert "#SBATCH --time=1:00:00" in (folder / "sent").read_text()
    assert run.spec.resources == longer
    assert Path.cwd() == folder  # though it was submitted from its own
    with pytest.raises(RequestError, match="'resume' cannot change --launcher of one"):
        run.resume(dataclasses.replace(run.spec, launcher="local"))


def test_a_run_that_has_no_folder_is_refused(folder: Path) -> None:
    run = clusterddp.Run(folder / "nowhere")
    for ask in (run.status, run.wait, run.logs, run.stop, run.cancel, run.resume):
        with pytest.raises(RequestError, match=f"there is no run at {run.run_dir}"):
            ask()
    assert not run.run_dir.exists()


def test_render_gives_the_bytes_of_the_dry_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*FLAGS, f"--data-dir={folder}/data", f"--python={sys.executable}"]
    assert command("--dry-run", *flags) == 0
    assert render(spec(folder)) == capsys.readouterr().out
    (folder / "own.sbatch.j2").write_text("#!/bin/bash\n# of my own\n")
    assert "# of my own" in render(spec(folder, template="own.sbatch.j2"), folder)


def test_submit_leaves_what_the_command_leaves(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(*[*FLAGS, f"--data-dir={folder}/data", f"--python={sys.executable}"]) == 0
    said = capsys.readouterr().err
    by_command, sent = RunDir(Path("jobs/one").rename(folder / "by-command")), folder / "sent"
    before = sent.read_text()
    sent.unlink()

    run = submit(spec(folder))
    assert (run.job_id, run.run_dir) == ("7", Path("jobs/one").absolute())
    assert sent.read_text() == before == RunDir(run.run_dir).script.read_text()
    assert capsys.readouterr().err == said
    for name in ("spec.json", "script.sbatch"):
        assert (run.run_dir / name).read_bytes() == (by_command.path / name).read_bytes()
    (submitted,) = read_events(RunDir(run.run_dir))
    (earlier,) = read_events(by_command)
    assert {**submitted, "time": 0} == {**earlier, "time": 0}
    assert run.status().job_id == "7"


def test_a_submitted_command_has_its_code_copied(folder: Path) -> None:
    Path("train.py").write_text("print(1)\n")
    run = submit(spec(folder, train=None, command=("python", "train.py")))
    assert (run.run_dir / "code" / "train.py").read_text() == "print(1)\n"
    assert "train.py" in str(json.loads((run.run_dir / "code.json").read_text()))


def test_a_command_is_submitted_by_keywords_as_by_flags(folder: Path) -> None:
    Path("train.py").write_text("pass\n")
    flags = [
        "--nodes=2", "--gpus-per-node=4", "--time=30", "--setup=a", "--env=A=b",
        "--runs-dir=out",
    ]  # fmt: skip
    words = ["python", "train.py"]
    assert command("--run-name=one", *flags, "--", *words) == 0
    run = submit(
        words, run_name="two", nodes=2, gpus_per_node=4, time=30, setup="a", env=["A=b"],
        runs_dir=Path("out"),
    )  # fmt: skip
    assert run.run_dir == Path("out/two").absolute()
    first = clusterddp.Run(Path("out/one")).spec
    assert run.spec == dataclasses.replace(first, run_name="two", run_dir=str(run.run_dir))
    with pytest.raises(TimeoutError, match="two has not ended within 0 s"):
        run.wait(timeout=0)


def test_keywords_take_what_python_has_for_them(folder: Path) -> None:
    program(folder, "squeue", "echo '7|PENDING|Priority|'")
    Path("train.py").write_text("pass\n")
    Path("tpl").mkdir()
    shipped = Path(clusterddp.__file__).parents[1] / "templates" / "ddp.sbatch.j2"
    Path("tpl/own.sbatch.j2").write_text(f"{shipped.read_text()}# my own\n")
    first = submit(["python", Path("train.py")], run_name="first", ntasks_per_node=2)
    assert first.spec.command == ("python", "train.py")
    assert first.spec.resources.tasks_per_node == 2
    run = submit(
        ["python", "train.py"], env={"A": "b", "HOME": None}, sbatch={"licenses": "a:1"},
        after=first, template=Path("tpl/own.sbatch.j2"),
    )  # fmt: skip
    assert (run.spec.environment, run.spec.pass_environment) == ((("A", "b"),), ("HOME",))
    assert dict(run.spec.sbatch)["licenses"] == "a:1"
    assert dict(run.spec.after) == {str(first.run_dir): "ok"}
    assert (run.run_dir / "script.sbatch").read_text().endswith("# my own\n")


def test_warnings_of_keywords_name_these_and_a_line_for_the_shell_keeps_its_flags(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    submit(["true"], nodes=2, gpus_per_node=4)
    assert "add for example cpus_per_task 4" in capsys.readouterr().err
    with pytest.raises(RequestError) as refused:
        submit(["torchrun", "train.py"])
    assert "Use: clusterddp submit --template torchrun -- python train.py (with" in str(
        refused.value
    )
    assert "add allow_launcher." in str(refused.value)


def test_a_test_returns_slurms_forecast_and_submits_nothing(folder: Path) -> None:
    program(folder, "sbatch", "echo 'sbatch: Job 9 to start at noon' >&2")
    assert submit(["/bin/true"], test_only=True, run_name="one") == "to start at noon"
    assert submit(spec(folder), test_only=True) == "to start at noon"
    with pytest.raises(RequestError, match=r"^test_only conflicts with launcher local"):
        submit(["/bin/true"], test_only=True, launcher="local")
    assert list(Path.cwd().iterdir()) == []


def test_the_training_is_submitted_by_keywords(folder: Path) -> None:
    run = submit(dataset="synthetic", data_dir="../data", epochs=3, gpus_per_node="a100:2")
    train = run.spec.train
    assert train is not None
    assert (train.epochs, run.spec.resources.gpu_type) == (3, "a100")
    assert train.data_dir == os.path.abspath("../data")
    assert run.run_dir.parent == Path("jobs").absolute()


@pytest.mark.parametrize(
    ("words", "options", "message"),
    [
        (["true"], {"node": 2}, "there is no option 'node' (did you mean 'nodes'?)"),
        (["true"], {"nodes": 0}, "nodes: 0 is not valid. Use a whole number from 1 to 1000000."),
        (["true"], {"nodes": 2.5}, "nodes: 2.5 is float, not int."),
        (["true"], {"snapshot_limit": "x"}, "snapshot_limit: 'x' is not valid. Use a number."),
        (["true"], {"env": 3}, "env: 3 is not valid. Use a string or a list of strings."),
        (["true"], {"lr": 0.1}, "lr: only for the built-in training, but a command is given"),
        (["true"], {"keep_last": 2}, "given. In the script, use Loop(keep_last=…) or resume(…, "),
        (["true"], {"gpus_per_node": 2, "tasks_per_node": 3}, "conflicts with gpus_per_node 2: "),
        (["true"], {"run_name": "a/b"}, "run_name"),
        (["true"], {"template": "tpl/none.j2"}, "template: there is no file 'tpl/none.j2'."),
        (["true"], {"template_dir": "none"}, "template_dir: there is no directory 'none'."),
        (["true"], {"no_requeue": True}, "there is no option 'no_requeue': give requeue=False."),
        (["true"], {"wait": True}, "there is no option 'wait': call wait() of the returned"),
        ("python train.py", {}, "is not a list of words"),
    ],
)
def test_a_wrong_keyword_is_refused_by_its_name(
    folder: Path, words: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError) as refused:
        submit(words, **options)
    assert message in str(refused.value)
    assert "--" not in str(refused.value)
    assert not Path("jobs").exists()


def test_what_cannot_be_submitted_is_refused_and_leaves_nothing(folder: Path) -> None:
    with pytest.raises(RequestError, match="nowhere does not exist"):
        submit(spec(folder, train=TrainConfig(dataset="synthetic", init_from="nowhere")))
    nested = spec(folder, train=None, command=("torchrun", "train.py"))
    for ask in (render, submit):
        with pytest.raises(RequestError, match="--template torchrun -- python train"):
            ask(nested)
    for number in range(60):  # a single large file would be linked
        Path(f"part{number}.py").write_text("x" * 20_000)
    with pytest.raises(RequestError):
        submit(spec(folder, train=None, command=("true",), snapshot=True), snapshot_limit_mb=0.5)
    assert not Path("jobs").exists()
    assert not (folder / "sent").exists()
    submit(spec(folder))
    with pytest.raises(RequestError, match="already exists"):
        submit(spec(folder))


def test_a_configuration_is_trained_and_its_report_comes_back(folder: Path) -> None:
    config = TrainConfig(
        dataset="synthetic", data_dir=f"{folder}/data", threads=1, max_steps=1, device="cpu"
    )
    report = launch(config, procs=2, start_method="forkserver", run_dir="jobs/two")
    assert (report["world_size"], report["steps"]) == (2, 1)
    assert kinds(RunDir(Path("jobs/two"))) == ["submitted", "started", "ended"]


def test_a_failed_training_names_the_rank_that_failed_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forked from here, where the model that it is to train cannot be made on rank 1."""
    from clusterddp.models import nets

    def broken() -> Any:
        if os.environ["RANK"] == "1":
            raise ValueError("no such layer")
        return convnet()

    convnet = nets.MODELS["convnet"]
    monkeypatch.setitem(nets.MODELS, "convnet", broken)
    config = TrainConfig(
        dataset="synthetic", data_dir=f"{folder}/data", threads=1, max_steps=1, device="cpu"
    )
    with pytest.raises(TrainingError) as raised:
        launch(config, procs=2, start_method="fork", run_dir="jobs/two")
    words = str(raised.value)
    assert words.startswith("rank 1 on ")
    assert "failed first: ValueError: no such layer" in words
    assert words.endswith("ValueError: no such layer") and "Traceback" in words
    assert raised.value.code == "CD1209"
    with pytest.raises(RequestError, match="'clone' is not one of exec, fork, spawn, forkserver"):
        launch(config, start_method="clone")
    with pytest.raises(RequestError, match="args"):
        launch(config, args=(1,))  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("exit_code", "reason", "code"),
    [(75, "stop", "CD1204"), (75, "SIGTERM", "CD1208"), (1, "", "CD1219"), (1, "rank 1", "CD0810")],
)
def test_an_end_has_the_code_that_the_log_has(
    folder: Path, monkeypatch: pytest.MonkeyPatch, exit_code: int, reason: str, code: str
) -> None:
    def trained(_: TrainConfig, run: RunDir, *__: object) -> tuple[int, Failure | None]:
        attempt = attempts.begin(run)
        if exit_code == 75:
            attempt.write_final_record(attempt.end, vars(FinalRecord("stopped", reason, 3)))
        if not reason or exit_code == 75:
            return exit_code, None
        error = TaskError("", "the loss is nan", code=code)
        failed = Outcome(1, 1, 0, "here", 7, "", 0, "", 1.0, 2.0, exit_code, error=error)
        write_record(attempt.outcomes / "rank-1.json", dataclasses.asdict(failed))
        return exit_code, failure_of(failed)

    monkeypatch.setattr(workstation, "train", trained)
    config = TrainConfig(dataset="synthetic", data_dir=f"{folder}/data")
    with pytest.raises(TrainingError) as raised:
        launch(config, run_dir="jobs/one")
    assert raised.value.code == code
