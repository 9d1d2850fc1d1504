"""What `python -m benchmarks.house` counts, on a small checkout written for it."""

from pathlib import Path

from benchmarks import house

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
    figures = house.measured(tmp_path)
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
    assert house.circles(edges) == [["b", "c"]]
    assert house.longest_chain(edges) == ["a", "b", "c", "d"]
