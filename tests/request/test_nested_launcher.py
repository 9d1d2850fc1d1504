"""Launchers as the COMMAND: which are seen, behind what, and the line that does without them."""

import shlex
from pathlib import Path

import pytest

from clusterddp.errors import RequestError
from clusterddp.request.nested_launcher import LauncherInScript, find, in_script
from clusterddp.request.resources import Resources
from clusterddp.request.spec import JobSpec
from clusterddp.submission.fields import refuse_launcher
from tests.hostile import CARRIED, REFUSED

# (the command as it is typed, the launcher, the command without it)
FOUND = [
    ("torchrun train.py", "torchrun", "python train.py"),
    ("torchrun --standalone --nproc_per_node=4 train.py --lr 0.1", "torchrun",
     "python train.py --lr 0.1"),
    ("torchrun --nnodes 2 --nproc-per-node 4 -m pkg.train x", "torchrun", "python -m pkg.train x"),
    ("torchrun --no-python ./train 1", "torchrun", "./train 1"),
    ("/venv/bin/torchrun train.py", "torchrun", "/venv/bin/python train.py"),
    ("python /venv/bin/torchrun train.py", "torchrun", "python train.py"),
    ("torchrun train.py 'a b' '$(x)'", "torchrun", "python train.py 'a b' '$(x)'"),
    ("python3.11 -m torch.distributed.run train.py", "torchrun", "python3.11 train.py"),
    ("python -W ignore -X dev -m torch.distributed.run train.py", "torchrun",
     "python -W ignore -X dev train.py"),
    ("python -um torch.distributed.launch --use-env train.py", "torch.distributed.launch",
     "python -u train.py"),
    ("accelerate launch --multi_gpu train.py", "accelerate launch", "python train.py"),
    ("accelerate launch --config_file a.yaml -m pkg.train", "accelerate launch",
     "python -m pkg.train"),
    ("python -m accelerate.commands.launch train.py", "accelerate launch", "python train.py"),
    ("mpirun --hostfile /etc/hosts -x PATH -np 4 ./train 1", "mpirun", "./train 1"),
    ("mpirun --hostfile hosts env A=1 python train.py", "mpirun", "env A=1 python train.py"),
    ("mpiexec --oversubscribe -n 2 python train.py", "mpiexec", "python train.py"),
    ("srun -n4 --exclusive --gpus=2 python train.py", "srun", "python train.py"),
    ("env -u X A=b torchrun train.py", "torchrun", "env -u X A=b python train.py"),
    ("env -S 'torchrun train.py'", "torchrun", "env -S 'python train.py'"),
    ("time nice -n 5 nohup timeout -k 5 60 torchrun train.py", "torchrun",
     "time nice -n 5 nohup timeout -k 5 60 python train.py"),
    ("uv run --with torch torchrun train.py", "torchrun", "uv run --with torch python train.py"),
    ("env -i -S 'A=1 torchrun train.py' x", "torchrun", "env -i -S 'A=1 python train.py' x"),
    ("srun -n 2 -- hostname -f", "srun", "hostname -f"),
    ("apptainer exec --nv -B /a:/b i.sif torchrun train.py", "torchrun",
     "apptainer exec --nv -B /a:/b i.sif python train.py"),
    ("bash -c 'torchrun train.py'", "torchrun", "bash -c 'python train.py'"),
    ("bash -lc 'cd /x && exec torchrun --standalone train.py \"$1\" >log' name", "torchrun",
     "bash -lc 'cd /x && exec python train.py \"$1\" >log' name"),
    ("bash -euo pipefail -c 'if true; then A=1 torchrun train.py; fi'", "torchrun",
     "bash -euo pipefail -c 'if true; then A=1 python train.py; fi'"),
    ("sh -c 'sh -c \"srun python train.py\"'", "srun",
     "sh -c 'sh -c '\"'\"'python train.py'\"'\"''"),
]  # fmt: skip


