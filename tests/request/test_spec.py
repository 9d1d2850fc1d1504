"""Requests are checked when they are built, and survive their own record."""

import dataclasses
import json
import math
import re
from collections.abc import Callable
from typing import Any

import pytest

from clusterddp.errors import OptionError, RequestError
from clusterddp.launchers.sbatch import agent_words, render, task_words
from clusterddp.request.resources import Resources
from clusterddp.request.spec import JobSpec
from clusterddp.request.sweep import Sweep
from clusterddp.request.train_config import Interval, TrainConfig, changes
from clusterddp.submission.fields import remarks
from tests.hostile import CARRIED, REFUSED


def spec(**fields: Any) -> JobSpec:
    defaults: dict[str, Any] = {
        "run_name": "demo",
        "run_dir": "/scratch/jobs/demo",
        "resources": Resources(),
        "python": "/usr/bin/python3",
        "controller_python": "/usr/bin/python3",
    }
    if "command" not in fields:
        defaults["train"] = TrainConfig()
    return JobSpec(**{**defaults, **fields})


def test_tasks_per_node_defaults_to_one_per_gpu_or_one() -> None:
    assert Resources(gpus_per_node=4).tasks_per_node == 4
    assert Resources().tasks_per_node == 1
    assert Resources(nodes=3, gpus_per_node=4).num_tasks == 12


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"nodes": 0}, ["--nodes", "0"]),
        ({"nodes": -2}, ["--nodes", "-2"]),
        ({"gpus_per_node": -1}, ["--gpus-per-node", "-1"]),
        ({"tasks_per_node": -1}, ["--tasks-per-node", "-1"]),
        ({"cpus_per_task": 0}, ["--cpus-per-task", "0"]),
        ({"gpus_per_node": 2, "tasks_per_node": 3}, ["--tasks-per-node 3", "--gpus-per-node 2"]),
        ({"gpus_per_node": 2, "tasks_per_node": 4, "gpu_directive": "gpus-per-task"},
         ["--tasks-per-node 4", "--gpus-per-node 2", "--gpu-directive gpus-per-task"]),
        ({"gpus_per_node": 4, "tasks_per_node": 3, "gpu_directive": "gpus-per-task"},
         ["--tasks-per-node 3", "--gpus-per-node 4", "needs the same number of GPUs"]),
        ({"nodes": 1, "nodelist": "h[01-02]"}, ["h[01-02] names 2 hosts", "--nodes", "1"]),
        ({"nodes": 2, "spare_nodes": 1, "nodelist": "h[01-05]"},
         ["--nodes requests 2 and --spare-nodes for 1 more", "Use --nodes 4 or"]),
        ({"nodes": 2, "nodelist": "h1,h2", "exclude": "h2"}, ["--nodelist h1,h2", "--exclude h2"]),
        ({"nodelist": "h[1-"}, ["h[1-"]),
        ({"exclude": "h]"}, ["h]"]),
        ({"partition": "gpu --nodes=9"}, ["--partition", "gpu --nodes=9"]),
        ({"account": "-x"}, ["--account"]),
        ({"qos": "a,b"}, ["--qos"]),
        ({"mail_type": "SOMETIMES"}, ["--mail-type", "END"]),
        ({"mail_user": "a b"}, ["--mail-user"]),
        ({"constraint": "a;b"}, ["--constraint"]),
        ({"gpu_directive": "gpus"}, ["--gpu-directive"]),
    ],
)  # fmt: skip
def test_a_request_that_cannot_be_met_is_refused_showing_both_sides(
    fields: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(RequestError) as caught:
        Resources(**fields)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("record", "fields", "message"),
    [
        (Resources, {"nodes": "2"}, "--nodes: '2' is not valid. Use a whole number from 1 to"),
        (Resources, {"nodes": None}, "--nodes: None is not valid. Use a whole number from 1 to"),
        (Resources, {"nodes": 10**11}, "--nodes: 100000000000 is not valid. Use a whole number"),
        (Resources, {"nodelist": "a[1-3"}, "--nodelist: cannot read the host list 'a[1-3': '[' is"),
        (Resources, {"exclude": "a,,b"}, "--exclude: cannot read the host list 'a,,b': there is"),
        (Resources, {"time": "1h"}, "--time: '1h' is not a valid time limit. Use minutes (60 for"),
        (Resources, {"switches": "0"}, "--switches: '0' is not a valid number of switches. Use 2,"),
        (Resources, {"switches": "2@1h"}, "--switches: '2@1h' is not a valid number of switches."),
        (Resources, {"partition": ["gpu"]}, "--partition: ['gpu'] is list, not str."),
        (Resources, {"nodelist": ["h1"]}, "--nodelist: ['h1'] is list, not str."),
        (Resources, {"time": 30}, "--time: 30 is int, not str."),
        (TrainConfig, {"lr": "0.1"}, "--lr: '0.1' is not valid. Use a finite number above 0."),
        (TrainConfig, {"model": print},
         f"--model: {print!r} is builtin_function_or_method, not str."),
        (TrainConfig, {"device": 0}, "--device: 0 is int, not str."),
        (TrainConfig, {"compile": "no"}, "--compile: 'no' is str, not bool."),
    ],
)  # fmt: skip
def test_a_value_of_another_type_is_refused_with_its_field_and_what_is_expected(
    record: type, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        record(**fields)


def test_an_interval_is_of_epochs_steps_or_seconds() -> None:
    assert Interval.parse("1epoch") == Interval(1, "epoch")
    assert Interval.parse("500steps") == Interval(500, "step")
    assert Interval.parse("10m") == Interval(600, "second")
    assert Interval.parse("1.5h").seconds == 5400.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("eval_every", "10m"),
        ("save_every", "0m"),
        ("save_every", "10minutes"),
        ("save_every", "1m1h"),
        ("save_every", ""),
    ],
)
def test_no_other_interval_is_taken(field: str, value: str) -> None:
    with pytest.raises(RequestError, match=r"--\w+-every: .* is not a valid interval. Use 1epoch"):
        TrainConfig(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["save_every", "eval_every"])
