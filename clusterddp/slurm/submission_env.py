"""The environment that a new job is submitted from."""

from collections.abc import Mapping

from clusterddp.slurm.forms import NONCE_VARIABLE, RANK_VARIABLES

# Which Slurm to speak to, and with whose key: a login shell has these as well.
_CONFIGURATION = {
    "SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_SACK_JWKS",
    "SLURM_SACK_KEY",
}  # fmt: skip
_JOB_PREFIXES = (
    "SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SALLOC_", "PMI", "TORCHELASTIC_", "OMPI_COMM_WORLD_",
)  # fmt: skip
# Slurm sets them in a job that was given devices; elsewhere they are the person's own choice.
_DEVICE_VARIABLES = {
    "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK",
}  # fmt: skip


def submission_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment in which sbatch runs: what a login shell would hand to it.

    SBATCH_* would override the script's directives, and the SLURM_* and rank variables of a
    surrounding job would reach the new one (an inherited SLURM_CPU_BIND crowds its tasks).
    """
    in_job = "SLURM_JOB_ID" in environ
    return {
        name: value
        for name, value in environ.items()
        if name in _CONFIGURATION
        or not (
            name.startswith(_JOB_PREFIXES)
            or name in RANK_VARIABLES
            or (in_job and name in _DEVICE_VARIABLES)
            or name == NONCE_VARIABLE
        )
    }
