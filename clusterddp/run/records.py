"""Records of a run, one JSON file each: their types, whoever has written them.

docs/records.md says what each field means, and since which version. What a record does not say has
the field's default. Times are seconds since the epoch. `events` has the lines of events.jsonl.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from clusterddp.errors import EXIT_PAUSED
from clusterddp.files import Loss

ATTEMPT_FORMAT = 1
_MAY_GO_ON = ("SIGUSR1", "SIGUSR2")
_LEAVES_WITHIN = 60.0
"""Seconds in which a task that saves at such a signal, and then leaves, has left."""
SLOW = 0.8
"""Share of the other ranks' median speed below which a rank is a straggler."""


@dataclass(frozen=True)
class AttemptRecord:
    """attempt.json: who trains, and from which checkpoint."""

    format: int = ATTEMPT_FORMAT
    """Format of the record, 1 so far; an attempt of a newer one is not resumed."""
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
    """Step of the checkpoint from which the attempt started; 0 without one."""
    saved: float | None = None
    """Time at which that checkpoint was written."""
    resumed_from: str | None = None
    """Path of that checkpoint, relative to the run's directory where it lies there."""
    starts_in_job: int = 0
    """Times that an agent has started the ranks within the attempt."""
    world_size: int = 0
    """Number of ranks."""
    hosts: tuple[str, ...] = ()
    """Hosts of the ranks."""


@dataclass(frozen=True)
class FinalRecord:
    """end.json: how the ranks of an attempt left together."""

    cause: str = ""
    """`done` or `stopped`."""
    reason: str = ""
    """Request by which they were stopped; empty where the training is done."""
    step: int | None = None
    """Step at which they left."""
    saved: int | None = -1
    """Step of the last checkpoint that was written; None without one, -1 where it is not said."""
    write_error: str = ""
    """Reason for which the checkpoint of the last step could not be written."""


@dataclass(frozen=True)
class Spent:
    """Use of an attempt's time so far; seconds but for `first_step`."""

    first_step: float | None = None
    """Time at which the first step began; None before."""
    training: float = 0.0
    """Steps: reading batches, forward, backward, exchange, update."""
    waiting: float | None = None
    """Part of `training` in which the ranks, on average, waited for others; None where unknown."""
    saving: float = 0.0
    """Time for which checkpoints have stopped the training."""


@dataclass(frozen=True)
class PreflightRecord:
    """preflight.json: checks of the nodes ahead of an attempt's tasks, as a person reads them.

    Beside these fields it has what each node measured: `nodes`. preflight-full.json, of the ranks'
    own checks, has what each rank did: `ranks`.
    """

    summary: str = ""
    """Line that says how it went."""
    seconds: float | None = None
    """Seconds from the start of the checks to their end."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Measurements by the name of a node that has failed."""
    remarks: tuple[str, ...] = ()
    """Findings that are no fault of one node."""
    slow: tuple[str, ...] = ()
    """Nodes among the failed ones that are slower than the others, and nothing worse."""


@dataclass(frozen=True)
class Liveness:
    """alive: how far rank 0 has come; renewed every two seconds."""

    step: int | None = None
    """Steps that are done, over all attempts."""
    saved: int | None = None
    """Step of the newest checkpoint."""
    spent: Spent | None = None
    """None of a COMMAND."""
    planned: int | None = None
    """Step at which the training will be done; None where nobody knows."""


@dataclass(frozen=True)
class SlowRank:
    """Rank that was slower than the others for long enough to be named."""

    rank: int
    """Rank, from 0."""
    host: str = ""
    """Its host, by Slurm's name; empty where nobody has recorded it."""
    share: float = 0.0
    """Share of the other ranks' median speed that it had."""
    seconds: float = 0.0
    """Seconds of training for which it was slow."""
    steps: int = 0
    """Steps in these seconds."""
    first_step: int = 0
    """Step after which it was slow."""
    since: float | None = None
    """Time from which on it was slow."""
    until: float | None = None
    """Time from which on it kept up again; None where it never did."""

    @property
    def name(self) -> str:
        """`rank 3 on h02`."""
        return f"rank {self.rank} on {self.host}" if self.host else f"rank {self.rank}"


@dataclass(frozen=True)
class SlowRanks:
    """stragglers.json: ranks that were named for being slow, in the order of their naming."""

    stragglers: tuple[SlowRank, ...] = ()
    """These ranks, each once for each time that it was slow."""


@dataclass(frozen=True)
class StopRequest:
    """stop: somebody has asked the attempt to save and leave; empty where the batch script has."""

    reason: str = ""
    """`stop` of a person, `signal` of a launcher; empty from the batch script."""