def test_an_interval_has_a_unit(option: str) -> None:
    with pytest.raises(RequestError, match=r"every: '2' is not a valid interval. Use 1epoch, "):
        TrainConfig(**{option: "2"})  # type: ignore[arg-type]


def test_intervals_are_due_after_each_of_their_unit_and_minutes_by_the_clock_alone() -> None:
    steps, minutes = Interval(3, "step"), Interval(120, "second")
    assert [count for count in range(1, 10) if steps.due("step", count)] == [3, 6, 9]
    assert not steps.due("epoch", 3) and steps.seconds == math.inf
    assert not any(minutes.due(unit, 2) for unit in ("step", "epoch"))


def test_what_decides_the_weights_and_has_changed_is_told() -> None:
    before = dataclasses.asdict(TrainConfig())
    assert changes(before, vars(TrainConfig())) == []
    assert changes(before, vars(TrainConfig(lr=0.5, seed=3, hang_timeout=0, max_steps=9))) == [
        "--lr 0.001, now 0.5", "--seed 0, now 3",
    ]  # fmt: skip
    assert changes({"lr": 0.001}, vars(TrainConfig(seed=3))) == [], "what an older record lacks"


@pytest.mark.parametrize("value", REFUSED)
@pytest.mark.parametrize(
    "field",
    [
        "job_name", "setup", "teardown", "command", "srun_args", "wrapper", "python",
        "container_image",
    ],
)  # fmt: skip
def test_a_value_that_no_script_can_carry_is_refused(field: str, value: str) -> None:
    text = field in ("job_name", "python", "container_image")
    with pytest.raises(RequestError):
        spec(**{field: value if text else (value,)})


@pytest.mark.parametrize("value", REFUSED)
def test_an_environment_value_that_no_script_can_carry_is_refused(value: str) -> None:
    with pytest.raises(RequestError, match="--env K"):
        spec(environment=(("K", value),))


@pytest.mark.parametrize("name", ["", "1A", "A B", "A-B", "$(x)", "É", "A\n"])
def test_only_names_of_variables_are_taken(name: str) -> None:
    with pytest.raises(RequestError, match="--env"):
        spec(environment=((name, "x"),))
    with pytest.raises(RequestError, match="--env"):
        spec(pass_environment=(name,))


@pytest.mark.parametrize("name", ["RANK", "SLURM_NTASKS", "UID", "IFS", "BASH_ENV", "_"])
def test_variables_that_would_not_arrive_are_refused(name: str) -> None:
    with pytest.raises(RequestError, match=name):
        spec(environment=((name, "x"),))


