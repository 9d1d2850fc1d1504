"""Records of a run, one JSON file each: their types.

docs/reference/fields.md is made from this module. A missing field has its default. Times are
seconds since the epoch. `events` has the lines of events.jsonl.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from clusterddp.errors import EXIT_STOPPED
from clusterddp.files import Loss
from clusterddp.formatting import duration

ATTEMPT_FORMAT = 1
_MAY_CONTINUE = ("SIGUSR1", "SIGUSR2")
_EXITS_WITHIN = 60.0
"""Time within which a task exits that saves at such a signal and then exits."""
SLOW = 0.8
"""Share of the other ranks' median speed below which a rank is a straggler."""


@dataclass(frozen=True)
class AttemptRecord:
    """attempt.json: the job, the ranks and the checkpoint that the attempt started from."""

    format: int = ATTEMPT_FORMAT
    """Format of the record, so far 1; an attempt with a newer format is not resumed."""
    number: int = 0
    """Number of the attempt, from 1."""
    began: float | None = None
    """Time at which its ranks had met."""
    job_id: str = ""
    """Slurm's job id; empty without a job."""
    restart: int = 0
    """SLURM_RESTART_COUNT."""
    host: str = ""
    """Host of rank 0."""
    pid: int | None = None
    """Process of rank 0."""
    step: int | None = None
    """Step of the checkpoint that the attempt started from; 0 without one."""
    saved: float | None = None
    """Time at which that checkpoint was written."""
    resumed_from: str | None = None
    """Path of that checkpoint, relative to the run's directory if it is inside."""
    agent_starts: int = 0
    """Number of times that an agent started the ranks in the attempt."""
    world_size: int = 0
    """Number of ranks."""
    hosts: tuple[str, ...] = ()
    """Hosts of the ranks."""


@dataclass(frozen=True)
class FinalRecord:
    """end.json: how the ranks of an attempt exited together."""

    cause: str = ""
    """`done` or `stopped`."""
    reason: str = ""
    """`stop`, `signal`, `SIGTERM`, `interrupt` or `time limit`; empty if the training is done."""
    step: int | None = None
    """Step at which they exited."""
    saved: int | None = -1
    """Step of the last checkpoint written; None without one, -1 if not recorded."""
    write_error: str = ""
    """Reason why the checkpoint of the last step could not be written."""


@dataclass(frozen=True)
class Spent:
    """Use of an attempt's time so far, in seconds except `first_step`."""

    first_step: float | None = None
    """Time at which the first step began; None before."""
    training: float = 0.0
    """Steps: reading batches, forward, backward, exchange, update."""
    waiting: float | None = None
    """Part of `training` in which the ranks, on average, waited for others; None if unknown."""
    saving: float = 0.0
    """Time for which checkpoints stopped the training."""


@dataclass(frozen=True)
class PreflightRecord:
    """preflight.json: result of the node checks before an attempt's tasks.

    The file also has the measurements of each node: `nodes`. preflight-full.json, of the ranks' own
    checks, has those of each rank: `ranks`.
    """

    summary: str = ""
    """Result in one line."""
    seconds: float | None = None
    """Seconds from the start of the checks to their end."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Measurements by name of a failed node."""
    remarks: tuple[str, ...] = ()
    """Findings that are not the fault of one node."""
    slow: tuple[str, ...] = ()
    """Failed nodes whose only fault is that they are slower than the others."""
    switches: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Nodes of each leaf switch, if Slurm knows the topology of the network."""


@dataclass(frozen=True)
class Liveness:
    """alive: progress of rank 0, renewed every two seconds."""

    step: int | None = None
    """Completed steps, over all attempts."""
    saved: int | None = None
    """Step of the newest checkpoint."""
    spent: Spent | None = None
    """Use of the time so far; None for a COMMAND."""
    planned: int | None = None
    """Step at which the training will be done; None if unknown."""


@dataclass(frozen=True)
class SlowRank:
    """Rank that was slower than the others for long enough to be reported."""

    rank: int
    """Rank, from 0."""
    host: str = ""
    """Its host, by Slurm's name; empty if not recorded."""
    relative_speed: float = 0.0
    """Its speed, as a share of the other ranks' median speed."""
    seconds: float = 0.0
    """Seconds of training for which it was slow."""
    steps: int = 0
    """Steps in these seconds."""
    first_step: int = 0
    """Step after which it was slow."""
    since: float | None = None
    """Time from which it was slow."""
    until: float | None = None
    """Time from which it kept up again; None if it never did."""

    @property
    def name(self) -> str:
        """Rank with its host: `rank 3 on h02`."""
        return f"rank {self.rank} on {self.host}" if self.host else f"rank {self.rank}"