@dataclass(frozen=True)
class TaskError:
    """Exception that ended a task."""

    type: str = ""
    """Empty for an error of this package, which speaks for itself."""
    message: str = ""
    """Message of the exception."""
    peer_lost: bool = False
    """True where it only follows from the end of another rank."""
    of_command: bool = False
    """True where it is pieced together from what a command left, rather than caught."""
    code: str = ""
    """Code of an error of this package."""


@dataclass(frozen=True)
class NestedWorld:
    """World that the children of one task formed by themselves, beside the run's."""

    size: int = 0
    """Number of its ranks."""
    launcher: str = ""
    """Program that started its ranks, `torchrun`; empty where that is not known."""


@dataclass(frozen=True)
class ReceivedSignal:
    """Signal that a task got and did not ignore, the latest one that asks for its end if any."""

    signal: str
    """Its name, such as `SIGTERM`."""
    time: float
    """Time at which it came."""


@dataclass(frozen=True)
class Outcome:
    """outcomes/rank-R.json: how a rank ended."""

    rank: int
    """Rank, from 0."""
    local_rank: int
    """Rank within its node, from 0."""
    node_rank: int
    """Number of its node within the job, from 0."""
    host: str
    """Its host, by Slurm's name."""
    pid: int
    """Its process on that host; the runtime's where only a container's parent knew one."""
    job_id: str
    """Slurm's job id; empty without a job."""
    restart: int
    """SLURM_RESTART_COUNT; 0 without a job."""
    step_id: str
    """Slurm's id of the step within the job; empty without one."""
    started: float
    """Time at which the task started."""
    ended: float | None = None
    """Time of its end; None while it runs, or when its parent was killed too."""
    exit_code: int | None = None
    """Its exit code, 128 + N of signal N; None until it has ended."""
    signal: str | None = None
    """Signal that ended it, such as `SIGKILL`; None where none did."""
    error: TaskError | None = None
    """Exception that ended it; None where none is known."""
    hung: str = ""
    """Place at which it kept the others waiting, as a watchdog has found (hung.json)."""
    ticks: int | None = None
    """Start of its process in the kernel's ticks, which tells it from later ones of its number."""
    python: str = ""
    """Interpreter of its parent, which so runs clusterddp on its host."""
    clock_ahead: float | None = None
    """Seconds by which its host's clock is ahead of rank 0's, where measured (clocks.json)."""
    nested_world: NestedWorld | None = None
    """World that its children formed by themselves."""
    received_signal: ReceivedSignal | None = None
    """Signal that told it to save or to end; None where none came, or it ignores them."""
    continued: float | None = None
    """Time at which it last went on after it was stopped, as by `scontrol suspend`."""
    met: bool | None = None
    """Of rank 0 of a COMMAND with torch: whether it, or somebody on MASTER_PORT, has listened for
    other ranks; None where nobody has looked."""

    @property
    def failed(self) -> bool:
        """Return whether it has ended, and not well."""
        return self.exit_code is not None and self.exit_code not in (0, EXIT_PAUSED)

    @property
    def left_early(self) -> bool:
        """Return whether it ended with exit code 0 because a signal told it to.

        What goes on for a minute after USR1 or USR2 has saved, and ends at its own time.
        """
        if self.received_signal is None or self.ended is None or self.exit_code != 0:
            return False
        goes_on = (
            self.received_signal.signal in _MAY_GO_ON
            and self.ended - self.received_signal.time > _LEAVES_WITHIN
        )
        return not goes_on

    @property
    def paused(self) -> bool:
        """Return whether it has saved and left as it was asked to, or asks to be started again."""
        return self.exit_code == EXIT_PAUSED

    @property
    def peer_lost(self) -> bool:
        """Return whether it says itself that it failed because of another rank."""
        return bool(self.error and self.error.peer_lost)

    @property
    def of_command(self) -> bool:
        """Return whether its error is pieced together from what a command has left."""
        return bool(self.error and self.error.of_command)

    @property
    def reason(self) -> str:
        """Return why it ended, in a few words."""
        if self.hung:
            return f"hung: {self.hung}"
        if self.error:
            return f"{self.error.type}: {_said(self.error.message)}".strip(": ")
        if self.signal:
            return f"killed by {self.signal}"
        if self.exit_code is None:
            return "left no record of its end"
        if self.exit_code == 0:
            return "exit code 0 before the others were done"
        return f"exit code {self.exit_code}"


def _said(message: str) -> str:
    """Return the first line of an error, with those behind it that a colon announces."""
    lines = [line.strip() for line in message.strip().splitlines() if line.strip()]
    return " ".join(announced(lines))


