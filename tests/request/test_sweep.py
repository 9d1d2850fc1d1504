"""Trials of a sweep: what is typed, what is drawn, what is refused, and each trial's request."""

import math
from pathlib import Path

import pytest

from clusterddp.errors import OptionError, RequestError
from clusterddp.request.program import BuiltIn, Command
from clusterddp.request.resources import Resources
from clusterddp.request.spec import JobSpec
from clusterddp.request.sweep import NO_SWEEP, Sweep, parse, read_trials
from clusterddp.request.train_config import TrainConfig
from clusterddp.submission.fields import remarks
from tests.hostile import CARRIED, REFUSED

COMMAND = Command(("a",))


def training(*items: str, **more: object) -> JobSpec:
    return JobSpec("s", "/jobs/s", Resources(), train=TrainConfig(), sweep=parse(items), **more)  # type: ignore[arg-type]


def command(*words: str, sweep: Sweep) -> JobSpec:
    return JobSpec("s", "/jobs/s", Resources(), command=words, sweep=sweep)


@pytest.mark.parametrize(
    ("items", "names", "trials"),
    [
        (["lr=0.1,1e-3"], ["lr"], [["0.1"], ["1e-3"]]),
        (["seed=-1..1"], ["seed"], [["-1"], ["0"], ["1"]]),
        (["a=0..1,7", "b=x,y"], ["a", "b"], [[a, b] for a in "017" for b in "xy"]),
        (["f=a=b,c"], ["f"], [["a=b"], ["c"]]),
        (["f=../a,a..b"], ["f"], [["../a"], ["a..b"]]),
    ],
)
def test_a_grid_has_every_combination(
    items: list[str], names: list[str], trials: list[list[str]]
) -> None:
    assert parse(items) == Sweep(tuple(names), tuple(map(tuple, trials)))


