"""Requests that are saved to a file and taken from one, or from a run."""

import json
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from clusterddp.cli.main import cli
from clusterddp.cli.request_file import to_toml
from clusterddp.errors import ClusterDDPError
from clusterddp.request.spec import OPTIONS, JobSpec
from clusterddp.run.run_dir import RunDir
from tests.cli.commands.test_submit import SCRIPTS
from tests.hostile import CARRIED


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))


def invoke(*argv: str, **environ: str) -> Result:
    return CliRunner().invoke(cli, list(argv), env=environ)


def refused(*argv: str) -> str:
    """The words with which a command is refused."""
    done = invoke(*argv)
    if isinstance(done.exception, ClusterDDPError):
        assert done.exception.exit_code == 2
        return str(done.exception)
    assert done.exit_code == 2, done.output
    return done.stderr


def asked(*argv: str, **environ: str) -> JobSpec:
    """The request that a dry run renders."""
    done = invoke("submit", "--dry-run", "--run-name", "it", *argv, **environ)
    assert done.exit_code == 0, done.output
    return JobSpec.from_script(done.stdout, str(Path("jobs/it").absolute()))


def recorded(spec: JobSpec, name: str = "a") -> None:
    """Make a run of this request, as a submission would."""
    run = RunDir(Path("jobs", name).absolute())
    run.make(run.logs)
    fields = json.loads(spec.to_json()) | {"run_name": name, "run_dir": str(run.path)}
    run.spec.write_text(json.dumps(fields))


TRAINING = [
    "--strategy", "ddp", "--sync-batchnorm", "--data-dir", "d",
    "--gradient-accumulation-steps", "2",
    "--warmup-steps", "5", "--momentum", "0.5", "--beta2", "0.9", "--label-smoothing", "0.1",
    "--augment", "affine",
    "--deterministic", "--precision", "bf16", "--threads", "2", "--numa-binding", "node",
    "--bucket-cap-mb", "3", "--comm-hook", "fp16", "--cuda-graph", "off", "--compile",
    "--data-pipeline", "loader", "--num-workers", "1",
    "--eval-every", "9epochs", "--log-every", "7",
    "--profile", "0", "--tensorboard", "--rendezvous-timeout", "77s",
    "--process-group-timeout", "99s",
    "--straggler-window", "3s", "--snapshot-every", "4s", "--model", "mlp", "--log-per", "node",
]  # fmt: skip
AROUND = [
    "--python", "/opt/env/bin/python3", "--controller-python", "python3", "--force",
    "--stage-env", "auto",
    "--allow-launcher",
    "--no-requeue", "--max-restarts", "1", "--template", "torchrun.sbatch.j2",
    "--avoid-bad-nodes-for", "3h", "--preflight", "none",
    "--no-stacks", "--hang-timeout", "60m", "--on-hang", "end", "--check-python",
    "--snapshot-limit", "9", "--notify", "sh -c 'echo \"a b\"'", "--report-to", "wandb",
    "--", "torchrun", "train.py",
]  # fmt: skip
OF_RUNS = {name: argv for name, argv in SCRIPTS.items() if "--sweep" not in argv} | {
    "all of a training": TRAINING,
    "all around a command": AROUND,
}
ABOUT_ANOTHER = {
    *("after", "in-hold", "recipe", "init-from", "find-batch-size", "runs-dir", "template-dir")
}
"""Options with tests of their own, of which a request holds what they lead to."""


def test_every_option_is_among_those_that_are_the_same_again() -> None:
    typed = {
        word.removeprefix("--no-").removeprefix("--") for argv in OF_RUNS.values() for word in argv
    }
    assert {*OPTIONS} - typed == ABOUT_ANOTHER


@pytest.mark.parametrize("argv", OF_RUNS.values(), ids=OF_RUNS)
def test_a_request_is_the_same_again_from_a_file_and_from_a_run(argv: list[str]) -> None:
    before = asked("--save-config", "it.toml", *argv)
    assert asked("--config", "it.toml") == before
    recorded(before)
    # What a run's request leaves out stays out, whatever the variables and site.cfg say.
    Path("site.cfg").write_text("[defaults]\nmem = 1G\nmodule = other\n[environment]\nOTHER = 1\n")
    around = {"CLUSTERDDP_TIME": "7", "SBATCH_QOS": "low", "SBATCH_HINT": "nomultithread"}
    assert asked("--config", "a", **around) == before


@pytest.mark.parametrize("value", CARRIED)
def test_every_text_survives_a_file(value: str) -> None:
    argv = ["--env", f"A={value}", "--setup", f": {value}", "--sbatch", f"comment=x{value}",
            "--srun-args", "'--comment=a b'", "--", "echo", value]  # fmt: skip
    before = asked("--save-config", "it.toml", *argv)
    assert asked("--config", "it.toml") == before
    recorded(before)
    assert asked("--config", "a") == before


