import pytest

from clusterddp.errors import RequestError
from clusterddp.launchers import submitit
from tests.request.test_spec import spec as job


def test_a_submitit_without_the_private_function_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen in submitit 1.5.4: `_make_sbatch_string` gives the text that its executor sends."""
    spec = job(launcher="submitit")
    assert "submitit.core._submit" in submitit.prepare(spec, None)
    monkeypatch.delattr("submitit.slurm.slurm._make_sbatch_string")
    with pytest.raises(RequestError, match=r"no _make_sbatch_string.*Install submitit 1\.5\.4"):
        submitit.prepare(spec, None)


def test_a_container_is_refused() -> None:
    with pytest.raises(RequestError, match="use --launcher sbatch with --container-image"):
        submitit.prepare(job(launcher="submitit", container_image="/a.sif"), None)
