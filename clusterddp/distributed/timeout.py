"""A call that may never return: how long it is waited for."""

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def bounded(call: Callable[[], T], seconds: float) -> T:
    """Return what `call` returns; raise TimeoutError when it takes longer, leaving it behind.

    It runs in a thread of its own, so that Ctrl-C works while torch waits in C++.
    """
    outcome: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:  # handed to the caller below
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if failure:
        raise failure[0]
    if not outcome:
        raise TimeoutError
    return outcome[0]