@dataclass(frozen=True)
class SlowRanks:
    """stragglers.json: ranks that were reported as slow, in the order of the reports."""

    stragglers: tuple[SlowRank, ...] = ()
    """One entry for each period in which a rank was slow."""


@dataclass(frozen=True)
class SlowRun:
    """Period in which a run was slow, with no rank slower than the others."""

    relative_speed: float = 0.0
    """Its rate, relative to the best one in the attempt."""
    seconds: float = 0.0
    """Seconds of training and saving for which it was slow."""
    steps: int = 0
    """Steps in these seconds."""
    first_step: int = 0
    """Step after which it was slow."""
    since: float | None = None
    """Time from which it was slow."""
    until: float | None = None
    """Time from which it was as fast as before; None if it never was."""
    changes: str = ""
    """What takes longer in a step than at the best rate."""

    def describe(self) -> str:
        """Return its speed, duration and changes in one line."""
        end = "" if self.until is None else ", then recovered"
        return (
            f"{self.relative_speed:.0%} of its best rate for {duration(self.seconds)} "
            f"({self.steps:,} steps from step {self.first_step:,}){end}: {self.changes}"
        )


@dataclass(frozen=True)
class SlowRuns:
    """slow-run.json: periods in which all ranks were slow, in the order of the reports."""

    periods: tuple[SlowRun, ...] = ()
    """The periods."""


@dataclass(frozen=True)
class StopRequest:
    """stop: request to save a checkpoint and exit; an empty file if the batch script made it."""

    reason: str = ""
    """`stop` (the user), `signal` (a launcher); empty from the batch script."""


@dataclass(frozen=True)
class TaskError:
    """Exception that ended a task."""

    type: str = ""
    """Name of the exception; empty for an error of this package."""
    message: str = ""
    """Message of the exception."""
    peer_lost: bool = False
    """True if it only follows from the end of another rank."""
    of_command: bool = False
    """True if it was reconstructed from a command's output, not caught."""
    code: str = ""
    """Error code, if it is an error of this package."""


@dataclass(frozen=True)
class NestedWorld:
    """World that the children of one task formed, separate from the run's."""

    size: int = 0
    """Number of its ranks."""
    launcher: str = ""
    """Program that started its ranks: `torchrun`; empty if not known."""


@dataclass(frozen=True)
class Collective:
    """Collective call that a failed rank had not completed, from its dump of the flight recorder.

    One for each process group of the rank; without an open call, only `last` is known.
    """

    group: str
    """Process group: its number, and its description if it has one."""
    size: int = 0
    """Ranks of the group; 0 if unknown."""
    last: int = 0
    """Number of the latest call in this group; 0 before the first."""
    open: int = 0
    """Number of the earliest call that is not completed; 0 without one."""
    call: str = ""
    """That call: `all_reduce [[1048576]] Float`."""
    place: str = ""
    """Line of the program that made it: `step (train.py:31)`; empty if unknown."""


@dataclass(frozen=True)
class ReceivedSignal:
    """Latest signal that a task received and did not ignore; one that ends it has precedence."""

    signal: str
    """Its name, for example `SIGTERM`."""
    time: float
    """Time at which it arrived."""


