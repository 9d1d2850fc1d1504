"""Directories of trials that cannot all be made, and what a submission advises."""

import dataclasses
import json
from collections.abc import Callable

import pytest

from clusterddp.errors import RequestError
from clusterddp.request.spec import JobSpec
from clusterddp.request.sweep import Sweep
from clusterddp.run.run_dir import SweepDir
from clusterddp.scripts import check
from clusterddp.submission import submit
from tests.cli.made_runs import Workplace, workplace

__all__ = ["workplace"]


def of_five(workplace: Workplace) -> JobSpec:
    """Request of a sweep of five trials, of which the first is there."""
    spec = workplace.sweep("s", ("n",), ("0",)).load_spec()
    return dataclasses.replace(spec, sweep=Sweep(("n",), tuple((f"{n}",) for n in range(5))))


def test_a_run_that_appears_meanwhile_is_left_alone(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = of_five(workplace)
    # It comes behind the look, as that of another submission can.
    monkeypatch.setattr(submit, "refuse_existing", lambda *_: workplace.run("s-3"))
    sweep = SweepDir(workplace.root / "s")
    with (
        pytest.raises(RequestError, match="s-3: File exists"),
        submit.created_trials(sweep, spec, range(1, 5)),
    ):
        pytest.fail("it is yielded")
    assert sorted(path.name for path in workplace.root.iterdir()) == ["s", "s-0", "s-3"]
    assert sweep.trial(3).spec.is_file()


def test_an_interruption_leaves_no_trial(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, trial_spec = of_five(workplace), JobSpec.trial_spec

    def interrupted(spec: JobSpec, index: int) -> JobSpec:
        if index == 3:
            raise KeyboardInterrupt
        return trial_spec(spec, index)

    monkeypatch.setattr(JobSpec, "trial_spec", interrupted)
    sweep = SweepDir(workplace.root / "s")
    with pytest.raises(KeyboardInterrupt), submit.created_trials(sweep, spec, range(1, 5)):
        pytest.fail("it is yielded")
    assert sorted(path.name for path in workplace.root.iterdir()) == ["s", "s-0"]


FIT = "import lightning as L\ntrainer = L.Trainer()\ntrainer.fit(model)\n"
SAVES_AND_RESUMES = "To save and resume, add "
LINES = "\n  from clusterddp.integrations.lightning import resume\n  resume(trainer)\n"


@pytest.fixture
def train(workplace: Workplace) -> Callable[..., str]:
    """Submits `python train.py` of this text, next to other files, and returns what is said."""
    workplace.command("sbatch", "/bin/cat >sent; echo 12")
    workplace.command("python", "true")

    def submitted(text: str, *words: str, **files: str) -> str:
        for name, content in {"train": text, **files}.items():
            (workplace.folder / f"{name}.py").write_text(content)
        command = words or ("python", "train.py")
        name = f"r{len(list(workplace.root.glob('*')))}"
        got = workplace.invoke("submit", "--json", "--run-name", name, "--", *command)
        assert got.code == 0 and json.loads(got.out)["run"] == name, got.err
        return got.err

    return submitted


def test_a_frameworks_script_is_told_which_lines_resume_it_and_where(
    workplace: Workplace, train: Callable[..., str]
) -> None:
    said = train(FIT)
    assert f"{SAVES_AND_RESUMES}before trainer.fit (train.py:3):{LINES}" in said
    assert "warning" not in said
    workplace.command("squeue", "exit 0")
    workplace.command("scancel", "exit 0")
    workplace.invoke("cancel", "r0")
    again = workplace.invoke("resume", "r0")
    assert (again.code, SAVES_AND_RESUMES in again.err) == (0, False), again.err


@pytest.mark.parametrize(
    ("text", "files", "place"),
    [
        ("import engine\nengine.run()", {"engine": FIT}, "before trainer.fit (engine.py:3):"),
        ("from parts import trainer\ntrainer.fit(model)", {"parts": "import lightning"},
         "before trainer.fit (train.py:2):"),
        ("import torch.distributed as dist\ndist.init_process_group()\n"
         "for epoch in range(3):\n    for x in data:\n        f(x).backward()", {},
         "before the training loop (train.py:3; docs/resumable.md):"),
        ("import torch\nfrom torch.nn.parallel import DistributedDataParallel as DDP\n"
         "torch.distributed.init_process_group()\nddp = DDP(model)\n"
         "sgd = torch.optim.SGD(ddp.parameters())\nwhile True:\n    f(x).backward()", {},
         "before the training loop (train.py:6; docs/resumable.md):\n  "
         "from clusterddp.loop import Loop\n  loop = Loop(model=ddp, optimizer=sgd)\n  # then use "
         "loop.epochs(…), loop.batches(loader) and loop.step()\n"),
    ],
)  # fmt: skip
def test_the_line_is_found_in_the_modules_next_to_the_script_and_in_a_loop_of_torch(
    train: Callable[..., str], text: str, files: dict[str, str], place: str
) -> None:
    assert f"{SAVES_AND_RESUMES}{place}" in train(text, **files)


@pytest.mark.parametrize(
    ("text", "words", "files"),
    [
        (f"from clusterddp.integrations.lightning import resume\n{FIT}", (), {}),
        (FIT + "import saving", (), {"saving": "if True:\n    from clusterddp.loop import Loop"}),
        (FIT, ("python", "train.py", "--callbacks=clusterddp.integrations.lightning.Resume"), {}),
        (FIT, ("python", "-c", "import train"), {}),
        (f'"""{FIT}"""\nprint("lightning")', (), {}),
        ("import lightning\nprint('not Python", (), {}),
        ("import signal\nimport torch.distributed as dist\ndist.init_process_group()\n"
         "signal.signal(signal.SIGUSR1, save)\nf(x).backward()", (), {}),
    ],
)  # fmt: skip
def test_a_script_that_resumes_or_is_not_known_is_told_nothing(
    train: Callable[..., str], text: str, words: tuple[str, ...], files: dict[str, str]
) -> None:
    assert SAVES_AND_RESUMES not in train(text, *words, **files)


@pytest.mark.parametrize("text", ["import torch\nprint('fit')\n", f"import clusterddp\n{FIT}"])
def test_a_script_without_a_frameworks_name_or_with_ours_is_not_parsed(
    train: Callable[..., str], monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(check, "missing_line", lambda *_, **__: pytest.fail("it is parsed"))
    assert SAVES_AND_RESUMES not in train(text)
