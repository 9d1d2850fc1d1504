"""`clusterddp report SWEEP`: the table, JSON, CSV and the page of a sweep."""

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from clusterddp.run.run_dir import RunDir, SweepDir
from tests.cli.made_runs import Workplace, ended, started, workplace
from tests.cli.test_imports import HEAVY, folder, watched
from tests.hostile import CARRIED
from tests.reporting.test_page import Page

__all__ = ["folder", "workplace"]

HOSTILE = "</td><script>alert(1)</script>$x^2$ {{ 7*7 }}"


def end(run: RunDir, code: int = 0) -> None:
    """Let a trial have come to its end."""
    job_id = str(100 + int(run.name.rpartition("-")[2]))
    lines = [
        {"time": 2e9, **started(job_id), "array_task": f"7_{int(job_id) - 100}"},
        {"time": 2e9, **ended(job_id, code, cause="done" if code == 0 else "failed")},
    ]
    with run.events.open("a") as file:
        file.writelines(f"{json.dumps(line)}\n" for line in lines)


def measure(run: RunDir, kind: str, *values: float, name: str = "accuracy") -> None:
    with run.metrics.open("a") as file:
        file.writelines(
            json.dumps({"kind": kind, "step": 10 * step, name: value}) + "\n"
            for step, value in enumerate(values, 1)
        )


@pytest.fixture
def sweep(workplace: Workplace) -> SweepDir:
    """3 rates x 2 seeds: 0.3 is best, one seed of 1 has failed early, those of 0.1 are queued."""
    trials = [(lr, seed) for lr in ("0.1", "0.3", "1") for seed in ("0", "1")]
    sweep = workplace.sweep("lr", ("lr", "seed"), *trials)
    runs = sweep.trials
    for index, values in ((2, (0.5, 0.9)), (3, (0.6, 0.8)), (4, (0.4, 0.6))):
        measure(runs[index], "train", 4.0 / index, 2.0 / index, name="loss")
        measure(runs[index], "eval", *values)
        end(runs[index])
    end(runs[5], 1)
    # Asked for `7_0` and the like, it prints them as Slurm does.
    workplace.command("squeue", 'for n in 0 1; do echo "7_$n|PENDING|Priority"; done')
    return sweep


def rows(out: str) -> list[list[str]]:
    return [line.split() for line in out.partition("\n\n")[2].splitlines()]


def test_a_sweep_is_a_table_over_seeds_best_first(sweep: SweepDir, workplace: Workplace) -> None:
    got = workplace.invoke("report", "lr")
    assert (got.code, got.err) == (0, "")
    assert "sweep      lr\n" in got.out
    assert "state      queued: 2 queued, 3 done, 1 failed\n" in got.out
    words = "test accuracy, highest first; mean and sample standard deviation of N trials over seed"
    assert f"by         {words}\n" in got.out
    header, *lines = rows(got.out)
    assert header == ["lr", "TEST-ACCURACY", "STD", "N", "STATE", "BEST-TRIAL"]
    assert lines[0] == ["0.3", "85.00%", "7.07%", "2", "2", "done", "lr-2"]
    assert lines[1] == ["1", "60.00%", "-", "1", "1", "done,", "1", "failed", "lr-4"]
    assert lines[2] == ["0.1", "-", "-", "0", "2", "queued", "-"]


def test_slurm_is_asked_once_and_each_file_read_once(sweep: SweepDir, workplace: Workplace) -> None:
    read: list[str] = []
    is_on = True

    def watch(event: str, arguments: Any) -> None:
        if is_on and event == "open" and arguments[1]:  # without a mode it is of os.open
            read.append(str(arguments[0]))

    sys.addaudithook(watch)  # it cannot be taken away
    try:
        workplace.invoke("report", "lr")
    finally:
        is_on = False
    names = ("events.jsonl", "metrics.jsonl", "report.json")
    ours = [path for path in read if "/lr-" in path and path.endswith(names)]
    assert len(ours) == len({*ours}) >= 6
    assert [call.split()[0] for call in workplace.calls] == ["squeue"]