@pytest.mark.parametrize("path", ["/a/100%/demo", "jobs/demo", "/a\\b/demo", "/a\nb/demo"])
def test_a_run_directory_that_slurm_would_rewrite_is_refused(path: str) -> None:
    with pytest.raises(RequestError, match="--runs-dir"):
        spec(run_dir=path)


def test_the_record_of_a_request_reads_back_the_same() -> None:
    full = spec(
        resources=Resources(nodes=2, gpus_per_node=4, mem="8G", nodelist="h[1-2]"),
        sbatch=(("requeue", None), ("signal", "USR1@90")),
        environment=tuple((f"K{i}", value) for i, value in enumerate(CARRIED)),
        setup=("echo hi",),
    )
    assert JobSpec.from_json(full.to_json()) == full
    command = spec(command=tuple(value or "x" for value in CARRIED))
    assert JobSpec.from_json(command.to_json()) == command


def test_the_record_of_a_request_is_its_text_in_the_script_and_names_no_default() -> None:
    for fields in ({}, {"requeue": "expedite"}, {"command": ("true",)}):
        asked = spec(**fields)
        record = json.loads(asked.to_json())
        in_script = " ".join(line.removeprefix("#REQUEST ") for line in asked.to_script())
        assert json.loads(in_script) == {k: v for k, v in record.items() if k != "run_dir"}
        own = {"train"} if asked.train else set()
        assert record.keys() == {"format", "run_name", "run_dir", "resources", "python"} | own | (
            fields.keys()
        )
    meant = spec(command=("torchrun", "train.py"), allow_launcher=True, controller_python="python3")
    assert JobSpec.from_json(meant.to_json()) == meant


@pytest.mark.parametrize(
    ("asked", "requeue", "signal", "hang_timeout"),
    [
        ({}, True, "B:USR1@120", 60),
        ({"command": ("true",)}, None, "", 1800),
        ({"command": ("true",), "retries": 1}, True, "", 1800),
        ({"command": ("true",), "resumable": True}, True, "B:USR1@120", 0),
    ],
)
def test_defaults_hang_on_whether_the_run_is_resumable(
    asked: dict[str, Any], requeue: bool | None, signal: str, hang_timeout: float
) -> None:
    made = spec(**asked)
    assert (made.requeue, made.signal, made.hang_timeout) == (requeue, signal, hang_timeout)
    assert JobSpec.from_json(made.to_json()) == made
    typed = dataclasses.replace(made, signal="USR2@9", requeue=False, retries=0)
    assert JobSpec.from_json(typed.to_json()) == typed


IMAGE = {"container_image": "/img/torch.sif"}
PYXIS = {"container_image": "pytorch", "container_runtime": "pyxis"}


def test_a_container_is_recorded_and_the_tasks_parent_is_told_what_was_asked() -> None:
    asked = spec(
        **IMAGE, container_mounts=("/a:/b:ro", "/data:/data"), container_workdir="/b",
        train=TrainConfig(data_dir="/data", init_from="/old/run"),
        resources=Resources(gpus_per_node=2), environment=(("NCCL_DEBUG", "INFO"),),
        pass_environment=("LD_LIBRARY_PATH",),
    )  # fmt: skip
    assert JobSpec.from_json(asked.to_json()) == asked
    assert json.loads(asked.container.to_json(ranks=2)) == {
        "image": "/img/torch.sif",
        "python": "/usr/bin/python3",
        "mounts": ["/data:/data:ro", "/old/run:/old/run:ro", "/a:/b:ro", "/data:/data"],
        "workdir": "/b",
        "gpus": True,
        "variables": ["LD_LIBRARY_PATH", "NCCL_DEBUG"],
        "ranks": 2,
    }
    own = spec(**IMAGE, command=("true",), python="python3").container
    assert json.loads(own.to_json()) == {"image": "/img/torch.sif", "own_code": True}


@pytest.mark.parametrize(
    ("fields", "may"),
    [
        ({"container_image": "pytorch/pytorch:2.9"}, True),
        ({"container_image": "/img/torch.sqsh", "container_runtime": "pyxis"}, True),
        ({}, False),
        ({"container_image": "/img/torch.sif"}, False),
        ({"container_image": "pytorch", "container_runtime": "podman"}, False),
        ({"container_image": "pytorch", "run_dir": "/my jobs/demo"}, False),
        ({"container_image": "pytorch", "container_mounts": ("/a,b:/b",)}, False),
    ],
)
def test_srun_may_start_the_containers_where_pyxis_can_carry_it_all(
    fields: dict[str, Any], may: bool
) -> None:
    assert spec(**fields).pyxis is may


