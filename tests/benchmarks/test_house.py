"""What `python -m benchmarks.house` counts, on a small checkout written for it, and holds."""

from pathlib import Path

from benchmarks import house, source, walks

_FILES = {
    "__init__.py": "from typing import Any\n",
    "top.py": "from clusterddp.low import floor\n",
    "low/__init__.py": "",
    "low/floor.py": '"""That of the floor."""\n\n\ndef wall() -> None:  # fmt: skip\n    """W."""\n'
    "    from clusterddp import top\n    from clusterddp.ground import GROUND\n",
    "ground.py": "GROUND = 1\n\n\ndef dig(): ...\n",
}
_CONTRACT = """
[[tool.importlinter.contracts]]
containers = ["clusterddp"]
layers = [
    "top", # above all
    "low | ground",
]
"""


def test_a_checkout_is_measured(tmp_path: Path) -> None:
    for name, text in _FILES.items():
        path = tmp_path / "clusterddp" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "pyproject.toml").write_text(_CONTRACT)
    figures = source.measured(tmp_path)
    assert figures["longest chain"] == "top > low"
    assert figures["imports upwards"] == [
        "clusterddp.low.floor > clusterddp.ground",
        "clusterddp.low.floor > clusterddp.top",
    ]
    assert figures["circles of modules"] == ["clusterddp.low.floor clusterddp.top"]
    assert figures["circles of siblings"] == ["clusterddp.low clusterddp.top"]
    assert figures["files at the root"] == 3
    assert figures["code lines"] == 7
    assert figures["documented public functions, %"] == 50.0
    assert (figures["fmt: skip"], figures["Any"]) == (1, 1)
    assert figures["docstrings that open poorly"] == ["clusterddp.low.floor:1 That of the floor."]


def test_a_circle_counts_with_each_of_its_names() -> None:
    edges = [("a", "b"), ("b", "c"), ("c", "b"), ("c", "d"), ("a", "d")]
    assert source.circles(edges) == [["b", "c"]]
    assert source.longest_chain(edges) == ["a", "b", "c", "d"]


def test_a_question_is_counted_once_a_line_and_not_among_a_persons_own_scripts(
    tmp_path: Path,
) -> None:
    text = """
if spec.train or not spec.train: ...
value = 1 if self.spec.command else 2
first = spec.command[0]
known = run.spec.train is None
if train: ...
shown = [each for each in runs if each.trains and each.name]
"""
    for name in ("run/one.py", "scripts/two.py"):
        path = tmp_path / "clusterddp" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    lines = [f"clusterddp/run/one.py:{line}" for line in (2, 3, 5, 7)]
    assert list(source.kind_asked(tmp_path)) == lines


def test_a_figure_above_its_limit_and_one_of_nothing_are_named() -> None:
    labels = {row.label for row in house.HELD}
    assert {f"files entered by {walk}" for walk in walks.WALKS} < labels
    at_limit: dict[str, object] = {row.label: row.limit for row in house.HELD}
    assert list(house.broken(at_limit)) == []
    above = at_limit | {"modules": 10_000, "functions above 60 lines": ["a.b 61"] * 99}
    named = [line for line in house.broken(above) if not line.startswith(" ")]
    assert [line.partition(":")[0] for line in named] == ["modules", "functions above 60 lines"]
    assert list(house.broken(at_limit | {"files entered by rank 0": []})) == [
        "files entered by rank 0: nothing was measured"
    ]
    assert list(house.broken(at_limit | {"functions above 60 lines": []})) == []
