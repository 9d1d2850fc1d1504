import pytest

from clusterddp.errors import TrainingError
from clusterddp.training.rendezvous import open_store
from clusterddp.training.seal import Seal
from tests.training.meetings import NONCE, PATIENCE, RUN_A, env


def test_an_empty_nonce_is_no_nonce_and_refused(port: int) -> None:
    with pytest.raises(TrainingError, match="CLUSTERDDP_NONCE is empty"):
        open_store(env(0, 2, port), {"CLUSTERDDP_NONCE": ""}, PATIENCE)


def test_a_traceback_does_not_show_the_nonce() -> None:
    assert NONCE not in repr(Seal.from_environ(RUN_A))