def test_the_metric_and_its_direction_can_be_named(sweep: SweepDir, workplace: Workplace) -> None:
    for by, first in (("train_loss", "1"), ("+train_loss", "0.3"), ("-accuracy", "1")):
        got = workplace.invoke("report", "lr", "--by", by)
        assert (got.code, rows(got.out)[1][0]) == (0, first), by
    # Nothing has a test of the loss, so that the training's is meant.
    got = workplace.invoke("report", "lr", "--by=loss")
    assert "by         training loss, lowest first;" in got.out


def test_a_metric_of_ones_own_is_found(sweep: SweepDir, workplace: Workplace) -> None:
    for run, value in zip(sweep.trials[2:4], (3.0, 5.0), strict=True):
        measure(run, "eval", value, name="bleu")
    header, first, *_ = rows(workplace.invoke("report", "lr", "--by=bleu").out)
    assert header[:4] == ["lr", "TEST-BLEU", "STD", "N"]
    assert first[:4] == ["0.3", "4", "1.4142", "2"]
    got = workplace.invoke("report", "lr", "--by=blue")
    assert (got.code, got.out) == (2, "")
    assert (
        "--by blue is not recorded by any trial. Recorded metrics: accuracy, bleu, train_loss"
        in got.err
    )


def test_a_swept_name_is_no_metric_and_the_rate_is_none_of_the_test(
    sweep: SweepDir, workplace: Workplace
) -> None:
    other = workplace.sweep("wd", ("wd",), ("0.1",), ("0.2",))
    for run in (*sweep.trials[2:4], *other.trials):
        measure(run, "train", 0.05, name="lr")
        measure(run, "eval", 0.04, name="lr")
    header, *_ = csv.reader(workplace.invoke("report", "lr", "--csv=-").out.splitlines())
    assert [name for name in header if "lr" in name.split(".")[0]] == ["lr"]
    got = workplace.invoke("report", "lr", "--by=lr")
    assert (got.code, "--by lr is a swept option. Recorded metrics: accuracy" in got.err) == (
        2,
        True,
    )
    got = workplace.invoke("report", "wd", "--by=lr")  # where it is not swept
    assert "by         training lr, highest first" in got.out
    assert '"train_lr": 0.05' in workplace.invoke("report", "wd", "--json").out


def test_a_swept_loss_leaves_the_loss_a_metric(workplace: Workplace) -> None:
    sweep = workplace.sweep("s", ("loss",), ("ce",), ("mse",))
    for run, value in zip(sweep.trials, (0.5, 0.4), strict=True):
        measure(run, "train", value, name="loss")
        measure(run, "eval", value + 0.1, name="loss")
    header, first, _ = rows(workplace.invoke("report", "s").out)
    assert (header[:2], first[:2]) == (["loss", "TEST-LOSS"], ["mse", "0.5"])
    assert workplace.invoke("report", "s", "--by=train_loss").code == 0


def test_a_report_counts_more_than_the_lines_before_it(
    sweep: SweepDir, workplace: Workplace
) -> None:
    sweep.trial(2).report.write_text('{"accuracy": 0.2, "loss": NaN, "train_seconds": 3.5}')
    header, *lines = rows(workplace.invoke("report", "lr").out)
    assert header[4:6] == ["TEST-LOSS", "TRAIN-SECONDS"]
    assert lines[0][:2] == ["1", "60.00%"]
    assert lines[1][:6] == ["0.3", "50.00%", "42.43%", "2", "nan", "3.5"]


def test_what_is_taken_together_can_be_named(sweep: SweepDir, workplace: Workplace) -> None:
    header, *lines = rows(workplace.invoke("report", "lr", "--over", "lr").out)
    assert (header[0], [line[0] for line in lines]) == ("seed", ["1", "0"])
    got = workplace.invoke("report", "lr", "--over=lr", "--over=seed", "--json")
    [row] = json.loads(got.out)["rows"]
    assert (row["params"], row["metrics"]["accuracy"]["n"], len(row["trials"])) == ({}, 3, 6)
    got = workplace.invoke("report", "lr", "--over=sede")
    assert (got.code, "--over sede is not swept. Swept: lr, seed" in got.err) == (2, True)


def test_without_seeds_each_trial_is_a_row(workplace: Workplace) -> None:
    sweep = workplace.sweep("s", ("n",), ("1",), ("2",))
    end(sweep.trial(1))
    measure(sweep.trial(1), "eval", 0.25)
    header, *lines = rows(workplace.invoke("report", "s").out)
    assert header == ["n", "TEST-ACCURACY", "STATE", "TRIAL"]
    assert lines[0] == ["2", "25.00%", "done", "s-1"]
    assert lines[1][:2] == ["1", "-"] and lines[1][-1] == "s-0"