@dataclass(frozen=True)
class Outcome:
    """outcomes/node-HOST.N.json holds one for each rank of a host: how it ended.

    N is the network namespace. A rank writes rank-R.json if that file cannot be written.
    """

    rank: int
    """Rank, from 0."""
    local_rank: int
    """Rank within its node, from 0."""
    node_rank: int
    """Number of its node within the job, from 0."""
    host: str
    """Its host, by Slurm's name."""
    pid: int
    """Its process on that host; the container runtime's if only its parent was known."""
    job_id: str
    """Slurm's job id; empty without a job."""
    restart: int
    """SLURM_RESTART_COUNT; 0 without a job."""
    step_id: str
    """Slurm's id of the step within the job; empty without one."""
    started: float
    """Time at which the task started."""
    ended: float | None = None
    """Time of its end; None while it runs, or if its parent was killed too."""
    exit_code: int | None = None
    """Its exit code, 128 + N for signal N; None until it has ended."""
    signal: str | None = None
    """Signal that ended it, for example `SIGKILL`; None without one."""
    error: TaskError | None = None
    """Exception that ended it; None if none is known."""
    hung: str = ""
    """Place at which it kept the others waiting, found by a watchdog (hung.json)."""
    ticks: int | None = None
    """Start time of its process in kernel ticks, which identifies it if its id is reused."""
    python: str = ""
    """Interpreter of its parent, which can run clusterddp on its host."""
    clock_ahead: float | None = None
    """Seconds by which its host's clock is ahead of rank 0's, if measured (clocks.json)."""
    step: int | None = None
    """Steps of the run that were done at its end; None if the rank has not said so."""
    nested_world: NestedWorld | None = None
    """World that its children formed on their own."""
    received_signal: ReceivedSignal | None = None
    """Signal that asked it to save or end; None without one, or if it ignores them."""
    continued: float | None = None
    """Time at which it last continued after a stop, for example by `scontrol suspend`."""
    agent_restarts: int = 0
    """Restarts by its torchrun agent."""
    written: float = 0.0
    """Time at which a parent wrote it; a rank can have an older one elsewhere."""
    listened: bool | None = None
    """For rank 0 of a COMMAND with torch: whether it, or any process on MASTER_PORT, listened for
    other ranks; None if not checked."""
    collectives: tuple[Collective, ...] = ()
    """Its collective calls, if its end left a dump of the flight recorder."""

    @property
    def failed(self) -> bool:
        """True if it ended with a failure."""
        return self.exit_code is not None and self.exit_code not in (0, EXIT_STOPPED)

    @property
    def left_early(self) -> bool:
        """True if it exited with code 0 because of a signal.

        A task that continues for more than a minute after USR1 or USR2 has only saved.
        """
        if self.received_signal is None or self.ended is None or self.exit_code != 0:
            return False
        continues = (
            self.received_signal.signal in _MAY_CONTINUE
            and self.ended - self.received_signal.time > _EXITS_WITHIN
        )
        return not continues

    @property
    def stopped(self) -> bool:
        """True if it saved and exited on request, or asks for a restart."""
        return self.exit_code == EXIT_STOPPED

    @property
    def peer_lost(self) -> bool:
        """True if it failed because of another rank, by its own record."""
        return bool(self.error and self.error.peer_lost)

    @property
    def of_command(self) -> bool:
        """True if its error was reconstructed from a command's output."""
        return bool(self.error and self.error.of_command)

    @property
    def reason(self) -> str:
        """Reason of its end, in a few words."""
        if self.hung:
            return f"hung: {self.hung}"
        if self.error:
            return f"{self.error.type}: {_first_line(self.error.message)}".strip(": ")
        if self.signal:
            return f"killed by {self.signal}"
        if self.exit_code is None:
            return "left no record of its end"
        if self.exit_code == 0:
            return "exit code 0 before the others were done"
        return f"exit code {self.exit_code}"


def _first_line(message: str) -> str:
    """Return the first line of an error, and those after it that a colon announces."""
    lines = [line.strip() for line in message.strip().splitlines() if line.strip()]
    return " ".join(announced(lines))


def announced(lines: Sequence[str]) -> Sequence[str]:
    """Return the first line, and those after it that a colon at the end of each announces."""
    last = next((n for n, line in enumerate(lines) if not line.endswith(":")), len(lines) - 1)
    return lines[: last + 1]


@dataclass(frozen=True)
class HungRanks:
    """outcomes/hung.json: ranks that keep the others waiting, and where."""

    ranks: tuple[int, ...] = ()
    """These ranks; empty if unknown."""
    reason: str = ""
    """Place at which they are, or what the others wait for."""
    ended: bool = False
    """True if the job was ended because of it, after which the ranks' ends say nothing."""


@dataclass(frozen=True)
class StalledOutput:
    """stalled.json: the ranks of a COMMAND printed nothing for --hang-timeout."""

    since: float | None = None
    """Time from which they printed nothing."""
    output_bytes: int = 0
    """Size of their output then; the record is void once there is more."""
    ranks: tuple[int, ...] = ()
    """Ranks that were at another place than most; empty if that is uncertain."""
    places: str = ""
    """Code location of these ranks, then that of most ranks."""


