"""Plans a comparison and carries it out: which strategies on how many devices, and their runs.

The runs follow one another. On this workstation each is a `clusterddp debug`; as a Slurm job each
waits for the end of the one before.
"""

import dataclasses
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from clusterddp import launchers, log, version
from clusterddp.comparison import results
from clusterddp.comparison.results import Row, RowRun
from clusterddp.errors import ClusterDDPError, RequestError, coded
from clusterddp.formatting import count
from clusterddp.processes import hardware
from clusterddp.processes.group import TaskGroup
from clusterddp.processes.signals import Relay, held_back, send
from clusterddp.ranks.dist_env import MAX_PROCS
from clusterddp.request.resources import Resources
from clusterddp.request.spec import JobSpec
from clusterddp.request.train_config import TrainConfig
from clusterddp.run.run_dir import RunDir
from clusterddp.status.follow import wait_for_end
from clusterddp.status.state import RunState
from clusterddp.status.status import run_status
from clusterddp.submission import submit
from clusterddp.submission.fields import remarks

Planned = list[tuple[Row, JobSpec]]
"""The runs in the order in which they run."""
_ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ON_REQUEST = (
    b"clusterddp: asked the current run to save a checkpoint and exit; Ctrl-C again ends it "
    b"immediately\n"
)


@dataclass(frozen=True)
class Hosts:
    """Hosts on which the rows run."""

    gpus: int
    """Usable GPUs of one host."""
    on_gpus: bool
    """True where ranks compute on GPUs."""
    ranks_per_node: int | None = None
    """Most ranks on one node of a cluster; None on this workstation."""


def plan(
    config: TrainConfig,
    strategies: Sequence[str],
    world_sizes: Sequence[int],
    hosts: Hosts,
    *,
    fixed_global_batch: bool = False,
) -> list[Row]:
    """Plan the rows: single; dp on each number of GPUs above one; ddp on each number of ranks.

    Each device takes the batch of `config`, so that N of them take N times as many images in a
    step; with `fixed_global_batch` they share that batch. Raises RequestError where it does not
    divide, where ranks do not fill their nodes, and where no row is left or could run. No step is a
    CUDA graph, or with `--cuda-graph on` every one; dp, whose step cannot be, is not run then.
    """
    asked = [("single", 1)] if "single" in strategies else []
    asked += [("dp", size) for size in world_sizes if size > 1 and "dp" in strategies]
    asked += [("ddp", size) for size in world_sizes if "ddp" in strategies]
    if not asked:
        raise RequestError(
            f"--strategies {','.join(strategies)} with --world-sizes "
            f"{','.join(map(str, world_sizes))} leaves no row: dp begins at 2 GPUs. [CD0111]"
        )
    rows = [
        Row(
            strategy,
            devices,
            _training(config, strategy, devices, fixed_global_batch),
            _nodes(devices, hosts.ranks_per_node) if strategy == "ddp" else 1,
            _missing(config, strategy, devices, hosts),
        )
        for strategy, devices in asked
    ]
    if all(row.strategy == "dp" and config.cuda_graph == "on" for row in rows):
        raise RequestError(
            "--strategies dp with --cuda-graph on: its step cannot be captured. Use --cuda-graph "
            "off, or compare ddp. [CD0111]"
        )
    if all(row.missing for row in rows):
        needs = "; ".join(f"{results.label(row)} {row.missing}" for row in rows)
        raise RequestError(
            f"there is nothing to compare: {needs}, and {count(hosts.gpus, 'GPU')} can be had. "
            "Ask for more (--gpus-per-node), or compare ranks on the CPU with --device "
            "cpu. [CD0111]"
        )
    return rows


