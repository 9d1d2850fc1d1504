"""`clusterddp explain`: one page, the list, words, and a code that there is not."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from clusterddp.cli.main import cli
from clusterddp.errors import RequestError
from clusterddp.explained import catalogue


def explained(*argv: str) -> str:
    return CliRunner().invoke(cli, ["explain", *argv], catch_exceptions=False).stdout


def test_a_code_is_explained() -> None:
    shown = explained("CD0401")
    assert shown.startswith("CD0401: Slurm does not respond")
    assert "\nCause: " in shown and "scontrol ping" in shown and "\nRemedy: " in shown
    assert "```" not in shown


def test_all_codes_are_listed_by_subject() -> None:
    lines = explained().splitlines()
    assert lines[0] == "Request and options"
    assert {line.split()[0] for line in lines if line.startswith("  CD")} == set(catalogue())


def test_words_list_the_pages_that_have_them_all() -> None:
    shown = explained("network-interface", "nodes")
    assert "CD0903  Rank 0 does not respond" in shown and "CD0401" not in shown


def test_a_word_is_looked_for_where_one_begins() -> None:
    assert explained("oom").startswith("CD1211: ")  # and not where there is no room
    assert "CD1211" in explained("KILL", "memor")


def test_several_codes_are_explained_in_their_order() -> None:
    shown = explained("cd1212", "CD0401")
    assert shown.startswith("CD1212: ") and "\n\nCD0401: " in shown


def test_a_code_that_there_is_not_is_refused_with_what_to_type() -> None:
    for code in ("CD0498", "CD9999"):
        with pytest.raises(RequestError, match=f"there is no code {code}. .*: clusterddp explain"):
            explained(code)
    with pytest.raises(RequestError, match=r"no page contains 'CD0401 CD0499'"):
        explained("CD0401", "CD0499")


def test_the_file_that_a_run_carries_says_that_it_has_no_pages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("clusterddp.explained.FOLDER", tmp_path)
    catalogue.cache_clear()
    try:
        with pytest.raises(RequestError, match="clusterddp has no error pages"):
            explained("CD0401")
    finally:
        catalogue.cache_clear()


@pytest.mark.parametrize("asked", ["498", "exit code 498", "no page has these"])
def test_words_and_numbers_that_are_nowhere_lead_to_troubleshooting(asked: str) -> None:
    with pytest.raises(RequestError, match=rf"^no page contains '{asked}'.*troubleshooting"):
        explained(*asked.split())


def test_a_number_that_is_no_code_is_looked_for_as_a_word() -> None:
    assert "CD1208" in explained("exit", "75") and "CD1208" in explained("75")
    assert "CD1208" not in explained("5")


def test_json_has_the_sections() -> None:
    [page] = json.loads(explained("CD1212", "--json"))
    assert set(page) == {"code", "subject", "title", "cause", "check", "remedy", "example"}
    assert page["code"] == "CD1212" and "--batch-size" in page["remedy"]