def announced(lines: Sequence[str]) -> Sequence[str]:
    """Return the first of lines, and those behind it that a colon at the end of each announces."""
    last = next((n for n, line in enumerate(lines) if not line.endswith(":")), len(lines) - 1)
    return lines[: last + 1]


@dataclass(frozen=True)
class HungRanks:
    """outcomes/hung.json: which ranks keep the others waiting, and where."""

    ranks: tuple[int, ...] = ()
    """These ranks; none where nobody is to blame."""
    reason: str = ""
    """Place at which they are, or what the others wait for."""
    ended: bool = False
    """True where the job was ended for it: how ranks end then says nothing more."""


@dataclass(frozen=True)
class Silence:
    """silent.json: a COMMAND whose ranks had printed nothing for long."""

    since: float | None = None
    """Time from which on they were silent."""
    printed: int = 0
    """Bytes that they had printed by then: with more, they are silent no longer."""
    ranks: tuple[int, ...] = ()
    """Ranks that were elsewhere than most; none where that is not sure."""
    places: str = ""
    """Where these were, and where most."""


@dataclass(frozen=True)
class ClaimHolder:
    """resubmit-NNNN.claim: the process that resubmits, cleans or removes a run, while it does."""

    host: str = ""
    """Host of the process."""
    pid: int | None = None
    """Its number there."""
    time: float | None = None
    """Time at which it began."""


@dataclass(frozen=True)
class Agreement:
    """resolved.json: what holds on every rank for one attempt, where the request said auto too."""

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
    """Warnings of the ranks, a line each."""
    run_dir: str = ""
    """Directory of the run."""
    attempt: int = 0
    """Number of the attempt."""
    resume: str = ""
    """Checkpoint from which all ranks resume; empty without one."""
    global_batch_size: int = 0
    """Images of a step over all ranks: as at the run's first attempt, whatever the world size."""
    reference_world_size: int = 0
    """World size of the run's first attempt; the learning rate is scaled to it."""
    data_sha256: str = ""
    """Fingerprint of the dataset's files."""
    lr: float | None = None
    """Peak of the learning rate."""

    @property
    def batch_size(self) -> int:
        """Images of a rank in a step."""
        return self.global_batch_size // self.world_size


@dataclass(frozen=True)
class AttemptSummary:
    """Attempt of a run, as it looks from the next one."""

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
    """Step that it came to, to within two seconds where it was killed."""
    cause: str = ""
    """Cause of its end: a word of `Cause`, `killed` where nobody could record it, empty
    for the latest one."""
    steps_done_twice: int = 0
    """Steps of it that the next attempt did again."""
    seconds_lost: float = 0.0
    """Seconds from the saving of what the next attempt resumed until that one's ranks had met."""
    stragglers: tuple[SlowRank, ...] = ()
    """Ranks that were named for being slow."""
    why: str = ""
    """Details of the cause: the rank that failed first, the signal."""

    @property
    def ended(self) -> str:
        """Cause and details: `stopped: interrupt`."""
        return ": ".join(filter(None, (self.cause, self.why)))


@dataclass(frozen=True)
class GpuUse:
    """outcomes/gpus-R.json: how busy the GPUs of rank R's node were, by NVML's samples."""

    host: str = ""
    """The node."""
    gpus: int = 0
    """GPUs that were looked at."""
    samples: int = 0
    """Number of looks at them, one in five seconds."""
    share: float = 0.0
    """Mean over GPUs and samples of the time in which a kernel ran, from 0 to 1."""


@dataclass(frozen=True)
class Paid:
    """Hours for which nodes were held, over all attempts, and what they went into.

    The parts are node-hours and add up to the whole; None where nothing is known of them, as of a
    COMMAND without a Loop.
    """

    node_hours: float = 0.0
    """Hours times nodes."""
    gpu_hours: float | None = None
    """The same times the GPUs asked for on a node; None without GPUs."""
    computing: float | None = None
    """Steps that counted, without the waiting; with it where `waiting` is not known."""
    waiting: float | None = None
    """Waiting of ranks for others in these steps, by the mean over all ranks."""
    starting: float | None = None
    """From the start of the job's attempt to its first step."""
    saving: float | None = None
    """Time for which checkpoints have stopped the training."""
    redone: float | None = None
    """Steps that a later attempt did again, with their waiting."""
    idle: float | None = None
    """Spare nodes, on which no task ran; None without any, and known of every run."""
    gpu_use: float | None = None
    """Share of the time in which the GPUs of a COMMAND were busy; None where nobody looked."""
    rest: float | None = None
    """Evaluation, lines of metrics, the end, and what no record tells of."""


