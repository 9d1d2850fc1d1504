"""The submitter's SBATCH_* variables: settings below CLUSTERDDP_*, above site.cfg.

sbatch would let them override the script's own directives, so they are read here, rendered, and
scrubbed from the submission (`slurm.environment`). The names are those of sbatch(1).
"""

import re
from collections.abc import Mapping

from clusterddp.errors import RequestError
from clusterddp.request.spec import EXPEDITE

# Those that an option here stands for; GPUs asked for by SBATCH_GRES become one too.
SETTINGS = {
    "SBATCH_ACCOUNT": "account",
    "SBATCH_CONSTRAINT": "constraint",
    "SBATCH_EXCLUSIVE": "exclusive",
    "SBATCH_EXPORT": "export",
    "SBATCH_GPUS_PER_NODE": "gpus-per-node",
    "SBATCH_JOB_NAME": "job-name",
    "SBATCH_MEM_PER_NODE": "mem",
    "SBATCH_PARTITION": "partition",
    "SBATCH_QOS": "qos",
    "SBATCH_REQUEUE": "requeue",
    "SBATCH_RESERVATION": "reservation",
    "SBATCH_SIGNAL": "signal",
    "SBATCH_TIMELIMIT": "time",
}
# Those that become a directive of their own.
DIRECTIVES = {
    "SBATCH_ACCTG_FREQ": "acctg-freq",
    "SBATCH_BATCH": "batch",
    "SBATCH_CLUSTERS": "clusters",
    "SBATCH_CONTAINER": "container",
    "SBATCH_CORE_SPEC": "core-spec",
    "SBATCH_CPU_FREQ_REQ": "cpu-freq",
    "SBATCH_CPUS_PER_GPU": "cpus-per-gpu",
    "SBATCH_DELAY_BOOT": "delay-boot",
    "SBATCH_DISTRIBUTION": "distribution",
    "SBATCH_GPU_BIND": "gpu-bind",
    "SBATCH_GPU_FREQ": "gpu-freq",
    "SBATCH_GRES": "gres",
    "SBATCH_GRES_FLAGS": "gres-flags",
    "SBATCH_HINT": "hint",
    "SBATCH_MEM_BIND": "mem-bind",
    "SBATCH_MEM_PER_CPU": "mem-per-cpu",
    "SBATCH_MEM_PER_GPU": "mem-per-gpu",
    "SBATCH_NETWORK": "network",
    "SBATCH_NO_KILL": "no-kill",
    "SBATCH_OVERCOMMIT": "overcommit",
    "SBATCH_POWER": "power",
    "SBATCH_PROFILE": "profile",
    "SBATCH_REQ_SWITCH": "switches",
    "SBATCH_SPREAD_JOB": "spread-job",
    "SBATCH_THREAD_SPEC": "thread-spec",
    "SBATCH_THREADS_PER_CORE": "threads-per-core",
    "SBATCH_USE_MIN_NODES": "use-min-nodes",
    "SBATCH_WAIT_ALL_NODES": "wait-all-nodes",
    "SBATCH_WCKEY": "wckey",
}
_BARE = {"no-kill", "overcommit", "spread-job", "use-min-nodes"}
_GPU_GRES = re.compile(r"(?:gres[:/])?gpu(?::(?P<type>[^:,=]+))??(?:[:=](?P<count>\d+))?")


def settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that stand for an option, by the option's name."""
    found = {key: environ[name] for name, key in SETTINGS.items() if name in environ}
    if "exclusive" in found:
        if found["exclusive"] not in ("", "exclusive"):
            raise RequestError(
                f"SBATCH_EXCLUSIVE={found['exclusive']}: only whole nodes can be asked for here; "
                "unset it, or use --exclusive."
            )
        found["exclusive"] = "yes"  # sbatch takes the variable's being there as a yes
    # sbatch takes these two by their being there as well (a newer one heeds the word expedite);
    # the second of them wins.
    if "requeue" in found:
        found["requeue"] = EXPEDITE if found["requeue"].lower() == EXPEDITE else "yes"
    if "SBATCH_NO_REQUEUE" in environ:
        found["requeue"] = "no"
    gpus = _GPU_GRES.fullmatch(environ.get("SBATCH_GRES", ""))
    if gpus:
        kind = f"{gpus['type']}:" if gpus["type"] else ""
        found.setdefault("gpus-per-node", f"{kind}{gpus['count'] or 1}")
        found["gpu-request"] = "gres"
    return found


def variable_of(key: str, environ: Mapping[str, str]) -> str | None:
    """The variable that a setting comes from; None when none is set."""
    for name, setting in SETTINGS.items():
        if setting == key and name in environ:
            return name
    if key == "requeue" and "SBATCH_NO_REQUEUE" in environ:
        return "SBATCH_NO_REQUEUE"
    return "SBATCH_GRES" if key in settings(environ) else None


def directives(environ: Mapping[str, str]) -> dict[str, str | None]:
    """The variables that become a directive of their own, by its name."""
    found = {
        directive: None if directive in _BARE else environ[name]
        for name, directive in DIRECTIVES.items()
        if name in environ
    }
    gres = found.get("gres")
    if gres and _GPU_GRES.fullmatch(gres):
        del found["gres"]
    elif gres and "gpu" in gres:
        raise RequestError(
            f"SBATCH_GRES={gres}: unset it, and ask for the GPUs with --gpus-per-node and for the "
            "rest with --sbatch gres=…"
        )
    return found


def left_out(environ: Mapping[str, str]) -> list[str]:
    """The SBATCH_* variables that have no part in a submission from here."""
    return sorted(
        name
        for name in environ
        if name.startswith("SBATCH_") and name not in {*SETTINGS, *DIRECTIVES, "SBATCH_NO_REQUEUE"}
    )
