"""Signals to the process that unpacks on a node."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterddp.cli.commands.stage import command
from clusterddp.staging import node

_NUMBERS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def kept() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in _NUMBERS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def stage(monkeypatch: pytest.MonkeyPatch, *numbers: signal.Signals) -> None:
    """Unpack, and get signals meanwhile."""

    def unpack(*_: object) -> bool:
        for number in numbers:
            signal.raise_signal(number)
        return True

    monkeypatch.setattr(node, "unpack", unpack)
    assert command.callback
    command.callback(Path("a.tar"), Path("copy"), 0, None)


def test_signals_to_the_tasks_do_not_end_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stage(monkeypatch, *_NUMBERS[:-1])
    assert json.loads(capsys.readouterr().out)["unpacked"]


def test_sigterm_ends_it_as_an_exception_so_that_no_draft_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(SystemExit) as ended:
        stage(monkeypatch, signal.SIGTERM)
    assert ended.value.code == 143
