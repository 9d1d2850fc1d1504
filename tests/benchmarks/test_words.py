"""Counts of `python -m benchmarks.words`, on a small checkout written for it."""

import sys
from pathlib import Path

import pytest

from benchmarks import words

_CODE = '''"""Reads a file once more."""

# It stands in a file of
# its own, as it is small.
raise ValueError(f"it is no number: {1}, and so it is said")
'''


def checkout(root: Path) -> Path:
    for name, text in {
        "clusterddp/one.py": _CODE,
        "clusterddp/explained/01.md": "Where it is, nobody knows.\n",
        "docs/page.md": "A plain page.\n\n## What is left\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_each_hit_has_its_kind_place_and_pattern(tmp_path: Path) -> None:
    hits = [(hit.kind, hit.place, hit.text) for hit in words.hits(checkout(tmp_path))]
    assert ("comments", "clusterddp/one.py:1", "once more") in hits
    assert ("comments", "clusterddp/one.py:3", "of its own") in hits
    assert ("strings", "clusterddp/one.py:5", "is no number") in hits
    assert ("error pages", "clusterddp/explained/01.md:1", "nobody") in hits
    assert ("docs", "docs/page.md:3", "## What") in hits
    assert {place for _, place, _ in hits} == {
        *(f"clusterddp/one.py:{line}" for line in (1, 3, 5)),
        *("clusterddp/explained/01.md:1", "docs/page.md:3"),
    }


@pytest.mark.parametrize(("limit", "code"), [(2, 0), (1, 1)])
def test_a_total_above_its_limit_fails(
    tmp_path: Path, limit: int, code: int,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    checkout(tmp_path)
    monkeypatch.setattr(words, "LIMITS", dict.fromkeys(words.LIMITS, 99) | {"strings": limit})
    monkeypatch.setattr(sys, "argv", ["words", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        words.main()
    assert end.value.code == code
    assert ("strings: 2 hits, limit 1" in capsys.readouterr().err) == bool(code)


def test_a_page_with_long_sentences_or_cells_is_named(tmp_path: Path) -> None:
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text(
        f"# A page\n\n{'word ' * 30}.\n\n```bash\n{'word ' * 40}\n```\n\nShort words here.\n"
    )
    assert not [*words.too_long(tmp_path)]
    page.write_text(f"{'word ' * 18}.\n\n| a | {'cell ' * 26}|\n")
    cell, mean = words.too_long(tmp_path)
    assert cell.startswith("docs/page.md: a table cell of more than 25 words: cell cell")
    assert mean == "docs/page.md: 19.0 words a sentence, limit 18"
