import pytest

from clusterddp.distributed.rendezvous import open_store
from clusterddp.distributed.seal import Seal
from clusterddp.errors import TrainingError
from tests.distributed.meetings import NONCE, PATIENCE, RUN_A, env


def test_an_empty_nonce_is_no_nonce_and_refused(port: int) -> None:
    with pytest.raises(TrainingError, match="CLUSTERDDP_NONCE is empty"):
        open_store(env(0, 2, port), {"CLUSTERDDP_NONCE": ""}, PATIENCE)


def test_a_traceback_does_not_show_the_nonce() -> None:
    assert NONCE not in repr(Seal.from_environ(RUN_A))