@pytest.mark.parametrize(("typed", "name", "instead"), FOUND, ids=[row[0] for row in FOUND])
def test_a_launcher_is_found_and_the_command_is_given_without_it(
    typed: str, name: str, instead: str
) -> None:
    found = find(shlex.split(typed))
    assert found is not None
    assert (found.name, found.instead) == (name, tuple(shlex.split(instead)))
    assert found.instead is not None
    assert find(found.instead) is None


@pytest.mark.parametrize(
    "typed",
    [
        "torchrun", "srun -n 2", "mpirun -n 1 a : -n 2 b", "srun --exclusive ls /data",
        "mpirun --mca plm_rsh_agent /usr/bin/ssh ./train",
        "deepspeed --num_gpus 4 train.py", "horovodrun -np 4 python train.py",
        "fabric run --devices 4 train.py", "python -m lightning.fabric run train.py",
        "composer -n 4 train.py", "tune run --nproc_per_node 4 full_finetune_distributed",
        "trl sft --config a.yaml", "llamafactory-cli train a.yaml", "axolotl train a.yaml",
        "colossalai run --nproc_per_node 4 train.py", "uv run composer -n 4 train.py",
        "trl grpo --config a.yaml", "python -m lightning_fabric run train.py",
        "python -m composer.cli.launcher -n 4 train.py", "lightning run model train.py",
        "python -m deepspeed.launcher.runner train.py",
        "bash -c 'uv run axolotl train a.yaml'",
    ],
)  # fmt: skip
def test_a_launcher_whose_program_is_not_made_out_is_found_all_the_same(typed: str) -> None:
    found = find(shlex.split(typed))
    assert found is not None
    assert found.instead is None


@pytest.mark.parametrize(
    "typed",
    [
        "python train.py torchrun", "python -c 'import torchrun' -m torch.distributed.run",
        "python -m pkg.train -m torch.distributed.run", "accelerate config", "echo torchrun",
        "bash -c 'echo torchrun'", "bash -c 'true # torchrun train.py'", "bash torchrun.py",
        "uv run --with torchrun python train.py", "env TORCHRUN=torchrun python train.py",
        "./torchrun-less.sh", "clusterddp train", "env", "bash", "bash -c", "python -m", "timeout",
        "fabric consolidate a", "python -m lightning.fabric consolidate a", "trl env",
        "axolotl preprocess a", "litgpt finetune --devices 4",
        "nice -n", "uv run", "uv", "env -S", "env -i -S",
    ],
)  # fmt: skip
def test_what_starts_no_launcher_is_left_alone(typed: str) -> None:
    assert find(shlex.split(typed)) is None


@pytest.mark.parametrize("value", [*CARRIED, *REFUSED, "'", '"', "a\\", "$(", "`", "'" * 999])
def test_hostile_words_neither_crash_nor_get_lost(value: str, tmp_path: Path) -> None:
    for command in ([value], ["env", value], ["bash", "-c", value], ["python", "-m", value]):
        assert find(command) is None
        in_script(command, tmp_path)
    for command in (["torchrun", "t.py", value], ["env", f"A={value}", "torchrun", "t.py"]):
        found = find(command)
        assert found is not None
        assert found.instead == tuple("python" if w == "torchrun" else w for w in command)
    found = find(["bash", "-c", f"torchrun t.py {shlex.quote(value)}"])
    assert found is not None
    assert found.instead == ("bash", "-c", f"python t.py {shlex.quote(value)}")