@pytest.mark.parametrize(
    ("fields", "message", "code"),
    [
        ({**IMAGE, "wrapper": ("env",)}, "--container-image.* conflicts with --wrapper",
         "CD1004"),
        ({**IMAGE, "sbatch": (("container", "/b"),)}, "directive for OCI bundles", "CD1004"),
        ({**IMAGE, "container_runtime": "docker"}, "--container-runtime", "CD0102"),
        ({**IMAGE, "container_runtime": "podman"}, "podman cannot run /img/torch.sif", "CD1004"),
        ({**IMAGE, "container_runtime": "pyxis"}, "pyxis cannot run /img/torch.sif", "CD1004"),
        ({**PYXIS, "run_dir": "/my jobs/demo"}, "pyxis cannot mount '/my jobs/demo'", "CD1004"),
        ({**PYXIS, "container_mounts": ("/a,b",)}, "pyxis cannot mount '/a,b:/a,b'", "CD1004"),
        ({**IMAGE, "container_mounts": ("/a:b",)}, "--container-mount", "CD1003"),
        ({**IMAGE, "container_workdir": "relative"}, "--container-workdir", "CD0102"),
        ({**IMAGE, "run_dir": "/a:b/demo"}, "--runs-dir", "CD1003"),
        ({**IMAGE, "train": TrainConfig(data_dir="/a:b")}, "--data-dir", "CD1003"),
        ({"container_image": "--nv"}, "--container-image", "CD0102"),
        ({"container_mounts": ("/a",)}, "--container-mount needs --container-image", "CD1004"),
        ({"container_workdir": "/a"}, "--container-workdir needs --container-image", "CD1004"),
        ({"container_runtime": "podman"}, "--container-runtime needs --container-image",
         "CD1004"),
    ],
)  # fmt: skip
def test_a_container_that_cannot_be_is_refused(
    fields: dict[str, Any], message: str, code: str
) -> None:
    with pytest.raises(OptionError, match=message) as said:
        spec(**fields)
    assert said.value.code == code


def test_options_of_a_command_are_refused_for_the_training() -> None:
    with pytest.raises(OptionError, match=r"--report-to.* applies only to a COMMAND"):
        spec(report_to="wandb")
    of_command = spec(report_to="wandb", command=("python", "train.py"))
    assert JobSpec.from_json(of_command.to_json()) == of_command


def test_a_hang_that_is_never_reported_cannot_end_a_command() -> None:
    with pytest.raises(OptionError, match="--on-hang end conflicts with --hang-timeout 0"):
        spec(command=("a",), on_hang="end", hang_timeout=0)
    with pytest.raises(OptionError, match="--on-hang end conflicts with --hang-timeout 0"):
        spec(on_hang="end", hang_timeout=0)
    with pytest.raises(OptionError, match="--hang-timeout"):
        spec(command=("a",), hang_timeout=-1.0)
    with pytest.raises(OptionError, match="--on-hang"):
        spec(command=("a",), on_hang="kill")


def test_a_hang_can_end_the_training_and_a_loop() -> None:
    for asked in (spec(on_hang="end"), spec(command=("a",), on_hang="end", resumable=True)):
        assert JobSpec.from_json(asked.to_json()) == asked


def test_the_training_has_the_hang_timeout_of_its_request_and_one_record_of_it() -> None:
    for asked in (spec(hang_timeout=300), spec(train=TrainConfig(hang_timeout=300))):
        assert asked.train and asked.hang_timeout == asked.train.hang_timeout == 300
        record = json.loads(asked.to_json())
        assert record["hang_timeout"] == 300 and "hang_timeout" not in record["train"]
        assert JobSpec.from_json(asked.to_json()) == asked
        assert "--hang-timeout=5m" in asked.train.to_argv(defaults=False)
    assert "hang_timeout" not in spec().to_json()