@dataclass(frozen=True)
class RankReport:
    """Rank in a report."""

    rank: int
    """Rank, from 0."""
    images_per_second: float | None = None
    """Throughput over the time in which it did not wait for others: the lowest is the slowest."""
    host: str = ""
    """Its host."""
    peak_memory_bytes: int | None = None
    """GPU memory that torch allocated, or on CPUs the resident set."""


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
    """Time from copied to verified, beside the training."""
    bytes: int = 0
    """Size of the verified checkpoints together."""


@dataclass(frozen=True)
class Report:
    """report.json: what a run achieved, where, and with what."""

    accuracy: float | None = None
    """Accuracy on the test set, from 0 to 1."""
    loss: Loss | None = None
    """Mean loss over the test set; may be NaN."""
    train_seconds: float | None = None
    """Training steps of all attempts: reading batches, forward, backward, exchange, update."""
    total_seconds: float | None = None
    """Duration of the attempt: imports, rendezvous, data, training, evaluation, saving."""
    capture_seconds: float | None = None
    """Time before the first step, outside train_seconds: one pass that settles DDP's buckets or
    loads a GPU's kernels, without the optimizer's; the capture into a CUDA graph."""
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
    """True where the step was captured into a graph."""
    model: str = ""
    """`--model`."""
    dataset: str = ""
    """`--dataset`."""
    parameters: int | None = None
    """Number of the model's parameters."""
    steps: int | None = None
    """Steps that are done, over all attempts."""
    epochs: int | None = None
    """Epochs that were begun, over all attempts."""
    train_images: int | None = None
    """Images of the training set."""
    test_images: int | None = None
    """Images of the test set."""
    versions: Mapping[str, str | None] | None = None
    """Versions of python, torch, torchvision (None without it) and clusterddp."""
    warnings: tuple[str, ...] = ()
    """Warnings of the training, a line each."""
    peak_memory_bytes: int | None = None
    """Largest of any rank: allocated by torch on its GPU, resident on a CPU."""
    ranks: tuple[RankReport, ...] = ()
    """Speed and memory of each rank, in their order."""
    weights_sha256: str = ""
    """SHA-256 of the trained weights."""
    resumed_from: str | None = None
    """Checkpoint from which the attempt resumed."""
    attempt: int | None = None
    """Number of the attempt, from 1."""
    starts: int | None = None
    """Attempts of the run in which ranks met."""
    steps_done_twice: int = 0
    """Steps that were done again after interruptions."""
    seconds_lost: float = 0.0
    """Seconds from each last checkpoint until training went on: work done again, queue, start."""
    attempts: tuple[AttemptSummary, ...] = ()
    """Attempts of the run, in their order."""
    saving: SavingReport | None = None
    """Cost of the checkpoints of this attempt."""
    paid: Paid | None = None
    """Node-hours of all attempts; None where no attempt's start is known."""
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
    """Its place in the test set, from 0."""
    label: int
    """Its class, from 0."""
    predicted: int
    """Class that the model took it for."""
    loss: Loss | None = None
    """Loss of this image; may be NaN."""
    shape: tuple[int, ...] = ()
    """(height, width)."""
    pixels: str = ""
    """Grey values, a byte each, row by row, in base64."""


@dataclass(frozen=True)
class EvaluationRecord:
    """evaluation.json: what the test set showed at the end."""

    step: int | None = None
    """Step at which the test set was evaluated."""
    confusion: tuple[tuple[int | None, ...], ...] = ()
    """(classes, classes) counts: a row a label, a column a prediction."""
    worst: tuple[WorstImage, ...] = ()
    """Images of the highest loss, the highest first."""


@dataclass(frozen=True)
class MetricsLine:
    """A line of metrics.jsonl."""

    kind: str = ""
    """`train` or `eval`."""
    step: int = -1
    """Steps that are done, over all attempts; -1 where it is not said."""
    epoch: int | None = None
    """Epoch of the latest step, from 1."""
    loss: Loss | None = None
    """Mean loss since the last line, or over the test set; may be NaN."""
    accuracy: float | None = None
    """Accuracy likewise, from 0 to 1."""
    lr: float | None = None
    """Learning rate of the step that comes next."""
    images_per_second: float | None = None
    """Throughput of all ranks together."""
    rank_images_per_second: tuple[float | None, ...] = ()
    """Throughput of each rank while it did not wait for others; none in an evaluation."""
    seconds: float | None = None
    """Seconds of training until then, over all attempts."""
    time: float | None = None
    """Time at which it was written."""

    @property
    def tested(self) -> bool:
        """Return whether it is of an evaluation on the test set, not of training."""
        return self.kind == "eval"
