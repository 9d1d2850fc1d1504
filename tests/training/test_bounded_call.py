import json
import threading

import pytest

from clusterddp.training import bounded_call
from tests.training.meetings import PATIENCE


def test_bounded_gives_up_on_what_does_not_return() -> None:
    with pytest.raises(TimeoutError):
        bounded_call.bounded(threading.Event().wait, 0.01)
    assert bounded_call.bounded(lambda: json.dumps(1), PATIENCE) == "1"
    with pytest.raises(ZeroDivisionError):
        bounded_call.bounded(lambda: 1 // 0, PATIENCE)