@dataclass(frozen=True)
class ClaimHolder:
    """resume-NNNN.claim: the process that resumes, cleans or removes a run, while it does."""

    host: str = ""
    """Host of the process."""
    pid: int | None = None
    """Process id on that host."""
    time: float | None = None
    """Time at which it began."""


@dataclass(frozen=True)
class Agreement:
    """resolved.json: settings of all ranks in one attempt, with every `auto` resolved."""

    backend: str = ""
    """`nccl` or `gloo`."""
    kind: str = ""
    """`cuda` or `cpu`."""
    threads: int = 0
    """Compute threads of each rank."""
    world_size: int = 0
    """Number of ranks."""
    precision: str = "fp32"
    """`fp32`, `tf32`, `bf16` or `fp16`."""
    cuda_graph: bool = False
    """True where the step is captured into a graph."""
    hosts: tuple[str, ...] = ()
    """Hosts in the order of their lowest rank."""
    where: tuple[str, ...] = ()
    """Line for each host: which ranks compute on what."""
    warnings: tuple[str, ...] = ()
    """Warnings of the ranks."""
    run_dir: str = ""
    """Directory of the run."""
    attempt: int = 0
    """Number of the attempt."""
    resume: str = ""
    """Checkpoint from which all ranks resume; empty without one."""
    global_batch_size: int = 0
    """Images per step over all ranks, fixed by the run's first attempt."""
    reference_world_size: int = 0
    """World size of the run's first attempt; the learning rate is scaled to it."""
    data_sha256: str = ""
    """Fingerprint of the dataset's files."""
    lr: float | None = None
    """Peak of the learning rate."""

    @property
    def batch_size(self) -> int:
        """Images per rank and step."""
        return self.global_batch_size // self.world_size


@dataclass(frozen=True)
class AttemptSummary:
    """Attempt of a run, as the next one summarizes it."""

    attempt: int
    """Number of the attempt, from 1."""
    job_id: str = ""
    """Slurm's job id; empty without a job."""
    hosts: tuple[str, ...] = ()
    """Hosts of its ranks."""
    began: float | None = None
    """Time at which its ranks had met."""
    first_step: int | None = None
    """Step of the checkpoint from which it started."""
    last_step: int | None = None
    """Step that it reached, to within two seconds if it was killed."""
    cause: str = ""
    """Cause of its end: a value of `Cause`, `killed` if not recorded, empty
    for the latest one."""
    repeated_steps: int = 0
    """Steps of it that the next attempt repeated."""
    lost_seconds: float = 0.0
    """Seconds from the checkpoint that the next attempt resumed until that attempt's ranks met."""
    stragglers: tuple[SlowRank, ...] = ()
    """Ranks that were reported as slow."""
    slowdowns: tuple[SlowRun, ...] = ()
    """Periods in which all ranks were slow."""
    why: str = ""
    """Details of the cause: the rank that failed first, the signal."""

    @property
    def ended(self) -> str:
        """Cause and details: `stopped: interrupt`."""
        return ": ".join(filter(None, (self.cause, self.why)))


@dataclass(frozen=True)
class GpuUse:
    """outcomes/gpus-R.json: use of the GPUs of rank R's node, sampled by NVML.

    Written after about a minute, then about every five minutes and at the end.
    """

    host: str = ""
    """The node."""
    gpus: int = 0
    """Number of GPUs sampled."""
    samples: int = 0
    """Number of samples, one every five seconds."""
    utilization: float = 0.0
    """Mean share of the time in which a kernel ran, over GPUs and samples, from 0 to 1."""
    watts: float = 0.0
    """Mean power draw of a GPU, over GPUs and samples; 0 if unknown."""
    peak_memory_bytes: int = 0
    """Most memory in use on one of the GPUs; 0 if unknown."""


@dataclass(frozen=True)
class SlowNetwork:
    """outcomes/network-R.json: NCCL uses sockets on a node that has a fast network."""

    host: str = ""
    """The node."""
    reason: str = ""
    """Which devices it has, and how to use them."""


