"""Durations of options: their texts, their seconds, and both ways between them."""

import math
from datetime import timedelta

import pytest

from clusterddp import formatting
from clusterddp.errors import OptionError
from clusterddp.request.options import DURATION, DURATION_OR_NEVER, Duration, Option
from clusterddp.request.spec import OPTIONS
from clusterddp.request.train_config import TrainConfig
from tests.hostile import CARRIED, REFUSED

ROWS = [row for row in OPTIONS.values() if isinstance(row.form, Duration)]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("30s", 30), ("10m", 600), ("24h", 86400), ("7d", 604800), ("10000d", 864000000)),
        *(("007m", 420), ("1.5h", 5400), ("0.5s", 0.5), ("0.001s", 0.001), ("60m", 3600)),
        # What clusterddp prints of times that it has measured is read as well.
        *(("12m05s", 725), ("3h07m", 11220), ("2d04h", 187200), ("1d1h1m1.5s", 90061.5)),
    ],
)
def test_a_text_has_seconds(text: str, seconds: float) -> None:
    for form in (DURATION, DURATION_OR_NEVER):
        assert form.parse("--x", text) == seconds
        assert form.parse("--x", formatting.setting(seconds)) == seconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((0, "0"), (1, "1s"), (60, "60s"), (90, "90s"), (120, "2m"), (300, "5m")),
        *((3600, "60m"), (5400, "90m"), (7200, "2h"), (86400, "24h"), (90000, "25h")),
        *((172800, "2d"), (604800, "7d"), (0.5, "0.5s"), (1 / 3, "0.333s"), (60.0, "60s")),
    ],
)
def test_a_duration_is_shown_as_it_is_typed(seconds: float, text: str) -> None:
    assert formatting.setting(seconds) == text


@pytest.mark.parametrize("text", ["30", "0.5", "007", "999999999"])
def test_a_number_without_a_unit_is_refused_with_what_to_type(text: str) -> None:
    with pytest.raises(OptionError) as caught:
        DURATION_OR_NEVER.parse("--hang-timeout", text)
    words = f"--hang-timeout: {text!r} is not a valid duration. "
    words += "Use 0, or a number with s, m, h or d: 30s, 10m, 24h, 7d."
    assert (str(caught.value).strip(), caught.value.code) == (words, "CD0102")


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "s", "1", "-1s", "+1s", "- 1s", "1 s", " 1s", "1s ", "1s\n", "1S", "1M", "1H"),
        *("1D", "1w", "1y", "1ms", "1min", "1sec", "1 hour", "10minutes", "1e3s", "1,5h", ".5h"),
        *("1.h", "1.5.5h", "1s1m", "1m1m", "1h30", "1:30", "00:30:00", "UNLIMITED", "never"),
        *(
            "nan",
            "nans",
            "inf",
            "infs",
            "-inf",
            "\u0661s",
            "\uff11s",
            "1\u00b2s",
            "0x10s",
            "1_0s",
            "1234567890s",
        ),
        *CARRIED,
        *REFUSED,
    ],
)
def test_any_other_text_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match=r"^--x: .* is not a valid duration\. Use 0, or a number"):
        DURATION_OR_NEVER.parse("--x", text)
    assert text == "1" or formatting.seconds(text) is None


def test_zero_is_for_options_that_can_be_off() -> None:
    for text in ("0", "0s", "0d", "0.0s"):
        assert DURATION_OR_NEVER.parse("--x", text) == 0
        with pytest.raises(OptionError, match=r"^--x: 0 is out of range\. Use 0\.001s to 10000d\."):
            DURATION.parse("--x", text)


@pytest.mark.parametrize(
    "value", [-1, -0.5, 0.0001, 864000001, 1e308, math.nan, math.inf, -math.inf, True, "30s", None]
)
def test_seconds_out_of_range_are_refused(value: float) -> None:
    with pytest.raises(
        OptionError, match=r"^--x: .* is out of range\. Use 0\.001s to 10000d, or 0\."
    ):
        DURATION_OR_NEVER.check("--x", value)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_an_option_takes_a_text_seconds_or_a_timedelta(row: Option) -> None:
    assert row.parse("2h") == row.parse(7200) == row.parse(timedelta(hours=2)) == 7200
    assert (row.text(7200), row.text(None), row.metavar) == ("2h", None, "DURATION")
    for wrong in (True, [30], {"hours": 1}):
        with pytest.raises(OptionError, match=row.flag):
            row.parse(wrong)


def test_a_task_gets_durations_with_their_units() -> None:
    config = TrainConfig(rendezvous_timeout=90, process_group_timeout=0.5)
    argv = config.to_argv(defaults=False)
    assert argv == ["--rendezvous-timeout=90s", "--process-group-timeout=0.5s"]