@pytest.mark.parametrize(
    ("typed", "fields", "line"),
    [
        ("torchrun train.py", {},
         "Use: clusterddp submit --template torchrun -- python train.py (with"),
        ("torchrun --nnodes=3 --nproc-per-node=4 train.py", {},
         "Use: clusterddp submit --template torchrun -- python train.py (with"),
        ("torchrun --nproc-per-node=4 train.py", {"template": "torchrun.sbatch.j2"},
         "Use: clusterddp submit --template torchrun -- python train.py (with"),
        ("torchrun train.py", {"launcher": "submitit"},
         "Use: clusterddp submit -- python train.py (with"),
        ("mpirun -np 4 python 'a b.py'", {}, "Use: clusterddp submit -- python 'a b.py' (with"),
        ("torchrun", {}, "-- python train.py (with"),
        ("python -m torch.distributed.launch train.py", {}, "read LOCAL_RANK instead"),
    ],
)  # fmt: skip
def test_a_request_for_a_launcher_is_refused_with_the_line_to_type(
    typed: str, fields: dict[str, str], line: str
) -> None:
    words = tuple(shlex.split(typed))

    def spec(**more: bool) -> JobSpec:
        return JobSpec(
            run_name="demo", run_dir="/jobs/demo", resources=Resources(nodes=2), python="python",
            command=words, **fields, **more,
        )  # fmt: skip

    with pytest.raises(RequestError) as caught:
        refuse_launcher(spec())
    assert line in str(caught.value)
    assert "2 nodes x 1 task = 2 ranks" in str(caught.value)
    assert "--allow-launcher" in str(caught.value)
    refuse_launcher(spec(allow_launcher=True))
    assert JobSpec.from_json(spec().to_json()) == spec()  # what is queued can be read


@pytest.mark.parametrize(
    ("command", "text", "line"),
    [
        ("./run.sh", "#!/bin/bash\nset -e\n\ntorchrun train.py\n", 4),
        ("bash run.sh a", "x=1 && torchrun \\\n  train.py\n", 1),
        ("bash -x run.sh", "# it's torchrun\nif a; then\n  exec env A=1 torchrun t.py; fi\n", 3),
        ("env A=1 sh ./run.sh", 'out=$(torchrun train.py "it\'s")\n', 1),
        ("./run.sh", "#!/usr/bin/env bash\necho torchrun\n# torchrun\n", None),
        ("./run.sh", "#!/usr/bin/env python3\ntorchrun = 1\n", None),
        ("python run.sh", "torchrun train.py\n", None),
        ("bash gone.sh", "torchrun train.py\n", None),
        ("bash .", "torchrun train.py\n", None),
        ("bash -c true run.sh", "torchrun train.py\n", None),
    ],
)
def test_a_launcher_in_a_shell_script_is_found_with_its_line(
    command: str, text: str, line: int | None, tmp_path: Path
) -> None:
    (tmp_path / "run.sh").write_text(text)
    found = in_script(shlex.split(command), tmp_path)
    name = "./run.sh" if "./run.sh" in command else "run.sh"
    assert found == (LauncherInScript(name, line, "torchrun") if line else None)


def test_a_script_on_the_path_is_read_and_a_program_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for name, begin in (("go", b"#!/bin/sh\n"), ("elf", b"\x7fELF\xff\0")):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(begin + b"torchrun train.py\n")
        path.chmod(0o755)
    assert in_script(["go"], tmp_path) == LauncherInScript("go", 2, "torchrun")
    assert in_script(["elf"], tmp_path) is None


@pytest.mark.parametrize(
    "payload",
    ['"a\\' * 250_000, "x" * 900_000, "".join(map(chr, range(256))) * 4000],
    ids=["open quotes", "one word", "binary"],
)
def test_what_a_script_carries_behind_its_head_costs_little(
    payload: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unquoted: list[int] = []
    split = shlex.split

    def counted(word: str, comments: bool) -> list[str]:
        unquoted.append(len(word))
        return split(word, comments=comments)

    monkeypatch.setattr(shlex, "split", counted)
    head = "#!/bin/sh\ncd /data\ntail -n +9 $0 | tar x\nexit\n"
    script = tmp_path / "run.sh"
    script.write_bytes(f"{head}{payload}\ntorchrun train.py\n".encode("latin-1"))
    assert in_script(["sh", "run.sh"], tmp_path) is None  # it stands behind the first 64 KiB
    assert max(unquoted) <= 4096
    assert sum(unquoted) <= 65_536
    script.write_bytes(f"{head}torchrun train.py\n{payload}".encode("latin-1"))
    assert in_script(["sh", "run.sh"], tmp_path) == LauncherInScript("run.sh", 5, "torchrun")