@pytest.mark.parametrize(
    ("asked", "nodes", "launcher", "checks"),
    [
        (None, 1, "sbatch", "none"),
        (None, 2, "sbatch", "quick"),
        (None, 2, "submitit", "none"),
        ("quick", 2, "submitit", "quick"),
        ("quick", 1, "sbatch", "quick"),
        ("none", 2, "sbatch", "none"),
        ("quick", 2, "local", "none"),
        ("full", 2, "submitit", "full"),
        ("full", 1, "sbatch", "full"),
        ("full", 2, "local", "none"),
    ],
)
def test_the_nodes_are_checked_where_there_are_several_or_where_it_is_asked_for(
    asked: str | None, nodes: int, launcher: str, checks: str
) -> None:
    asking = spec(preflight=asked, launcher=launcher, resources=Resources(nodes=nodes))
    assert asking.node_checks == checks
    assert JobSpec.from_json(asking.to_json()) == asking


@pytest.mark.parametrize("value", [*CARRIED, *REFUSED, "Full"])
def test_no_other_checks_of_nodes_can_be_asked_for(value: str) -> None:
    with pytest.raises(OptionError, match=r"--preflight: .* is not one of none, quick, full"):
        spec(preflight=value)


def test_full_checks_are_quick_ones_for_a_command_and_that_is_said() -> None:
    command = {"command": ("a",), "resources": Resources(nodes=2)}
    asking = spec(preflight="full", **command)
    assert asking.node_checks == "quick"
    assert [
        remark for remark in remarks(asking) if "full is the same as quick for a COMMAND" in remark
    ]
    assert remarks(spec(preflight="quick", **command)) == ()
    assert remarks(spec(preflight="full")) == ()


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", "{}", '{"format": 99}', '{"format": 1}',
        '{"format": 1, "resources": {}, "train": null, "x": 1}',
    ],
)  # fmt: skip
def test_a_damaged_or_newer_record_is_refused(content: str) -> None:
    with pytest.raises(RequestError, match=r"spec\.json"):
        JobSpec.from_json(content)


def test_every_training_field_is_on_the_command_line() -> None:
    argv = TrainConfig(lr=0.5, data_dir="/a b").to_argv()
    assert "--lr=0.5" in argv
    assert "--data-dir=/a b" in argv
    bare = [field.name for field in dataclasses.fields(TrainConfig) if field.type is bool]
    assert len(argv) == len(TrainConfig.__dataclass_fields__) - len(
        ["recipe", "init-from", "profile", "rendezvous-timeout", *bare]
    )
    for name in ("allow_config_change", *bare):
        assert f"--{name.replace('_', '-')}" in TrainConfig(**{name: True}).to_argv()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"epochs": 0}, "--epochs"),
        ({"batch_size": -1}, "--batch-size"),
        ({"lr": float("nan")}, "--lr"),
        ({"lr": 0.0}, "--lr"),
        ({"momentum": -0.1}, "--momentum"),
        ({"seed": -1}, "--seed"),
        ({"backend": "nccl", "device": "cpu"}, "--device"),
        (
            {"numa_binding": "node", "device": "cpu"},
            "--numa-binding node conflicts with --device cpu",
        ),
        ({"numa_binding": "exclusive", "device": "cpu"}, "--numa-binding exclusive conflicts with"),
        ({"numa_binding": "nodes"}, "--numa-binding"),
        ({"save_every": "0"}, "--save-every"),
        ({"eval_every": "1 fortnight"}, "--eval-every"),
        ({"keep_last": 0}, "--keep-last"),
        ({"hang_timeout": -1}, "--hang-timeout"),
        ({"beta2": 1.0}, "--beta2"),
        ({"label_smoothing": -0.1}, "--label-smoothing"),
        ({"label_smoothing": float("nan")}, "--label-smoothing"),
        ({"augment": "mirror"}, "--augment"),
        ({"data_dir": ""}, "--data-dir"),
        ({"data_dir": "a\nb"}, "--data-dir"),
        ({"precision": "int8"}, "--precision: 'int8' is not one of auto, fp32, tf32, bf16, fp16"),
        (
            {"gradient_accumulation_steps": 0},
            "--gradient-accumulation-steps: 0 is not valid. Use a positive",
        ),
        ({"comm_hook": "zip"}, "--comm-hook: 'zip' is not one of"),
        ({"data_pipeline": "tape"}, "--data-pipeline: 'tape' is not one of"),
        ({"num_workers": -1}, "--num-workers: -1 is not"),
        ({"cuda_graph": "on", "device": "cpu"}, "--cuda-graph on conflicts with --device cpu"),
        (
            {"cuda_graph": "on", "precision": "fp16"},
            "--cuda-graph on conflicts with --precision fp16",
        ),
        ({"cuda_graph": "on", "compile": True}, "--cuda-graph on conflicts with --compile"),
        ({"cuda_graph": "on", "strategy": "dp"}, "--cuda-graph on conflicts with --strategy dp"),
        (
            {"model": "keras-convnet", "sync_batchnorm": True},
            "--sync-batchnorm conflicts with --model keras-convnet",
        ),
        (
            {"model": "keras-convnet", "compile": True},
            "--compile conflicts with --model keras-convnet",
        ),
        ({"compile": True, "strategy": "dp"}, "--compile conflicts with --strategy dp"),
        ({"strategy": "fsdp"}, "--strategy: 'fsdp' is not one of ddp, dp, single"),
        (
            {"sync_batchnorm": True, "strategy": "dp"},
            "--sync-batchnorm conflicts with --strategy dp",
        ),
        ({"profile": "-1"}, "--profile: '-1' is not a valid rank"),
        ({"profile": "²"}, "--profile: '²' is not a valid rank"),
        ({"model": "resnet"}, "--model: 'resnet' is not one of convnet"),
        ({"model": "resnet"}, ", or your MODULE:FUNCTION"),
    ],
)
def test_a_training_that_makes_no_sense_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        TrainConfig(**fields)


