"""`clusterddp report --html`: the page, where it goes, and what it needs."""

import base64
import dataclasses
import io
import json
import os
import re
import stat
import threading
from html.parser import HTMLParser
from typing import Any, cast

import pytest

from clusterddp.reporting import plots
from clusterddp.run.records import RateSpread
from clusterddp.run.run_dir import RunDir
from tests.cli.made_reports import achieve, attempt, measure
from tests.cli.made_runs import BOOM, FAILURE, Workplace, ended, started, submitted, workplace
from tests.event_lines import add_event

__all__ = ["workplace"]

DONE = (submitted("12"), started("12"), ended("12", 0))
HOSTILE = (
    "</style></pre>\"'><script>alert(1)</script><img src=x onerror=alert(1)>\x1b[31m\u202e{{ 7*7 }}"
)
EMPTY = {"meta", "img", "br", "path", "use", "rect", "link"}


class Page(HTMLParser):
    """A page taken apart; every element has to be closed where it was opened."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(content)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in EMPTY:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        if tag not in EMPTY:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] != "style" and data.strip():
            self.words.append(" ".join(data.split()))

    @property
    def text(self) -> str:
        return " ".join(self.words)

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]


def write(workplace: Workplace, *names: str) -> tuple[str, Page]:
    got = workplace.invoke("report", *names, "--html", "page.html")
    assert (got.code, got.out, got.err) == (0, "wrote page.html\n", "")
    content = (workplace.folder / "page.html").read_text()
    return content, Page(content)


def change(workplace: Workplace, name: str, **fields: Any) -> None:
    path = workplace.root / name / "spec.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_page_holds_the_run_and_nothing_from_elsewhere(workplace: Workplace) -> None:
    run = workplace.run("one", *DONE)
    achieve(run, rates=(1000.0, 1000.0, 500.0), warnings=["no GPU was found"])
    run.script.write_text('#!/bin/bash\nexport KEY=\'s3cret\'\n[["KEY", "s3cret"]]\necho <hi>\n')
    change(workplace, "one", environment=[["KEY", "s3cret"]])
    content, page = write(workplace)
    assert not re.search(r"https?:|//|@import|url\(\s*[^#]|<script|javascript:", content)
    assert {source for image in page.all("img") for source in [image["src"][:22]]} == {
        "data:image/png;base64,"
    }
    titles = ["Loss", "Accuracy", "Throughput", "Throughput per rank"]
    assert [word for word in page.words if word in titles] == titles
    assert len(page.all("svg")) == 4
    for told in (
        "98.76%", "12.5s", "2,250", "1.0 GiB", "no GPU was found",
        "Straggler: rank 2 on h02: 500 images/s, 50% of the other ranks' median, 1,000",
        "4 9 12", "Loss 6.5000 Image 77", "torch 2.9.0", "echo <hi>",
    ):  # fmt: skip
        assert told in page.text, told
    assert "s3cret" not in content
    assert 'export KEY=(left out) [["KEY", "(left out)"]]' in page.text
    [style] = [
        one["style"] for one in page.all("td") if "true 4, predicted 9" in one.get("title", "")
    ]
    assert style == "background: rgb(209 52 75 / 0.285)"


def test_the_worst_images_are_pictures_of_their_pixels(workplace: Workplace) -> None:
    from PIL import Image

    achieve(workplace.run("one", *DONE))
    [image] = write(workplace)[1].all("img")
    shown = Image.open(io.BytesIO(base64.b64decode(image["src"].partition(",")[2])))
    assert (shown.mode, shown.size, shown.tobytes()) == ("L", (4, 3), bytes(range(12)))


def test_pictures_take_the_readers_colours(workplace: Workplace) -> None:
    achieve(workplace.run("one", *DONE))
    content, page = write(workplace)
    assert "prefers-color-scheme: dark" in content
    assert "stroke: currentColor" in content and "#010203" not in content
    assert not [one for one in page.elements if "#000000" in one[1].get("style", "")]
    used = {one["xlink:href"].removeprefix("#") for one in page.all("use")}
    clipped = set(re.findall(r"url\(#([^)]*)\)", content))
    assert used and used | clipped <= {one.get("id") for _, one in page.elements}


def test_what_strangers_wrote_is_text(workplace: Workplace) -> None:
    run = workplace.run("one", submitted("1"), started("1"))
    add_event(run, "ended", job_id="1", exit_code=1, first_failure={**FAILURE, "reason": HOSTILE})
    ranks = [
        {"rank": rank, "host": HOSTILE, "images_per_second": rate}
        for rank, rate in ((0, 1000.0), (1, 100.0))
    ]
    achieve(
        run, rates=(1000.0, 100.0), ranks=ranks, hosts=[HOSTILE], warnings=[HOSTILE],
        model=HOSTILE, dataset=HOSTILE, device=HOSTILE, versions={HOSTILE: HOSTILE},
        weights_sha256=HOSTILE,
        attempts=[{"attempt": n, "cause": HOSTILE, "hosts": [HOSTILE], "job_id": HOSTILE}
                  for n in (1, 2)],
    )  # fmt: skip
    run.script.write_text(HOSTILE)
    run.resolved.write_text(json.dumps({"where": [HOSTILE]}))
    achieve(workplace.run("two", *DONE))
    for names in (["one"], ["one", "two"]):
        content, page = write(workplace, *names)
        assert not page.all("script")
        assert all(image["src"].startswith("data:") for image in page.all("img"))
        assert not [name for _, held in page.elements for name in held if name.startswith("on")]
        assert "\x1b" not in content and "\u202e" not in content
        assert page.text.count("<script>alert(1)</script>") >= 12
        assert "{{ 7*7 }}" in page.text


def test_several_runs_are_one_page_with_what_they_differ_in(workplace: Workplace) -> None:
    for name, rates, size in (("a", (1000.0,), 64), ("b", (1000.0, 600.0), 64), ("c", (9.0,), 32)):
        achieve(workplace.run(name, *DONE), rates=rates)
        spec = json.loads((workplace.root / name / "spec.json").read_text())
        change(workplace, name, train=spec["train"] | {"batch_size": size})
    _, page = write(workplace, "a", "b", "c")
    assert "3 runs" in page.text
    assert "Scaling: convnet on cpu, fp32" in page.text
    assert "a 1 900 100% b 2 1,440 80%" in page.text
    assert "batch_size 64 64 32" in page.text
    assert page.text.count("Thin lines: training. Lines with markers: test set.") == 2
    targets = [one["href"] for one in page.all("a")]
    assert targets == [f"#{one['id']}" for one in page.all("section")] != []


def test_one_world_size_alone_is_no_scaling(workplace: Workplace) -> None:
    achieve(workplace.run("a", *DONE))
    achieve(workplace.run("b", *DONE))
    assert "Scaling" not in write(workplace, "a", "b")[1].text


def test_many_ranks_are_a_band_with_the_slowest_named(workplace: Workplace) -> None:
    achieve(workplace.run("one", *DONE), rates=tuple(1000.0 + rank for rank in range(20)))
    _, page = write(workplace)
    assert "20 ranks: median, with a band from slowest to fastest" in page.text
    assert "rank 0 on h01 (slowest)" in page.text
    assert "The 16 slowest of 20 ranks." in page.text


def test_very_many_ranks_are_drawn_from_their_spread(workplace: Workplace) -> None:
    run = workplace.run("one", *DONE)
    achieve(run, ranks=[], world_size=100)
    spread = dataclasses.asdict(
        cast(RateSpread, RateSpread.of([500.0] + [1000.0 + at for at in range(99)]))
    )
    lines = [{"kind": "train", "step": step, "rank_spread": spread} for step in (10, 20)]
    run.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    _, page = write(workplace)
    assert "100 ranks: median, with a band from slowest to fastest" in page.text
    assert "rank 0 (slowest)" in page.text
    assert "rank 0: 500 images/s, 48% of the other ranks' median, 1,049" in page.text
    assert "add up" not in page.text


def only_lines(run: RunDir, *kinds: str) -> None:
    """Leave the last line of metrics of each kind, and no other."""
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    last = {line["kind"]: line for line in lines if line["kind"] in kinds}
    run.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in last.values()))


@pytest.mark.parametrize("ranks", [1, 2, 40])
def test_a_run_of_one_line_of_metrics_is_drawn(workplace: Workplace, ranks: int) -> None:
    run = workplace.run("one", *DONE)
    achieve(run, rates=tuple(1000.0 + rank for rank in range(ranks)))
    only_lines(run, "train")
    content, page = write(workplace)
    pictures = re.findall(r"<svg.*?</svg>", content, re.DOTALL)
    assert len(pictures) == (3 if ranks == 1 else 4)
    for picture in pictures:  # what is drawn of the data, the axes and their ticks apart
        assert re.search(r'<g clip-path="[^"]*">\s*<use ', picture)
    many = ranks > 16
    assert ("40 ranks: median, with a band from slowest to fastest" in page.text) == many


def test_marks_stand_at_points_that_no_line_leads_to() -> None:
    values = [1.0, float("nan"), 2.0, 3.0, None, 4.0]
    line = plots.Line(list(enumerate(values)), "#000000")
    assert plots.marked(line) == [0, 5]
    assert plots.marked(dataclasses.replace(line, strong=True)) == [0, 2, 3, 5]
    assert plots.marked(plots.Line([], "#000000")) == []


def test_a_rank_without_a_figure_has_no_bar_and_none_has_no_column(workplace: Workplace) -> None:
    run = workplace.run("one", *DONE)
    achieve(run)
    report = json.loads(run.report.read_text())
    report["ranks"][2]["images_per_second"] = None
    only_lines(run, "eval")
    for without, bars in (((2,), 3), (range(4), 0)):
        for rank in without:
            report["ranks"][rank]["images_per_second"] = None
        run.report.write_text(json.dumps(report))
        _, page = write(workplace)
        assert [one.get("class") for one in page.all("td")].count("bar") == bars
        styles = [one["style"] for one in page.all("i") if "width" in one.get("style", "")]
        assert len(styles) == bars


def test_each_value_of_a_wide_table_has_its_name_for_a_narrow_screen(workplace: Workplace) -> None:
    for name in ("one", "two"):
        run = workplace.run(name, *DONE)
        achieve(run)
        attempt(run, 1, step=0, last=30, cause="stopped", reason="interrupt")
        attempt(run, 2, step=20, last=50, cause="done", reason="")
    change(workplace, "two", train={**json.loads(run.spec.read_text())["train"], "lr": 0.5})
    content, _ = write(workplace, "one", "two")
    tables = re.findall(r"<table(.*?)</table>", content, re.DOTALL)
    stacked = 0
    for table in tables:
        heads = re.findall(r"<th[ >]", table.partition("</tr>")[0])
        matrix = 'class="matrix"' in table
        if 'class="stack"' in table:
            stacked += 1
            names = re.findall(r"<th[^>]*>(.*?)</th>", table)
            for row in re.findall(r"<tr>(.*?)</tr>", table, re.DOTALL):
                assert re.findall(r'data-name="(.*?)"', row) == names
        elif matrix:
            assert 'style="--columns: 11; --widest: 2.3"' in table
        else:
            assert len(heads) <= 5, "a table this wide would be cut"
    assert stacked == 6  # the runs, what they differ in, and the ranks and starts of each


def test_starts_are_a_table_and_marks_in_the_curves(workplace: Workplace) -> None:
    run = workplace.run("one", *DONE)
    achieve(run)
    before = write(workplace)[0].count("stroke-dasharray")
    attempt(run, 1, step=0, last=30, cause="stopped", reason="interrupt")
    attempt(run, 2, step=20, last=50, cause="done", reason="")
    content, page = write(workplace)
    assert content.count("stroke-dasharray") == before + 4  # one in each picture
    assert "stopped: interrupt" in page.text
    assert "Steps repeated: 10" in page.text
    assert "Dotted lines: resumed from this step." in page.text


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), 0.0, 1e300])
def test_curves_of_strange_values_are_drawn(workplace: Workplace, loss: float) -> None:
    run = workplace.run("one", *DONE)
    lines = [{"kind": "train", "step": step, "loss": loss} for step in (1, 2)]
    run.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert len(write(workplace)[1].all("svg")) == 1


def test_a_failed_run_and_an_empty_one_have_a_page(workplace: Workplace) -> None:
    measure(
        workplace.run("bad", submitted("1"), started("1"), ended("1", 1, first_failure=FAILURE))
    )
    _, page = write(workplace, "bad")
    assert BOOM in page.text and len(page.all("svg")) == 3
    workplace.run("created")
    assert "no submission is recorded" in write(workplace, "created")[1].text
    write(workplace, "created", "bad")


def test_a_page_for_stdout(workplace: Workplace) -> None:
    achieve(workplace.run("one", *DONE))
    got = workplace.invoke("report", "--html", "-")
    assert (got.code, got.err) == (0, "")
    assert Page(got.out).all("html")
    assert sorted(path.name for path in workplace.folder.iterdir()) == ["bin", "jobs"]


def test_a_page_is_written_whole_and_private_and_through_links(workplace: Workplace) -> None:
    achieve(workplace.run("one", *DONE))
    target = workplace.folder / "real.html"
    target.write_text("old")
    inode = target.stat().st_ino
    (workplace.folder / "page.html").symlink_to(target)
    content, _ = write(workplace)
    assert (workplace.folder / "page.html").is_symlink()
    assert target.read_text() == content
    assert target.stat().st_ino != inode  # renamed into place: a reader sees the old or the new
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert sorted(path.name for path in workplace.folder.iterdir()) == [
        "bin", "jobs", "page.html", "real.html",
    ]  # fmt: skip


def test_a_pipe_takes_a_page(workplace: Workplace) -> None:
    achieve(workplace.run("one", *DONE))
    pipe = workplace.folder / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    assert workplace.invoke("report", "--html", "pipe").code == 0
    reader.join(60)
    assert read and Page(read[0]).all("html")
    assert pipe.is_fifo()


@pytest.mark.parametrize(
    ("html", "told"),
    [
        ("absent/page.html", "the directory absent does not exist"),
        ("jobs", "'jobs' is not a file name"),
        ("", "'' is not a file name"),
    ],
)
def test_a_page_that_has_no_place_is_a_wrong_request(
    workplace: Workplace, html: str, told: str
) -> None:
    achieve(workplace.run("one", *DONE))
    got = workplace.invoke("report", "--html", html)
    assert (got.code, got.out) == (2, "")
    assert f"--html: {told}" in got.err


def test_two_forms_at_once_are_refused(workplace: Workplace) -> None:
    got = workplace.invoke("report", "--json", "--html", "-")
    assert got.code == 2 and "Give one of them" in got.err