@dataclass(frozen=True)
class Usage:
    """Node-hours of all attempts, and how they were used.

    The parts add up to the whole. A part is None if it is not known, for example for a COMMAND
    without a Loop.
    """

    node_hours: float = 0.0
    """Hours times nodes."""
    gpu_hours: float | None = None
    """The same times the GPUs requested per node; None without GPUs."""
    computing: float | None = None
    """Steps that counted, without waiting unless `waiting` is unknown."""
    waiting: float | None = None
    """Time in these steps in which ranks waited for others, averaged over all ranks."""
    startup: float | None = None
    """From the start of the job's attempt to its first step."""
    saving: float | None = None
    """Time for which checkpoints stopped the training."""
    repeated: float | None = None
    """Steps that a later attempt repeated, with their waiting."""
    idle: float | None = None
    """Spare nodes without tasks; None without spare nodes."""
    gpu_utilization: float | None = None
    """Share of the time in which a COMMAND's GPUs were busy; None if not sampled."""
    gpu_watts: float | None = None
    """Mean power draw of one of these GPUs; None if not sampled."""
    gpu_peak_memory_bytes: int | None = None
    """Most memory in use on one of these GPUs; None if not sampled."""
    other: float | None = None
    """Evaluation, metrics, teardown, and everything that no record covers."""


@dataclass(frozen=True)
class RankReport:
    """Rank in a report."""

    rank: int
    """Rank, from 0."""
    images_per_second: float | None = None
    """Throughput outside the time in which it waited for others: the lowest is the slowest."""
    host: str = ""
    """Its host."""
    peak_memory_bytes: int | None = None
    """GPU memory allocated by torch, or the resident set on CPUs."""


@dataclass(frozen=True)
class RankRate:
    """Throughput of one of many ranks."""

    rank: int
    """Rank, from 0."""
    images_per_second: float
    """Throughput outside its waits for others."""


MAX_RATES = 64
"""Ranks whose throughputs are all in a line of metrics."""
_SLOWEST = 8