@pytest.mark.parametrize(
    ("resources", "train", "words"),
    [
        ({"nodes": 2}, {"strategy": "dp"}, ["--strategy dp", "--nodes 2"]),
        ({"tasks_per_node": 2}, {"strategy": "single"},
         ["--strategy single", "--tasks-per-node 2"]),
        ({"gpus_per_node": 4, "tasks_per_node": 1}, {"strategy": "single"},
         ["--strategy single conflicts with --gpus-per-node 4", "only one GPU"]),
        ({"nodes": 2}, {"profile": "2"}, ["--profile 2", "from 0: 2 nodes x 1 task = 2 ranks"]),
    ],
)  # fmt: skip
def test_a_training_that_cannot_use_what_is_asked_for_is_refused(
    resources: dict[str, Any], train: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(RequestError) as caught:
        spec(resources=Resources(**resources), train=TrainConfig(**train))
    for word in words:
        assert word in str(caught.value)


SWITCH = "NCCL_MULTI_RANK_GPU_ENABLE"


@pytest.mark.parametrize(
    ("fields", "shares"),
    [
        ({}, False),
        ({"train": TrainConfig(backend="nccl")}, False),
        ({"train": TrainConfig(backend="gloo")}, True),
        ({"environment": ((SWITCH, "1"),)}, True),
        ({"environment": ((SWITCH, "0"),)}, False),
        ({"pass_environment": (SWITCH,)}, True),
        ({"command": ("python", "train.py")}, False),
        ({"command": ("python", "train.py"), "environment": ((SWITCH, "1"),)}, True),
    ],
)
def test_ranks_share_a_gpu_only_where_that_is_asked_for(
    fields: dict[str, Any], shares: bool
) -> None:
    fields = {"resources": Resources(gpus_per_node=2, tasks_per_node=4), **fields}
    if shares:
        assert spec(**fields).world_size == 4
        return
    with pytest.raises(RequestError, match=r"a GPU: .*--env NCCL_MULTI_RANK.*2\.30"):
        spec(**fields)


CPUS = "each GPU rank gets one CPU unless the partition sets DefCpuPerGPU"


@pytest.mark.parametrize(
    ("resources", "fields", "words"),
    [
        ({}, {}, []),
        ({"gpus_per_node": 4, "cpus_per_task": 8}, {}, []),
        ({"gpus_per_node": 4}, {}, [CPUS]),
        ({"gpus_per_node": 4}, {"command": ("python", "train.py")}, ["each task gets one CPU"]),
        ({"gpus_per_node": 4}, {"launcher": "local"}, []),
        ({"gpus_per_node": 4, "exclusive": True}, {}, []),
        ({"gpus_per_node": 4}, {"sbatch": (("cpus-per-gpu", "6"),)}, []),
        ({"gpus_per_node": 4}, {"sbatch": (("exclusive", None),)}, []),
        ({"gpus_per_node": 4}, {"sbatch": (("exclusive", "user"),)}, [CPUS]),  # nodes, not CPUs
        ({"gpus_per_node": 4, "tasks_per_node": 2, "cpus_per_task": 8}, {},
         ["2 of the 4 GPUs of each node stay idle"]),
        ({"gpus_per_node": 4, "tasks_per_node": 1, "cpus_per_task": 8},
         {"train": TrainConfig(strategy="dp")}, []),
        ({"gpus_per_node": 4, "tasks_per_node": 1, "cpus_per_task": 8},
         {"command": ("torchrun", "train.py")}, []),
        ({}, {"command": ("python", "train.py", "--dry-run", "--lr")},
         ["--dry-run comes after '--', so it is passed to the COMMAND"]),
        ({"gpus_per_node": 4, "cpus_per_task": 8}, {"train": TrainConfig(device="cpu")},
         ["--device cpu leaves the 4 GPUs of each node idle"]),
        ({"gpus_per_node": 2, "tasks_per_node": 4}, {"train": TrainConfig(backend="gloo")},
         ["2 ranks share each GPU", CPUS]),
        ({"gpus_per_node": 8, "tasks_per_node": 3, "cpus_per_task": 8}, {},
         ["5 of the 8 GPUs of each node stay idle"]),
        ({"gpus_per_node": 8, "tasks_per_node": 1}, {"command": ("torchrun", "train.py")},
         ["each task gets one CPU unless the partition sets DefCpuPerGPU"]),
        ({"gpus_per_node": 4}, {"template": "torchrun.sbatch.j2"},
         ["each rank gets one CPU, whatever the partition's DefCpuPerGPU"]),
        ({"gpus_per_node": 4}, {"omit_directives": ("cpus-per-task",)}, []),
        ({}, {"train": TrainConfig(backend="nccl")},
         ["--backend nccl needs GPUs, but none are requested: add --gpus-per-node"]),
        ({}, {"train": TrainConfig(cuda_graph="on")}, ["--cuda-graph on needs GPUs"]),
        ({}, {"train": TrainConfig(device="cuda"), "launcher": "local"}, []),
    ],
)  # fmt: skip
def test_what_a_sound_request_wastes_is_said(
    resources: dict[str, Any], fields: dict[str, Any], words: list[str]
) -> None:
    said = remarks(spec(resources=Resources(**resources), **fields))
    assert len(said) == len(words), said
    for line, begin in zip(said, words, strict=True):
        assert line.startswith(begin)


def test_what_cannot_be_is_refused_with_the_way_out() -> None:
    two = Resources(gpus_per_node=1, tasks_per_node=2)
    for fields, words in (
        ({"resources": two}, "To let ranks share a GPU: --backend gloo, or --env NCCL_M"),
        ({"resources": two, "command": ("true",)}, "To let ranks share a GPU: --env NCCL_M"),
        (
            {
                "resources": Resources(gpus_per_node=2),
                "train": TrainConfig(cuda_graph="on", backend="gloo"),
            },
            "a graph cannot record",
        ),
        (
            {"resources": two, "environment": (("CUDA_VISIBLE_DEVICES", "0"),)},
            "--env: CUDA_VISIBLE_DEVICES is set by Slurm",
        ),
    ):
        with pytest.raises(RequestError, match=words):
            spec(**fields)
    assert spec(environment=(("CUDA_VISIBLE_DEVICES", "0"),))  # where Slurm knows of no GPUs


def test_one_task_may_drive_all_gpus_of_its_node() -> None:
    resources = Resources(gpus_per_node=4, tasks_per_node=1)
    assert spec(resources=resources, train=TrainConfig(strategy="dp")).world_size == 1


@pytest.mark.parametrize(
    "image", [{"wrapper": ("apptainer", "exec", "i.sif")}, {"container_image": "i.sif"}]
)
def test_the_interpreter_of_the_batch_script_is_recorded_with_an_image(
    image: dict[str, Any],
) -> None:
    same = spec(python="/same/python", controller_python="/same/python", **image)
    assert JobSpec.from_json(same.to_json()) == same
    assert JobSpec.from_script("\n".join(same.to_script()), same.run_dir) == same


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"launcher": "submitit"}, "--spare-nodes 1 conflicts with --launcher submitit"),
        ({"launcher": "local"}, "--spare-nodes 1 conflicts with --launcher local"),
        ({"max_restarts": 2}, "--spare-nodes 1 conflicts with --max-restarts 2"),
        ({"srun_args": ("--mem=1G -w h07",)}, "--spare-nodes 1 conflicts with --srun-args -w"),
        ({"srun_args": ("--exclusive",)}, "--spare-nodes 1 conflicts with --srun-args --exclusive"),
        ({"srun_args": ("-N4",)}, "--spare-nodes 1 conflicts with --srun-args -N"),
        ({"srun_args": ("-xh07",)}, "--spare-nodes 1 conflicts with --srun-args -x"),
        ({"sbatch": (("no-kill", None),)}, "--spare-nodes 1 conflicts with --sbatch no-kill"),
    ],
)
def test_spares_are_refused_where_the_job_chooses_no_nodes(
    fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(OptionError, match=re.escape(words)) as seen:
        spec(resources=Resources(nodes=2, spare_nodes=1), **fields)
    assert seen.value.code == "CD0103"


NODES = "h1,h2"
AFTER = (("/jobs/a", "ok"),)
SWEEP = Sweep(("lr",), (("0.1",), ("0.2",)), max_concurrent=1)


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        (lambda: Resources(nodes=2, nodelist=NODES, exclude="h2"), "CD0103"),
        (lambda: Resources(nodelist=NODES), "CD0105"),
        (lambda: spec(launcher="submitit", sweep=SWEEP), "CD0305"),
        (lambda: spec(launcher="submitit", after=AFTER), "CD0305"),
        (lambda: spec(launcher="submitit", notify=("tell",)), "CD0305"),
        (lambda: spec(notify=("",)), "CD1108"),
        (lambda: spec(after=AFTER, resources=Resources(dependency="after:1?after:2")), "CD0103"),
        (lambda: spec(after=(("a", "ok"),)), "CD1105"),
        (lambda: spec(launcher="local", sweep=SWEEP).check_trials(), "CD0103"),
    ],
)
def test_a_contradiction_leads_to_another_page_than_a_value_that_is_not_valid(
    asked: Callable[[], object], code: str
) -> None:
    with pytest.raises(OptionError) as seen:
        asked()
    assert seen.value.code == code