def _training(config: TrainConfig, strategy: str, devices: int, fixed: bool) -> TrainConfig:
    adapted = dataclasses.replace(
        config,
        strategy=strategy,
        sync_batchnorm=config.sync_batchnorm and strategy == "ddp",
        # The same for all rows: auto would capture a single rank's step and no other's.
        cuda_graph="on" if config.cuda_graph == "on" and strategy != "dp" else "off",
    )
    if fixed:
        if config.batch_size % devices:
            raise RequestError(
                f"--fixed-global-batch: --batch-size {config.batch_size} cannot be shared out "
                f"among {devices} devices. Give a multiple of {devices}. [CD0111]"
            )
        if strategy == "ddp":  # the batch of a step is the same, so its rate is as well
            share = config.batch_size // devices
            return dataclasses.replace(adapted, batch_size=share, lr_scaling="none")
    elif strategy == "dp":  # one rank, which scales no rate, cuts its batch among its GPUs
        batch, rate = config.batch_size * devices, config.peak_lr(devices)
        return dataclasses.replace(adapted, batch_size=batch, lr=rate)
    return adapted


def _nodes(ranks: int, per_node: int | None) -> int:
    if per_node is None or ranks <= per_node:
        return 1
    if ranks % per_node:
        raise RequestError(
            f"--world-sizes: {count(ranks, 'rank')} cannot fill nodes of {per_node} evenly. Use "
            f"multiples of {per_node}, or another --tasks-per-node or --gpus-per-node. [CD0105]"
        )
    return ranks // per_node


def _missing(config: TrainConfig, strategy: str, devices: int, hosts: Hosts) -> str:
    if strategy == "dp" and config.cuda_graph == "on":
        return "cannot be captured into a CUDA graph"
    is_one_host = hosts.ranks_per_node is None
    bounded = strategy == "dp" or (hosts.on_gpus and (is_one_host or not hosts.gpus))
    return f"needs {count(devices, 'GPU')}" if bounded and devices > hosts.gpus else ""


def hosts(config: TrainConfig, base: JobSpec | None) -> Hosts:
    """Describe the nodes that `base` requests; without it this host."""
    gpus = 0
    if config.device != "cpu":
        gpus = base.resources.gpus_per_node if base else hardware.visible_gpus()
    ranks_per_node = base.resources.tasks_per_node if base else None
    return Hosts(gpus, config.device == "cuda" or gpus > 0, ranks_per_node)


def powers_of_two(hosts: Hosts) -> list[int]:
    """List 2, 4, 8 … up to the devices of a host, 2 in any case."""
    most = max(hosts.gpus, hosts.ranks_per_node or 0, 2)
    return [2**power for power in range(1, most.bit_length())]


def build_requests(
    rows: Sequence[Row], name: str, root: str, repeat: int, base: JobSpec | None
) -> Planned:
    """Build the requests of all runs: all rows once, then all rows again for each repetition.

    A run is named `NAME-ddp-2`, and `NAME-ddp-2-r3` where each row is repeated.

    base: the request of jobs; None on this workstation.

    Raises RequestError, before any of them runs, for an impossible run or one that exists.
    """
    planned = []
    for turn, row in product(range(1, repeat + 1), [row for row in rows if not row.missing]):
        if base is None and row.ranks > MAX_PROCS:
            raise RequestError(
                f"--world-sizes: {row.ranks} ranks are more than one workstation starts, "
                f"{MAX_PROCS}. Ask for fewer, or add --launcher sbatch. [CD0105]"
            )
        run_name = f"{name}-{row.name}{f'-r{turn}' if repeat > 1 else ''}"
        path = f"{os.path.abspath(root)}/{run_name}"
        if Path(path).exists():
            raise RequestError(
                f"the run {run_name} already exists at {path}. Choose another --run-name. [CD0503]"
            )
        spec = _job(row, run_name, path, base) if base else _here(row, run_name, path)
        planned.append((row, spec))
    if len(planned) > 1 and base is not None:
        with_dependency(base, "1")  # raises now what it would raise for all but the first
    return planned


def _here(row: Row, name: str, path: str) -> JobSpec:
    gpus = row.devices if row.strategy == "dp" else 0  # from which the table reads their number
    resources = Resources(tasks_per_node=row.ranks, gpus_per_node=gpus)
    return JobSpec(name, path, resources, sys.executable, train=row.train, launcher="local")


