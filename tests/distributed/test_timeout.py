import json
import threading

import pytest

from clusterddp.distributed import timeout
from tests.distributed.meetings import PATIENCE


def test_bounded_gives_up_on_what_does_not_return() -> None:
    with pytest.raises(TimeoutError):
        timeout.bounded(threading.Event().wait, 0.01)
    assert timeout.bounded(lambda: json.dumps(1), PATIENCE) == "1"
    with pytest.raises(ZeroDivisionError):
        timeout.bounded(lambda: 1 // 0, PATIENCE)