def test_a_sweep_that_has_not_begun_is_a_table_of_states(workplace: Workplace) -> None:
    workplace.sweep("s", ("n",), ("1",), ("2",))
    got = workplace.invoke("report")  # the latest
    assert (got.code, got.err) == (0, "")
    assert "by         no trial has recorded a metric yet\n" in got.out
    assert [line[0] for line in rows(got.out)] == ["n", "1", "2"]
    assert workplace.invoke("report", "s", "--by=accuracy").code == 0
    got = workplace.invoke("report", "s", "--by=foo")
    assert (got.code, got.out) == (2, "")
    assert "--by foo is not recorded by any trial. No metric is recorded yet" in got.err
    for name in ("", "-"):
        got = workplace.invoke("report", "s", f"--by={name}")
        assert (got.code, "is not a metric" in got.err) == (2, True)


def test_without_a_metric_no_run_is_the_best_and_none_is_awaited_once_all_are_done(
    workplace: Workplace,
) -> None:
    sweep = workplace.sweep("s", ("n", "seed"), ("1", "0"), ("1", "1"))
    end(sweep.trial(0))
    got = workplace.invoke("report", "s")
    assert "by         no trial has recorded a metric yet\n" in got.out
    end(sweep.trial(1))
    got = workplace.invoke("report", "s")
    assert "by         no trial has recorded a metric. Record one in your script" in got.out
    assert "with a Loop (docs/resumable.md)\n" in got.out
    assert rows(got.out) == [["n", "STATE"], ["1", "2", "done"]]


def test_json_holds_rows_runs_and_all_metrics(sweep: SweepDir, workplace: Workplace) -> None:
    report = json.loads(workplace.invoke("report", "lr", "--json").out)
    assert list(report) == [
        "sweep", "state", "counts", "names", "over", "by", "lowest_first", "metrics", "rows",
        "directory",
    ]  # fmt: skip
    assert (report["by"], report["metrics"]) == ("accuracy", ["accuracy", "train_loss"])
    assert report["rows"][0]["trials"][1] == {
        "run": "lr-3", "state": "done", "params": {"lr": "0.3", "seed": "1"},
        "metrics": {"train_loss": pytest.approx(2 / 3), "accuracy": 0.8},
    }  # fmt: skip


def test_csv_goes_to_a_file_or_to_stdout(sweep: SweepDir, workplace: Workplace) -> None:
    got = workplace.invoke("report", "lr", "--csv=-")
    assert workplace.invoke("report", "lr", "--csv=t.csv").out == "wrote t.csv\n"
    assert (workplace.folder / "t.csv").read_text() == got.out
    header, first, *_ = csv.reader(got.out.splitlines())
    assert header[:4] == ["lr", "accuracy.mean", "accuracy.std", "accuracy.n"]
    assert [first[0], float(first[1]), first[3]] == ["0.3", pytest.approx(0.85), "2"]


def test_a_file_that_cannot_be_written_and_two_forms_are_refused(
    sweep: SweepDir, workplace: Workplace
) -> None:
    got = workplace.invoke("report", "lr", "--csv=none/t.csv")
    assert (got.code, "--csv: cannot write none/t.csv" in got.err) == (2, True)
    assert workplace.invoke("report", "lr", "--csv=-", "--json").code == 2


def test_options_of_a_sweep_are_refused_for_a_run(sweep: SweepDir, workplace: Workplace) -> None:
    for option in ("--by=loss", "--over=seed", "--csv=-"):
        got = workplace.invoke("report", "lr-2", option)
        assert (got.code, "needs a sweep, but" in got.err) == (2, True)
    assert workplace.invoke("report", "lr-2").code == 0
    assert len(workplace.invoke("report", "lr", "lr-2").out.splitlines()) == 7
    assert len(workplace.invoke("report", "lr-[23]").out.splitlines()) == 3