def _job(row: Row, name: str, path: str, base: JobSpec) -> JobSpec:
    asked, tasks = base.resources, row.ranks // row.nodes
    gpus = row.devices if asked.gpus_per_node else 0
    if row.strategy == "ddp" and gpus:  # several of a rank, or several ranks on one
        gpus = max(tasks * asked.gpus_per_node // asked.tasks_per_node, 1)
    resources = dataclasses.replace(
        asked, nodes=row.nodes, tasks_per_node=tasks, gpus_per_node=gpus
    )
    return dataclasses.replace(
        base, run_name=name, run_dir=path, resources=resources, train=row.train
    )


def with_dependency(spec: JobSpec, job_id: str) -> JobSpec:
    """Add a job whose end the request waits for, as two at once could share a node.

    Raises RequestError where it cannot be added to the request's own dependencies.
    """
    if not job_id:
        return spec
    asked = spec.resources.dependency
    if "?" in asked:
        raise RequestError(
            f"--dependency {asked}: the jobs wait for one another too, which cannot be added to a "
            "list of which any will do ('?'). Give one of which all must be met (','). [CD0103]"
        )
    dependency = ",".join(filter(None, (asked, f"afterany:{job_id}")))
    resources = dataclasses.replace(spec.resources, dependency=dependency)
    return dataclasses.replace(spec, resources=resources)


def log_remarks(planned: Planned) -> None:
    """Log the remarks on the rows' requests, each once."""
    for remark in dict.fromkeys(remark for _, spec in planned for remark in remarks(spec)):
        log.warning(coded(remark, "CD0112"))


def dry_run(
    rows: Sequence[Row], planned: Planned, base: JobSpec | None, template_folder: Path | None
) -> Iterator[str]:
    """Yield the commands or scripts that would be started, each below a line that names it."""
    yield from (f"# {results.label(row)}: not run: {row.missing}" for row in rows if row.missing)
    for number, (row, spec) in enumerate(planned, 1):
        yield f"# [{number}/{len(planned)}] {results.label(row)}: {spec.run_name}"
        if base is None:
            hidden = [f"{name}={value}" for name, value in _some_gpus(row).items()]
            yield shlex.join([*hidden, *_argv(row, spec)])
            continue
        before = str(number - 1) if number > 1 else ""
        if before:
            yield f"# for afterany:{before} in it: the job id of [{before}/{len(planned)}]"
        sent = with_dependency(spec, before)
        yield launchers.load(sent.launcher).prepare(sent, template_folder).removesuffix("\n")


def train_here(planned: Planned) -> tuple[list[RowRun], int]:
    """Train one after the other, as two at once would share the machine.

    Returns the result of each, and the signal that asked for an end, or 0. Such a signal is passed
    on to the run that trains; the runs after it are not run. Raises RequestError when a run's
    directory cannot be made.
    """
    trials = []
    under_way = _UnderWay()
    with Relay(_ASKING, under_way.pass_on) as relay:
        relay.listen()
        for number, (row, spec) in enumerate(planned, 1):
            if relay.number:
                trials.append(RowRun(row, why=results.INTERRUPTED))
                continue
            which = f"[{number}/{len(planned)}] {results.label(row)}"
            log.info(f"{which} …")
            trials.append(_train(row, spec, under_way))
            log.info(f"{which}: {results.figures(trials[-1])}")
    return trials, relay.number


def _train(row: Row, spec: JobSpec, under_way: "_UnderWay") -> RowRun:
    with RunDir.create(spec, None) as run:
        # Each of several ranks has its own log, and debug prints a copy of rank 0's.
        log = run.rank_log(0) if row.ranks == 1 else run.job_log
        with TaskGroup() as group:
            with held_back(_ASKING):  # until it can be passed on
                group.start(_argv(row, spec), _environment(row), log)
                under_way.group = group
            [code] = group.wait()
        result = results.trial(row, run, run_status(run, {}))
    if code and under_way.requests:
        return RowRun(row, run.name, results.INTERRUPTED)
    # Before its start, or after its recorded end.
    if code and result.state in (RunState.CREATED, RunState.DONE):
        why = results.last_words(run) or f"exit code {code}"
        return RowRun(row, run.name, RunState.FAILED, why)
    return result


def _argv(row: Row, spec: JobSpec) -> list[str]:
    debug = [*version.command(), "debug", f"--procs={row.ranks}"]
    return [*debug, *row.train.to_argv(), f"--run-dir={spec.run_dir}"]


def _environment(row: Row) -> dict[str, str]:
    """Return our environment without settings or site.cfg: the command line carries all values."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CLUSTERDDP_")}
    return {**kept, "CLUSTERDDP_SITE": os.devnull, "PYTHONUNBUFFERED": "1", **_some_gpus(row)}


def _some_gpus(row: Row) -> dict[str, str]:
    """Show DataParallel, which takes every visible GPU, no more than its row has."""
    if row.strategy != "dp":
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = visible.split(",") if visible else [str(index) for index in range(row.devices)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[: row.devices])}


class _UnderWay:
    """Passes a request to stop on to the run that trains now."""

    group: TaskGroup | None = None
    requests = 0

    def pass_on(self, number: int, _earlier: int) -> None:
        """Ask the run to stop; the third time, kill it."""
        self.requests += 1
        if self.group is None:
            return
        if self.requests == 1:
            with suppress(OSError):
                os.write(sys.stderr.fileno(), _ON_REQUEST)  # a signal handler must not print
        if self.requests > 2:  # its ranks die with it
            self.group.signal_all(signal.SIGKILL)
        else:
            send(number, self.group.pids)


class Interrupted(Exception):
    """A Ctrl-C interrupted the wait for the jobs of these runs, which may still run."""

    def __init__(self, runs: Sequence[RunDir]) -> None:
        self.runs = runs


def train_as_jobs(
    planned: Planned, template_folder: Path | None, snapshot_limit_mb: float, *, force: bool
) -> list[RowRun]:
    """Submit all and wait for their ends; returns the result of each.

    force: also where no partition can give what is asked for.

    The caller has prepared the dataset, which all of them read. A job that is refused after
    another was queued is a failed row. Raises RequestError or SlurmError when the first cannot be
    queued, and Interrupted after a Ctrl-C.
    """
    trials: list[RowRun] = []
    try:
        refused = _submit(planned, template_folder, snapshot_limit_mb, force=force)
        for number, (row, spec) in enumerate(planned, 1):
            which = f"[{number}/{len(planned)}] {results.label(row)}"
            if spec.run_name in refused:
                trials.append(refused[spec.run_name])
            else:
                log.info(f"{which} …")
                run = RunDir(Path(spec.run_dir))
                trials.append(results.trial(row, run, wait_for_end(run)))
            log.info(f"{which}: {results.figures(trials[-1])}")
    except KeyboardInterrupt:
        left = [RunDir(Path(spec.run_dir)) for _, spec in planned[len(trials) :]]
        raise Interrupted([run for run in left if run.path.is_dir()]) from None
    return trials


def _submit(
    planned: Planned, template_folder: Path | None, snapshot_limit_mb: float, *, force: bool
) -> dict[str, RowRun]:
    """Submit all; returns those that were refused, by the names of their runs."""
    refused = {}
    before = ""
    for row, request in planned:
        spec = with_dependency(request, before)
        script = launchers.load(spec.launcher).prepare(spec, template_folder)
        try:
            _, submission = submit.submit(
                spec, script, snapshot_limit_mb=snapshot_limit_mb, force=force, inputs_checked=True
            )
        except ClusterDDPError as error:
            if not before:
                raise
            why = f"not submitted: {error}".partition("\n")[0]
            refused[spec.run_name] = RowRun(row, state=RunState.FAILED, why=why)
        else:
            before = submission.job_id
    return refused
