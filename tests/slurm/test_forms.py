"""The forms in which Slurm takes its values."""

import pytest

from clusterddp.errors import RequestError
from clusterddp.slurm import forms
from tests.hostile import CARRIED, REFUSED

TIMES = ["90", "0", "45:00", "2:30:00", "02:30:00", "1-12", "1-02:30", "1-02:30:00", "UNLIMITED"]
NOT_TIMES = ["", "1h", "1-", "-1", "1:2:3:4", "1:99", "1.5", "90 ", "1-02:30:00:00", "\uff11"]
MEMORIES = ["64G", "500M", "1T", "4000", "0", "8K", "64g"]
NOT_MEMORIES = ["", "64GB ", "1.5G", "-1", "64 G", "G", "64X"]
DEPENDENCIES = [
    "afterok:1234", "afterany:1:2", "afterok:1,afternotok:2", "singleton", "after:12+5",
    "afterok:1_2?afterany:3", "aftercorr:1_*",
]  # fmt: skip
NOT_DEPENDENCIES = ["", "afterok", "afterok:", "1234", "afterok:x", "afterok:1,,singleton",
                    "afterok:1,afterok:2?afterok:3"]  # fmt: skip


@pytest.mark.parametrize("value", TIMES)
def test_slurms_time_forms_are_taken_as_typed(value: str) -> None:
    forms.TIME_LIMIT.check("--time", value)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("90", 5400), ("0:30", 30), ("1-12", 129600), ("UNLIMITED", None), ("0", None)],
)
def test_zero_is_no_limit(value: str, seconds: int | None) -> None:
    assert forms.limit_seconds(value) == seconds


@pytest.mark.parametrize("value", NOT_TIMES)
def test_other_times_are_refused_with_valid_examples(value: str) -> None:
    with pytest.raises(RequestError, match=r"--time.*1-02:30:00"):
        forms.TIME_LIMIT.check("--time", value)


@pytest.mark.parametrize("value", MEMORIES)
def test_slurms_memory_forms_are_taken_as_typed(value: str) -> None:
    forms.MEMORY.check("--mem", value)


@pytest.mark.parametrize("value", NOT_MEMORIES)
def test_other_memory_forms_are_refused_with_valid_examples(value: str) -> None:
    with pytest.raises(RequestError, match=r"--mem.*64G"):
        forms.MEMORY.check("--mem", value)


@pytest.mark.parametrize("value", DEPENDENCIES)
def test_dependencies_are_taken_as_typed(value: str) -> None:
    forms.DEPENDENCY.check("--dependency", value)


@pytest.mark.parametrize("value", NOT_DEPENDENCIES)
def test_other_dependencies_are_refused(value: str) -> None:
    with pytest.raises(RequestError, match="afterok:1234"):
        forms.DEPENDENCY.check("--dependency", value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("4", ("", 4)),
        ("0", ("", 0)),
        ("a100:4", ("a100", 4)),
        ("nvidia_h100-80g:8", ("nvidia_h100-80g", 8)),
    ],
)
def test_gpus_are_a_count_with_an_optional_type(value: str, expected: tuple[str, int]) -> None:
    assert forms.gpu_count("--gpus-per-node", value) == expected


@pytest.mark.parametrize("value", ["", "-1", "a100", "a100:", ":4", "4:a100", "a b:4", "1.5"])
def test_other_gpu_counts_are_refused(value: str) -> None:
    with pytest.raises(RequestError, match="a100:4"):
        forms.gpu_count("--gpus-per-node", value)


@pytest.mark.parametrize("value", REFUSED)
def test_what_a_line_cannot_carry_is_refused(value: str) -> None:
    with pytest.raises(RequestError, match="--option"):
        forms.text("--option", value)


@pytest.mark.parametrize("value", CARRIED)
def test_every_other_text_is_carried_as_it_is(value: str) -> None:
    assert forms.text("--option", value) == value


def test_an_unfinished_quote_in_words_is_refused() -> None:
    with pytest.raises(RequestError, match="--srun-args"):
        forms.words("--srun-args", "--comment='half")