def test_flags_come_over_a_request_and_lists_as_resume_takes_them() -> None:
    Path("it.toml").write_text(
        'nodes = 2\ntime = 90\nlr = 0.5\nenv = ["A=1", "B=2"]\nmodule = ["cuda"]\nseed = 3\n'
        'requeue = false\nsbatch = ["nice=1", "hint=x"]\n'
    )
    spec = asked("--config", "it.toml", "--nodes", "3", "--env", "B=3", "--module", "nccl",
                 "--sbatch", "nice=2", CLUSTERDDP_TIME="7", CLUSTERDDP_ACCOUNT="us")  # fmt: skip
    assert spec.train and (spec.train.lr, spec.train.seed) == (0.5, 3)
    assert (spec.resources.nodes, spec.resources.time) == (3, "90")
    assert spec.resources.account == "us"  # a file leaves open what it does not name
    assert spec.environment == (("A", "1"), ("B", "3"))
    assert spec.modules == ("nccl",)
    assert spec.sbatch == (("nice", "2"), ("hint", "x"))
    assert spec.requeue is False
    assert asked("--config", "it.toml", "--env", "").environment == ()
    of_command = asked("--config", "it.toml", "--", "true")
    assert of_command.command == ("true",)
    assert of_command.train is None


def test_a_recipe_that_is_typed_takes_the_place_of_a_runs_settings() -> None:
    before = asked("--recipe", "fast", "--lr", "0.001")
    recorded(before)
    assert asked("--config", "a") == before
    assert asked("--config", "a", "--recipe", "fast").train == asked("--recipe", "fast").train


def test_a_secret_is_saved_by_name_and_said() -> None:
    done = invoke("submit", "--dry-run", "--save-config", "it.toml",
                  "--env", "HF_TOKEN=hush", "--env",
                  "A=1", "--", "true")  # fmt: skip
    assert "it.toml passes HF_TOKEN without its value" in done.stderr
    text = Path("it.toml").read_text()
    assert "hush" not in text
    assert 'env = ["HF_TOKEN", "A=1"]' in text
    assert stat.S_IMODE(Path("it.toml").stat().st_mode) == 0o600
    assert "HF_TOKEN: not set in" in refused("submit", "--dry-run", "--config", "it.toml")
    assert asked("--config", "it.toml", HF_TOKEN="x").pass_environment == ("HF_TOKEN",)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("nodess = 2\n", "no option 'nodess' (did you mean 'nodes'?)"),
        ("run-name = 'a'\n", "run-name is not accepted in a file, which several runs"),
        ("sweep = ['lr=1']\n", "sweep is not accepted in a file"),
        ("wait = true\n", "wait is not accepted in a file, which several runs"),
        ("nodes = 2.5\n", "--nodes: 2.5 is float, not int. (from it.toml)"),
        ("nodes = true\n", "--nodes: True is bool, not int"),
        ("nodes = [1]\n", "--nodes: [1] is list, not int"),
        ("mem = 1979-05-27\n", "--mem: datetime.date(1979, 5, 27) is date, not str"),
        ("env = [1]\n", "--env: [1] is not valid. Use a string or a list of strings"),
        ("[train]\nlr = 1\n", "no option 'train'"),
        ('command = "python x.py"\n', "command is not a list of words"),
        ("nodes =\n", "is not TOML"),
        ("partition = 'a b'\n", "(from it.toml)"),
        ("epochs = 2\ncommand = ['true']\n", "epochs"),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_what_is_wrong(content: str, words: str) -> None:
    Path("it.toml").write_text(content)
    assert words in refused("submit", "--dry-run", "--config", "it.toml")


def test_what_is_not_there_or_is_there_already_is_refused() -> None:
    Path("train.py").touch()
    for name, words in (
        ("no.toml", "there is no file"),
        ("no", "there is no run 'no'"),
        ("train.py", "is not a .toml file"),
    ):
        assert words in refused("submit", "--dry-run", "--config", name)
    Path("it.toml").write_text("kept")
    assert "already exists" in refused("submit", "--dry-run", "--save-config", "it.toml")
    assert Path("it.toml").read_text() == "kept"


def test_debug_takes_the_training_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(asked("--lr", "0.25", "--nodes", "2", "--epochs", "9"))
    recorded(asked("--", "true"), "of-command")
    seen: list[Any] = []

    def check_inputs(config: Any, _spec: Any) -> None:
        seen.append(config)
        raise KeyboardInterrupt

    monkeypatch.setattr("clusterddp.cli.commands.debug.check_inputs", check_inputs)
    invoke("debug", "--config", "a", "--epochs", "1")
    assert (seen[0].lr, seen[0].epochs) == (0.25, 1)
    assert "it has a command" in refused("debug", "--config", "of-command")


def test_without_tomli_a_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("a.toml").write_text("nodes = 2\n")
    monkeypatch.setattr(sys, "version_info", (3, 10, 0))
    monkeypatch.setitem(sys.modules, "tomli", None)
    assert "needs tomli" in refused("submit", "--config", "a.toml", "--dry-run", "--", "true")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib")
@pytest.mark.parametrize("value", [*CARRIED, "new\nline", "bell\a", "\x7f", 1e-05, 3, True])
def test_what_is_written_is_toml(value: object) -> None:
    import tomllib

    assert tomllib.loads(to_toml({"a": value, "b": [str(value)]})) == {
        "a": value,
        "b": [str(value)],
    }
