"""The forms in which Slurm takes its values, and the lists that it writes."""

import pytest

from clusterddp.errors import RequestError
from clusterddp.slurm import forms
from clusterddp.slurm.forms import MAX_HOSTS, expand_nodelist, expand_tasks_per_node
from tests.counting import count_calls
from tests.hostile import CARRIED, REFUSED

TIMES = ["90", "0", "45:00", "2:30:00", "02:30:00", "1-12", "1-02:30", "1-02:30:00", "UNLIMITED"]
NOT_TIMES = ["", "1h", "1-", "-1", "1:2:3:4", "1:99", "1.5", "90 ", "1-02:30:00:00", "\uff11"]
MEMORIES = ["64G", "500M", "1T", "4000", "100", "0", "4M", "8K", "64g"]
NOT_MEMORIES = ["", "64", "4", "099x", "64GB ", "1.5G", "-1", "64 G", "G", "64X"]
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
    with pytest.raises(
        RequestError, match=r"--time: .* is not a valid time limit\. Use minutes \(60 for 1h\)"
    ):
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
        ("3g.40gb:2", ("3g.40gb", 2)),  # a MIG device
    ],
)
def test_gpus_are_a_count_with_an_optional_type(value: str, expected: tuple[str, int]) -> None:
    assert forms.gpu_count("--gpus-per-node", value) == expected


@pytest.mark.parametrize("value", ["", "-1", "a100", "a100:", ":4", "4:a100", "a b:4", "1.5"])
def test_other_gpu_counts_are_refused(value: str) -> None:
    with pytest.raises(RequestError, match="a100:4"):
        forms.gpu_count("--gpus-per-node", value)


@pytest.mark.parametrize(
    ("value", "remedy"),
    [("gpu:8", "'gpu' is not a GPU type. Use 8"), ("h100:0", "Use 0, or a higher count")],
)
def test_a_gpu_count_that_means_something_else_is_refused(value: str, remedy: str) -> None:
    with pytest.raises(RequestError, match=f"--gpus-per-node {value}: .*{remedy}"):
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


READABLE = {
    "login": "login",
    "a,b": "a b",
    "b,a": "b a",
    "node-1.rack_2": "node-1.rack_2",
    "gpu[01-03,07]": "gpu01 gpu02 gpu03 gpu07",
    "a[8-10]": "a8 a9 a10",
    "a[08-10]": "a08 a09 a10",
    "a[098-102]": "a098 a099 a100 a101 a102",
    "a[1,3-5,07]": "a1 a3 a4 a5 a07",
    "a[07,1]": "a07 a1",
    "a[5,1-3]": "a5 a1 a2 a3",
    "a[0-03]": "a0 a1 a2 a3",
    "a[00-1]": "a00 a01",
    "a[1,1],a1": "a1 a1 a1",
    "[1-2]": "1 2",
    "a[1-2][3-4]": "a13 a14 a23 a24",
    "r[1-2]n[01-03]": "r1n01 r1n02 r1n03 r2n01 r2n02 r2n03",
    # The last bracket runs fastest, then the first, then the second: scontrol's own order.
    "r[1-2]n[1-2]s[1-2]": "r1n1s1 r1n1s2 r2n1s1 r2n1s2 r1n2s1 r1n2s2 r2n2s1 r2n2s2",
    "gpu[01-03]-ib": "gpu01-ib gpu02-ib gpu03-ib",
    "r[1-2]n[1-2]-ib,x": "r1n1-ib r1n2-ib r2n1-ib r2n2-ib x",
    "127.0.0.[1-2]": "127.0.0.1 127.0.0.2",
    "fe80::1": "fe80::1",
    "a[18446744073709551615]": "a18446744073709551615",
}


@pytest.mark.parametrize("text", READABLE)
def test_a_list_expands_to_its_hosts_in_order(text: str) -> None:
    assert expand_nodelist(text) == READABLE[text].split()