@dataclass(frozen=True)
class RateSpread:
    """Throughputs of more than 64 ranks in images/s, each outside its waits for others."""

    ranks: int
    """Number of ranks."""
    lowest: float
    """Throughput of the slowest rank."""
    median: float
    """Throughput of the rank in the middle."""
    highest: float
    """Throughput of the fastest rank."""
    slowest: tuple[RankRate, ...] = ()
    """The eight slowest ranks, slowest first."""

    @classmethod
    def of(cls, rates: Sequence[float]) -> "RateSpread | None":
        """Return the spread of the rates by rank; None for so few that each one is recorded."""
        if len(rates) <= MAX_RATES:
            return None
        order = sorted(range(len(rates)), key=rates.__getitem__)
        slowest = tuple(RankRate(rank, rates[rank]) for rank in order[:_SLOWEST])
        lowest, middle, highest = (rates[order[at]] for at in (0, len(order) // 2, -1))
        return cls(len(rates), lowest, middle, highest, slowest)


@dataclass
class SavingReport:
    """Cost of an attempt's checkpoints so far: only copying and waiting stop the training."""

    saves: int = 0
    """Number of checkpoints that were written and verified."""
    failed: int = 0
    """Number of checkpoints that could not be written."""
    copy_seconds: float = 0.0
    """Time for which training waited while the state was copied."""
    blocked_seconds: float = 0.0
    """Time for which training waited for an earlier checkpoint."""
    write_seconds: float = 0.0
    """Time from copied to verified, in parallel with the training."""
    bytes: int = 0
    """Total size of the verified checkpoints."""


@dataclass(frozen=True)
class Report:
    """report.json: results of a run, and its configuration."""

    accuracy: float | None = None
    """Accuracy on the test set, from 0 to 1."""
    loss: Loss | None = None
    """Mean loss over the test set; may be NaN."""
    train_seconds: float | None = None
    """Training steps of all attempts: reading batches, forward, backward, exchange, update."""
    total_seconds: float | None = None
    """Duration of the attempt: imports, rendezvous, data, training, evaluation, saving."""
    capture_seconds: float | None = None
    """Time before the first step, not in train_seconds: a warm-up pass for DDP's buckets or a GPU's
    kernels, and the capture of a CUDA graph."""
    images_per_second: float | None = None
    """Images of all ranks together over train_seconds."""
    world_size: int | None = None
    """Number of ranks."""
    num_nodes: int | None = None
    """Number of nodes on which they ran."""
    hosts: tuple[str, ...] = ()
    """Names of these nodes."""
    backend: str = ""
    """`nccl` or `gloo`."""
    device: str = ""
    """`cuda` or `cpu`."""
    strategy: str = ""
    """`--strategy`: how the ranks train together."""
    threads: int | None = None
    """Compute threads of each rank."""
    precision: str = ""
    """`fp32`, `tf32`, `bf16` or `fp16`."""
    cuda_graph: bool = False
    """True if the step was captured into a graph."""
    model: str = ""
    """`--model`."""
    dataset: str = ""
    """`--dataset`."""
    parameters: int | None = None
    """Number of the model's parameters."""
    steps: int | None = None
    """Completed steps, over all attempts."""
    epochs: int | None = None
    """Epochs begun, over all attempts."""
    train_images: int | None = None
    """Images of the training set."""
    test_images: int | None = None
    """Images of the test set."""
    versions: Mapping[str, str | None] | None = None
    """Versions of python, torch, torchvision (None without it) and clusterddp."""
    warnings: tuple[str, ...] = ()
    """Warnings of the training."""
    peak_memory_bytes: int | None = None
    """Largest of any rank: allocated by torch on its GPU, or resident on a CPU."""
    ranks: tuple[RankReport, ...] = ()
    """Speed and memory by rank."""
    weights_sha256: str = ""
    """SHA-256 of the trained weights."""
    resumed_from: str | None = None
    """Checkpoint from which the attempt resumed."""
    attempt: int | None = None
    """Number of the attempt, from 1."""
    num_attempts: int | None = None
    """Attempts of the run in which ranks met."""
    repeated_steps: int = 0
    """Steps that were repeated after interruptions."""
    lost_seconds: float = 0.0
    """Seconds from each last checkpoint until training continued: repeated work, queue, start."""
    attempts: tuple[AttemptSummary, ...] = ()
    """Attempts of the run, in order."""
    saving: SavingReport | None = None
    """Cost of the checkpoints of this attempt."""
    usage: Usage | None = None
    """Node-hours of all attempts; None if no attempt's start is known."""
    job_id: str = ""
    """Slurm's job id; empty without a job."""
    restart: int = 0
    """SLURM_RESTART_COUNT; 0 without a job."""
    finished: float | None = None
    """Time at which the report was written."""


@dataclass(frozen=True)
class WorstImage:
    """A test image of high loss."""

    index: int
    """Its index in the test set, from 0."""
    label: int
    """Its class, from 0."""
    predicted: int
    """Class predicted by the model."""
    loss: Loss | None = None
    """Loss of this image; may be NaN."""
    shape: tuple[int, ...] = ()
    """(height, width)."""
    pixels: str = ""
    """Grey values, one byte each, row by row, in base64."""


@dataclass(frozen=True)
class EvaluationRecord:
    """evaluation.json: what the test set showed at the end."""

    step: int | None = None
    """Step at which the test set was evaluated."""
    confusion: tuple[tuple[int | None, ...], ...] = ()
    """(classes, classes) counts: a row for each label, a column for each prediction."""
    worst: tuple[WorstImage, ...] = ()
    """Images with the highest loss, in descending order."""


@dataclass(frozen=True)
class MetricsLine:
    """A line of metrics.jsonl."""

    kind: str = ""
    """`train` or `eval`."""
    step: int = -1
    """Completed steps, over all attempts; -1 if not recorded."""
    epoch: int | None = None
    """Epoch of the latest step, from 1."""
    loss: Loss | None = None
    """Mean loss since the last line, or over the test set; may be NaN."""
    accuracy: float | None = None
    """Accuracy over the same, from 0 to 1."""
    lr: float | None = None
    """Learning rate of the next step."""
    images_per_second: float | None = None
    """Throughput of all ranks together."""
    rank_images_per_second: tuple[float | None, ...] = ()
    """Throughput of each rank outside its waits for others; empty in an evaluation."""
    rank_spread: RateSpread | None = None
    """Instead of that for more than 64 ranks: their lowest, median and highest throughput."""
    seconds: float | None = None
    """Seconds of training until then, over all attempts."""
    time: float | None = None
    """Time at which it was written."""

    @property
    def tested(self) -> bool:
        """True if it comes from an evaluation on the test set, not from training."""
        return self.kind == "eval"

    @property
    def ranks(self) -> int:
        """Number of ranks with a throughput."""
        return self.rank_spread.ranks if self.rank_spread else len(self.rank_images_per_second)

    @property
    def rates(self) -> dict[int, float | None]:
        """Throughputs by rank: of all, or of the slowest of many."""
        if self.rank_spread:
            return {each.rank: each.images_per_second for each in self.rank_spread.slowest}
        return dict(enumerate(self.rank_images_per_second))