DAMAGE = (
    b"", b"{", b"[]", b"\xff\x00\xfe",
    b'{"kind": "eval", "step": 1' + b"0" * 400 + b', "accuracy": 1}\n',
    b'{"kind": "eval", "step": 1, "accuracy": "high", "loss": [1], "x": true}\n',
    b'{"kind": "eval", "step": -1, "accuracy": 1}\n{"kind": 5, "step": 1, "accuracy": 1}\n',
)  # fmt: skip


@pytest.mark.parametrize("record", ["metrics.jsonl", "report.json", "events.jsonl", "spec.json"])
def test_a_damaged_record_costs_its_own_figures(
    sweep: SweepDir, workplace: Workplace, record: str
) -> None:
    for damage in DAMAGE:
        (sweep.trial(3).path / record).write_bytes(damage)
        _, *lines = rows(workplace.invoke("report", "lr").out)
        assert lines[0][0] == "0.3", damage
        assert len(lines) == 3


def test_hostile_values_and_metrics_neither_move_the_cursor_nor_forge_lines(
    workplace: Workplace,
) -> None:
    sweep = workplace.sweep("s", ("text",), *((text,) for text in CARRIED))
    name = "f1\x1b[31m\u202e\nforged"
    for run in sweep.trials:
        end(run)
        measure(run, "eval", 0.5, name=name)
    got = workplace.invoke("report", "s")
    assert (got.code, got.err) == (0, "")
    assert not any(each in got.out for each in ("\x1b", "\u202e", "\u2028", "\nforged"))
    assert len(got.out.partition("\n\n")[2].splitlines()) == len(CARRIED) + 1
    texts = [row["params"]["text"] for row in json.loads(
        workplace.invoke("report", "s", "--json").out)["rows"]]  # fmt: skip
    assert texts == CARRIED


def test_neither_torch_nor_matplotlib_is_loaded(folder: Path) -> None:
    argv = ["submit", "--run-name=x", "--no-snapshot", "--sweep=n=1,2", "--", "/bin/true", "{n}"]
    watched(folder, argv)
    answer = "echo '7_0 8|RUNNING|None'; echo '7_1 9|RUNNING|None'"
    (folder / "bin" / "squeue").write_text(f"#!/bin/sh\n{answer}\n")
    loaded, started = watched(folder, ["report", "x"])
    assert not loaded & {"jinja2", "matplotlib", "PIL", *HEAVY}
    assert [Path(command).name for command in started] == ["squeue"]


def test_the_page_has_curves_with_bands_and_the_metric_over_the_parameter(
    sweep: SweepDir, workplace: Workplace
) -> None:
    got = workplace.invoke("report", "lr", "--html=page.html")
    assert (got.code, got.out, got.err) == (0, "wrote page.html\n", "")
    page = (workplace.folder / "page.html").read_text()
    for told in ("<h3>Test accuracy over lr</h3>", "<h3>Test accuracy</h3>",
                 "<h3>Training loss</h3>", "Logarithmic axis: lr.", "85.00%",
                 "Lines: mean over seed. Bands: lowest to highest.", "lr=0.3"):  # fmt: skip
        assert told in page, told
    assert len(Page(page).all("svg")) == 3
    assert "FillBetweenPolyCollection" not in page and "#010203" not in page


def test_the_page_of_a_sweep_that_has_not_begun_has_no_pictures(workplace: Workplace) -> None:
    workplace.sweep("s", ("n",), ("1",), ("2",))
    page = Page(workplace.invoke("report", "s", "--html=-").out)
    assert not page.all("svg")
    assert len(page.all("tr")) == 3


def test_hostile_values_are_text_in_the_page(workplace: Workplace) -> None:
    texts = [HOSTILE, *CARRIED[4:9], "1e400", "nan"]
    sweep = workplace.sweep("s", ("text", "n"), *((text, str(n)) for n, text in enumerate(texts)))
    for number, run in enumerate(sweep.trials):
        end(run)
        measure(run, "eval", 0.5, 0.1 * number, name="</h3><b>$x$")
        measure(run, "eval", 1e308, -1e308 if number else 1e308, name="loss")
    page = workplace.invoke("report", "s", "--by=</h3><b>$x$", "--html=-").out
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 2
    assert "<script>" not in page and "<b>" not in page and "{{ 7*7 }}" in Page(page).text
    assert workplace.invoke("report", "s", "--by=loss", "--html=-").code == 0