def test_a_nodelist_of_a_job_with_spares_names_fewer_nodes_or_spares_too() -> None:
    for hosts in ("h01", "h[01-03]", "h[01-04]"):
        assert Resources(nodes=2, spare_nodes=2, nodelist=hosts).job_nodes == 4
    for hosts in ("h[01-02]", "h[01-05]"):
        with pytest.raises(RequestError, match=re.escape(hosts)):
            Resources(nodes=2, spare_nodes=2, nodelist=hosts)
    assert Resources(nodes=2, nodelist="h[01-02]").job_nodes == 2


def test_staging_names_the_copy_in_place_of_the_environment() -> None:
    asked = spec(
        stage_env="auto", python="/shared/my env/bin/python3",
        command=("/shared/my env/bin/torchrun", "/shared/my env/bin.py"),
    )  # fmt: skip
    words = task_words(asked)
    assert words[0] == '"$CLUSTERDDP_STAGED"/bin/python3'
    assert words[-2:] == ['"$CLUSTERDDP_STAGED"/bin/torchrun', "'/shared/my env/bin.py'"]
    assert '"$CLUSTERDDP_STAGED"/bin/python3 -m torch' in " ".join(agent_words(asked))
    script = render(asked)
    assert 'export PATH="$CLUSTERDDP_STAGED/bin:$PATH"' in script
    assert JobSpec.from_script(script, asked.run_dir).stage_env == "auto"
    assert "STAGED" not in render(spec(python="/shared/my env/bin/python3"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"launcher": "local"}, "conflicts with --launcher local"),
        ({"launcher": "submitit"}, "conflicts with --launcher submitit"),
        ({"container_image": "a.sif"}, "conflicts with --container-image"),
        ({"wrapper": ("env",)}, "conflicts with --wrapper"),
        ({"python": "python3"}, "needs --python with the Python of a venv"),
        ({"python": "/usr/bin/python3"}, "and not '/usr/bin/python3'"),
        ({"stage_env": "tmp"}, "off, auto or an absolute path"),
        ({"stage_env": "/tmp/$USER"}, "off, auto or an absolute path"),
        ({"stage_env": "/tmp/a b"}, "off, auto or an absolute path"),
    ],
)
def test_staging_that_cannot_be_done_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=re.escape(message)):
        spec(**{"stage_env": "auto", "python": "/shared/env/bin/python", **fields})
