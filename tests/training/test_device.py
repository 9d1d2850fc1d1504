import pytest

from clusterddp.errors import TrainingError
from clusterddp.training.device import Choice, choose, granted_gpus

# wanted, visible, local rank, local world size, granted, driver -> device or words of the error
CASES = [
    ("auto", 4, 0, 4, 4, True, "cuda:0"),
    ("auto", 4, 3, 4, 4, True, "cuda:3"),
    ("cuda", 4, 2, 4, 4, True, "cuda:2"),
    ("auto", 4, 1, 2, 4, True, "cuda:1"),  # fewer ranks than GPUs
    ("auto", 1, 3, 4, 1, True, "cuda:0"),  # --gpus-per-task=1: each task sees its own as 0
    ("auto", 2, 2, 3, 2, True, "3 ranks run on this host, but 2 GPUs are visible"),
    ("auto", 0, 0, 1, 0, True, "cpu"),
    ("auto", 0, 0, 1, 0, False, "cpu"),
    ("cpu", 4, 1, 4, 4, True, "cpu"),
    ("cpu", 0, 1, 4, 0, False, "cpu"),
    ("cuda", 0, 0, 1, 0, False, "torch sees no GPU"),
    ("auto", 0, 0, 2, 2, True, "2 GPUs were granted.*--device cpu"),
    ("auto", 0, 0, 2, 2, False, "cpu"),
]


@pytest.mark.parametrize("case", CASES)
def test_the_device_follows_from_what_is_visible(
    case: tuple[str, int, int, int, int, bool, str],
) -> None:
    wanted, visible, local_rank, local_world_size, granted, driver, expected = case

    def chosen() -> Choice:
        return choose(
            wanted,
            visible=visible,
            local_rank=local_rank,
            local_world_size=local_world_size,
            granted=granted,
            driver=driver,
        )

    if expected.startswith(("cuda:", "cpu")):
        assert chosen().name == expected
    else:
        with pytest.raises(TrainingError, match=expected):
            chosen()


def test_granted_gpus_that_stay_idle_are_a_warning() -> None:
    place = {"visible": 0, "local_rank": 0, "local_world_size": 1}
    unseen = choose("auto", granted=2, driver=False, **place)
    assert unseen.warning == "2 GPUs were granted, but torch sees none: training on the CPU"
    chosen = choose("cpu", granted=1, driver=True, **place)
    assert chosen.warning == "1 GPU was granted, but --device cpu leaves them idle"
    assert choose("auto", granted=0, driver=True, **place).warning == ""


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({}, 0),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8f3e"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "", "SLURM_JOB_GPUS": "0,1"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, 0),
        ({"SLURM_JOB_GPUS": "0-3,6"}, 5),
        ({"SLURM_STEP_GPUS": "2", "SLURM_JOB_GPUS": "0-3"}, 1),
        ({"SLURM_GPUS_ON_NODE": "4"}, 4),
        ({"SLURM_GPUS_ON_NODE": ""}, 0),
    ],
)
def test_granted_gpus_are_counted_from_slurms_variables(
    environ: dict[str, str], count: int
) -> None:
    assert granted_gpus(environ) == count