UNREADABLE = {
    "": "empty",
    "a[": "never closed (character 2)",
    "a[1-3": "never closed (character 2)",
    "b,a[1": "never closed (character 4)",
    "a]": "closes no '[' (character 2)",
    "a[1]]": "closes no '[' (character 5)",
    "a[1[2]]": "'[' inside a bracket (character 4)",
    "a[]": "empty item (character 3)",
    "a[1,]": "empty item (character 5)",
    "a[1,,2]": "empty item (character 5)",
    "a,,b": "empty item (character 3)",
    ",a": "empty item (character 1)",
    "a,": "empty item (character 3)",
    "a[3-1]": "3-1 runs backwards (character 3)",
    "a[1-2,010-9]": "010-9 runs backwards (character 7)",
    "a[1-]": "'1-' is not a number",
    "a[-1]": "'-1' is not a number",
    "a[x]": "'x' is not a number",
    "a[1-2-3]": "'1-2-3' is not a number",
    "a[1:3]": "'1:3' is not a number",
    "a b": "' ' cannot be part of a host list (character 2)",
    "a\n": r"'\n' cannot be part of a host list (character 2)",
    "a\x1b[2J": r"'\x1b' cannot be part",
    "a\u0661": "cannot be part",
    "a[\u0661]": "cannot be part",
    "$(id)": "'$' cannot be part",
    "a;b": "';' cannot be part",
    "4(x2)": "'(' cannot be part",
    f"a[{'1' * 21}]": "more than 20 digits",
    "a" * 256: "longer than 255 characters",
}


@pytest.mark.parametrize("text", UNREADABLE)
def test_an_unreadable_list_is_refused_with_the_place_and_an_example(text: str) -> None:
    with pytest.raises(RequestError) as caught:
        expand_nodelist(text)
    message = str(caught.value)
    assert UNREADABLE[text] in message
    assert "gpu[01-03,07]" in message or "255" in message
    assert message.isprintable()
    assert len(message) < 300


@pytest.mark.parametrize("form", ["g[{}]", "{}"])
def test_the_longest_lists_take_time_in_proportion(form: str) -> None:
    """A reading that looks at the rest of the list for each node takes 10 minutes, not a second."""
    numbers = [f"{2 * n:06}" for n in range(150_000)]
    text = form.format(",".join(numbers if "[" in form else [f"g{n}" for n in numbers]))
    hosts = expand_nodelist(text)
    assert (len(hosts), hosts[0], hosts[-1]) == (150_000, "g000000", "g299998")


@pytest.mark.parametrize(
    "text",
    [
        f"a[1-{MAX_HOSTS + 1}]", "a[1-9]" + "b[0-9]" * 6, f"a[1-{MAX_HOSTS}],b",
        "a[0-18446744073709551615]", "a" + "[0-99]" * 30,
    ],
)  # fmt: skip
def test_an_expansion_that_would_fill_the_memory_is_refused_before_it_begins(text: str) -> None:
    def refused() -> None:
        with pytest.raises(RequestError, match="the limit is 1000000"):
            expand_nodelist(text)

    assert count_calls(refused) < 2_000


def test_ten_thousand_nodes_take_about_a_call_each() -> None:
    hosts = expand_nodelist("node[0001-9999]")
    assert (len(hosts), hosts[0], hosts[-1]) == (9999, "node0001", "node9999")
    assert count_calls(lambda: expand_nodelist("node[0001-9999]")) < 15_000


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("1", [1]),
        ("4(x2)", [4, 4]),
        ("4(x2),3", [4, 4, 3]),
        ("4,2(x2)", [4, 2, 2]),
        ("8(x1),16", [8, 16]),
    ],
)
def test_tasks_per_node_gives_one_count_a_node(text: str, counts: list[int]) -> None:
    assert expand_tasks_per_node(text) == counts


@pytest.mark.parametrize(
    "text",
    [
        *("", ",", "4,", "4,,4", "x2", "4(2)", "4(x)", "4(x0)", "0", "-4", "4 ", "4(x2", "4x2"),
        *("4(x1000001)", "4(x999999),4(x2)", "4(x99999999999999999999)", "\u0664", "4\n"),
    ],
)
def test_unreadable_tasks_per_node_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(RequestError, match=r"tasks per node.*4\(x2\),3") as caught:
        expand_tasks_per_node(text)
    assert str(caught.value).isprintable()