@pytest.mark.parametrize(
    ("items", "words"),
    [
        (["lr"], "expected NAME=VALUES"),
        (["lr="], "expected NAME=VALUES"),
        (["lr=1,,2"], "a value is empty"),
        (["lr=1,1"], "1 is given twice"),
        (["lr=1", "lr=2"], "is given twice"),
        (["seed=0.."], "0.. is not a valid range"),
        (["a-b=1", "a_b=2"], "a-b and a_b share a variable in the script"),
        (["seed=4..0"], "is not a valid range"),
        (["lr=0..2.5"], "0..2.5 is not a valid range"),
        (["lr=1,-1..1e3"], "-1..1e3 is not a valid range"),
        ([f"seed=0..{10**30}"], "is not a valid range"),
        (["seed=0..999999999"], "has 1000000000 values; the maximum is 100000"),
        (["a=0..999", "b=0..999"], "1000000 trials"),
        (["2x=1"], "is not a valid name"),
        (["lr=log:1..2"], "--num-samples N"),
        (["lr=log:0.1,0.2"], "log:0.1 is not a range to draw from"),
    ],
)
def test_what_is_no_grid_is_refused(items: list[str], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        parse(items)


def test_draws_are_the_same_for_a_seed_and_lie_within_their_bounds() -> None:
    items = ["lr=log:1e-4..1e-1", "width=log:16..1024", "beta=lin:0.5..0.6", "o=a,b", "n=0..2"]
    drawn = parse(items, num_samples=50, seed=7)
    assert drawn == parse(items, num_samples=50, seed=7) != parse(items, num_samples=50, seed=8)
    # They must not change with Python's version, nor with ours.
    assert drawn.trials[0] == ("0.00093648", "30", "0.565093", "a", "1")
    assert drawn.sample_seed == 7
    rates = [float(trial[0]) for trial in drawn.trials]
    assert min(rates) >= 1e-4
    assert max(rates) <= 1e-1
    assert -3.0 < sum(map(math.log10, rates)) / 50 < -2.0  # even in the logarithm
    assert {trial[3] for trial in drawn.trials} == {"a", "b"}
    assert {trial[4] for trial in drawn.trials} == {"0", "1", "2"}


@pytest.mark.parametrize(
    ("items", "count", "words"),
    [
        (["o=a,b"], 3, "only about 2"),
        (["lr=log:0..1"], 3, "above 0"),
        (["lr=lin:2..1"], 3, "smaller one first"),
        (["lr=lin:a..b"], 3, "Use two numbers"),
        (["lr=lin:0..inf"], 3, "Use two numbers"),
        (["lr=lin:0..1"], 0, "out of range"),
        ([], 3, "--num-samples needs --sweep NAME=VALUES."),
    ],
)
def test_draws_that_cannot_be_made_are_refused(items: list[str], count: int, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        parse(items, num_samples=count)


def test_files_give_trials_that_are_combined_with_the_others(tmp_path: Path) -> None:
    table, lines = tmp_path / "p.csv", tmp_path / "p.jsonl"
    table.write_text('\ufefflr,note\r\n1e-3,"a, ""b"""\r\n0.10,\r\n')
    lines.write_text('{"lr": 1e-3, "note": "a, \\"b\\""}\n\n{"note": "", "lr": 0.10}\n')
    rows = read_trials(table)
    assert (
        rows == read_trials(lines) == [{"lr": "1e-3", "note": 'a, "b"'}, {"lr": "0.10", "note": ""}]
    )
    assert parse(["seed=0..1"], rows).trials[2:] == (("0.10", "", "0"), ("0.10", "", "1"))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("p.csv", "a,b\n1\n", "line 2: expected 2 values, found 1."),
        ("p.csv", "a,a\n1,2\n", "is given twice"),
        ("p.csv", 'a\n"1\n', "line"),
        ("p.csv", "a\n", "has no trials"),
        ("p.csv", "", "has no trials"),
        ("p.csv", 'a,b\n1,2\n3,"x\ny"\n', r"p.csv, line 4: b: .* contains the control"),
        ("p.csv", "a\nx\0\n", "p.csv, line 2: "),
        (
            "p.jsonl",
            '{"a": "1"}\n{"a": "x\\u0000"}\n',
            "p.jsonl, line 2: a: .* contains the control",
        ),
        ("p.jsonl", "{}\n", "line 1: expected an object"),
        ("p.jsonl", "[1]\n", "expected an object"),
        ("p.jsonl", '{"a": [1]}\n', "a is not a string"),
        ("p.jsonl", '{"a": 1}\n{"b": 1}\n', "line 2: expected the names a"),
        ("p.jsonl", '{"a": 1}\n{"a": 1, "a": 2}\n', "line 2: a name is given twice"),
        ("p.jsonl", '{"a": NaN}\n', "line 1: NaN is not a valid JSON value"),
        ("p.jsonl", '{"a": -Infinity}\n', "line 1: -Infinity is not a valid JSON value"),
        ("p.txt", "a\n1\n", r"\*\.csv or \*\.jsonl"),
    ],
)
def test_a_file_that_holds_no_trials_is_refused(
    tmp_path: Path, name: str, content: str, words: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(OptionError, match=words):
        read_trials(tmp_path / name)


def test_a_place_of_a_value_that_no_sweep_has_is_remarked() -> None:
    words = ("train", "{lr}", "--x={seed}", "{}", "a{lr}", "{1}", '{"a": 1}')
    alone = remarks(JobSpec("s", "/jobs/s", Resources(), command=words))
    assert [remark.split()[0] for remark in alone] == ["{lr}", "--x={seed}"]
    [of_other] = remarks(command(*words, sweep=parse(["lr=1,2"])))
    words = "--x={seed} in the COMMAND is not replaced, because --sweep has no such name."
    assert of_other == words


def test_a_trial_is_the_request_of_a_run_of_its_own() -> None:
    spec = training("lr=0.1,0.3", "compile=yes,no", "batch-size=32")
    trial = spec.trial_spec(3)
    assert (trial.run_name, trial.run_dir, trial.index) == ("s-3", "/jobs/s-3", 3)
    assert (trial.sweep_name, trial.shared_dir) == ("s", "/jobs/s")
    assert (trial.sweep, trial.trial[0]) == (NO_SWEEP, ("lr", "0.3"))
    assert trial.train == TrainConfig(lr=0.3, compile=False, batch_size=32)
    for each in (spec, trial):
        assert JobSpec.from_json(each.to_json()) == each
    assert JobSpec.from_script("\n".join(spec.to_script()), "/jobs/s") == spec
    assert '"sweep"' not in JobSpec("r", "/jobs/r", Resources(), command=("a",)).to_json()


@pytest.mark.parametrize(
    ("items", "words"),
    [
        (
            ["nodes=1,2"],
            "nodes: all trials are tasks of one job array, so they share --nodes. Submit",
        ),
        (["time=1:00,2:00"], "time: all trials are tasks of one job array"),
        (["recipe=a"], "recipe: a recipe sets several"),
        (["learning=1"], "no such option"),
        (["lr=0.1,high"], "'high' is not valid. Use a finite number"),
        (["epochs=1.5"], "'1.5' is not valid. Use a positive whole number"),
        (["compile=maybe"], "'maybe' is not valid. Use yes or no"),
        (["lr=1,-1"], "the trial lr=-1"),
        (["precision=tf32"], "the trial precision=tf32"),
        (["lr=0.3,0.1,1e-1"], ": lr=0.1 and lr=1e-1 are the same trial"),
        (
            ["seed=1,2", "compile=yes,true"],
            "seed=1 compile=yes and seed=1 compile=true are the same",
        ),
    ],
)
def test_trials_that_the_training_cannot_have_are_refused(items: list[str], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        JobSpec(
            "s", "/s", Resources(), train=TrainConfig(device="cpu"), sweep=parse(items)
        ).check_trials()


def test_a_trial_keeps_the_code_of_what_is_refused() -> None:
    with pytest.raises(OptionError, match="the trial precision=tf32") as seen:
        BuiltIn(TrainConfig(device="cpu")).for_trial((("precision", "tf32"),))
    assert seen.value.code == "CD0103"


def test_braces_are_those_of_a_sweep_and_are_replaced_once() -> None:
    sweep = Sweep(("a", "b"), (("{b}", "x"),))
    spec = command("p", "{a}{b}", "{c}", "{ a }", "${a}", sweep=sweep)
    assert spec.trial_spec(0).command == ("p", "{b}x", "{c}", "{ a }", "${b}")
    with pytest.raises(OptionError, match=r"the COMMAND does not contain \{n\}, so"):
        command("p", "{a}", sweep=parse(["a=1", "n=1,2"]))
    with pytest.raises(OptionError, match=r"the COMMAND does not contain \{n\} but \{m\}, so"):
        command("p", "{a}", "{m}", sweep=parse(["a=1", "n=1,2"]))
    with pytest.raises(OptionError, match="one job array, so they share --nodes"):
        command("p", "{a}", sweep=parse(["a=1", "nodes=1,2"]))
    command("p", "{nodes}", sweep=parse(["nodes=1,2"]))


@pytest.mark.parametrize("text", REFUSED)
def test_a_value_that_no_script_can_carry_is_refused(text: str) -> None:
    with pytest.raises(RequestError):
        Sweep(("a",), ((text,),))


def test_trials_are_appended_and_none_is_there_twice() -> None:
    before = parse(["a=1,2", "b=x"])
    after = before.with_trials(parse(["b=x,y", "a=2,3"]), COMMAND.parse_values)
    assert after.trials == (("1", "x"), ("2", "x"), ("3", "x"), ("2", "y"), ("3", "y"))
    assert before.with_trials(parse(["a=1", "b=x"]), COMMAND.parse_values) == before
    with pytest.raises(OptionError, match="varies a, b, but the new trials vary a"):
        before.with_trials(parse(["a=9"]), COMMAND.parse_values)


def test_values_of_the_training_count_and_not_how_they_are_written() -> None:
    before = parse(["lr=0.1,0.3", "seed=0"])
    more = parse(["seed=0,00", "lr=0.10,0.5"])
    trained = before.with_trials(more, BuiltIn(TrainConfig()).parse_values)
    assert trained.trials[2:] == (("0.5", "0"), ("0.5", "00"))
    assert (
        len(before.with_trials(more, COMMAND.parse_values)) == 6
    )  # to a COMMAND they are different words
    command("train", "{a}", sweep=parse(["a=0.1,0.10"])).check_trials()


def test_an_array_of_submitit_is_refused() -> None:
    with pytest.raises(OptionError, match="conflicts with --launcher submitit"):
        training("lr=1,2", launcher="submitit")


def test_hostile_values_are_trials() -> None:
    sweep = Sweep(("v",), tuple((text,) for text in CARRIED))
    spec = command("p", "--v={v}", sweep=sweep)
    assert [spec.trial_spec(i).command[1] for i in range(len(sweep))] == [
        f"--v={t}" for t in CARRIED
    ]


def test_a_container_sees_what_the_trials_share() -> None:
    image = {"container_image": "img.sif", "python": "python3"}
    spec = JobSpec(
        "s", "/jobs/s", Resources(), command=("p", "{a}"), sweep=parse(["a=1,2"]), **image
    )
    for each in (spec, spec.trial_spec(1)):
        assert "/jobs/s" in [mount.target for mount in each.container.mounts]
    assert not spec.trial_spec(1).container.to_json().count("/jobs/s-1")
