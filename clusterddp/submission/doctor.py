"""Checks of a login node: what this account, Slurm, the folders and the Python allow.

Nothing is queued or written. The questions are asked beside each other, and all together have
`MOST_SECONDS`: a file system that hangs costs its own line, not the others.
"""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoResultError
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from clusterddp.data import mnist
from clusterddp.errors import ClusterDDPError, DataError, SlurmError
from clusterddp.launchers import load
from clusterddp.request.options import is_reference
from clusterddp.request.spec import JobSpec, Resources
from clusterddp.run import formatting
from clusterddp.slurm import forms, partitions, site
from clusterddp.slurm.client import lists_exit_code, outlook
from clusterddp.slurm.partitions import Partition

T = TypeVar("T")

GOOD, WARNING, BAD = "good", "warning", "bad"
MOST_SECONDS = 60.0
"""Bound on all checks together."""
IMPORT_SECONDS = 45.0
"""Bound on the start of --python, whose import of torch takes long on a cold file system."""
SLOW_IMPORT_SECONDS = 20.0
SHORT_KILL_WAIT = 10
"""Seconds from TERM to KILL below which a checkpoint may not be saved any more."""
FEW_BYTES, LITTLE_BYTES = 100 * 2**20, 10 * 2**30
FEW_INODES, LITTLE_INODES = 1_000, 10_000
"""Room of the output folder below which it is bad, or a warning."""
MOST_PARTITIONS = 12
"""Partitions of which Slurm is asked for a forecast: with the other questions fewer than the 30
that a user's bucket holds where slurmctld limits them (rl_bucket_size, Slurm 23.02 and later)."""

SHARED_TYPES = (
    "nfs nfs4 lustre gpfs beegfs beegfs_nodev ceph fuse.ceph fuse.ceph-fuse cifs smb3 panfs wekafs "
    "glusterfs fuse.glusterfs orangefs pvfs2 gfs2 ocfs2 afs fuse.juicefs 9p virtiofs"
)
LOCAL_TYPES = (
    "ext2 ext3 ext4 xfs btrfs zfs f2fs jfs bcachefs tmpfs ramfs overlay vfat exfat squashfs"
)
"""Types of file systems as /proc/self/mountinfo names them, proc(5)."""

_FORMS = ("gpus-per-node", "gres", "gpus-per-task")
# Of a request that waits for a drained node or a partition that is down Slurm says the same as of
# one that is never possible: seen on 22.05.
_PASSING = re.compile(r"not available|unavailable|busy|drained|reserved", re.IGNORECASE)
_STARTS = re.compile(r"to start at (\S+)")
_UNSET = ("", "N/A", "NONE", "UNLIMITED")
_LIMITS = {
    "DefaultTime": "default time",
    "MaxNodes": "nodes at most",
    "DefMemPerNode": "default MB a node",
    "DefMemPerCPU": "default MB a CPU",
    "MaxMemPerNode": "MB a node at most",
    "MaxMemPerCPU": "MB a CPU at most",
    "QoS": "QOS",
}
_IMPORT = """\
import json, platform, torch
try:
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
except Exception:
    nccl = ""
cuda, hip = torch.version.cuda, getattr(torch.version, "hip", None)
print()
print(json.dumps({
    "python": platform.python_version(), "torch": torch.__version__,
    "cuda": cuda, "hip": hip, "nccl": nccl,
}))
"""


@dataclass(frozen=True)
class Check:
    """One line of the diagnosis."""

    name: str
    verdict: str
    seen: str
    advice: str = ""
    """What to do; empty where it is good."""
    facts: Mapping[str, object] = field(default_factory=dict)
    """What was seen, for scripts."""


@dataclass(frozen=True)
class Diagnosis:
    """All checks, and the settings of site.cfg that follow from them."""

    checks: tuple[Check, ...]
    settings: Mapping[str, str]
    """Empty is one that must not stay as it is, and for which there is no other."""
    remarks: tuple[str, ...] = ()
    """Lines about the site for the comments of a site.cfg."""

    @property
    def verdict(self) -> str:
        """Return the worst verdict of a check."""
        verdicts = {check.verdict for check in self.checks}
        return next((verdict for verdict in (BAD, WARNING) if verdict in verdicts), GOOD)


def examine(spec: JobSpec, template_folder: Path | None = None) -> Diagnosis:
    """Check the site for a request: its settings are those of a submission. Queues nothing."""
    deadline = time.monotonic() + MOST_SECONDS
    has_slurm = any(map(shutil.which, ("sbatch", "scontrol")))
    works = {
        "slurm": _beside(lambda: _slurm(spec, template_folder)) if has_slurm else None,
        "output folder": _beside(lambda: _output_folder(spec.run_dir, doubts=has_slurm)),
        "dataset": _beside(lambda: _dataset(spec, doubts=has_slurm)),
        "python": _beside(lambda: _python(spec)),
    }
    checks: list[Check] = []
    diagnosis = Diagnosis((), {})
    for name, work in works.items():
        if work is None:
            advice = "run it on a login node; submit --launcher local rehearses a run here"
            checks.append(Check(name, WARNING, "no sbatch on PATH: no Slurm here", advice))
            continue
        try:
            result = work.result(max(deadline - time.monotonic(), 0.0))
        except NoResultError:
            seen = f"no answer within {MOST_SECONDS:g} s"
            checks.append(Check(name, BAD, seen, "look whether a file system or Slurm hangs"))
        except (ClusterDDPError, OSError) as error:
            checks.append(Check(name, BAD, str(error), "mend what the message names"))
        else:
            if isinstance(result, Diagnosis):
                diagnosis = result
                checks += result.checks
            else:
                checks.append(result)
    has_gpus = any(check.facts.get("gpus") for check in checks)
    settings = {**diagnosis.settings}
    if any(check.name == "python" and check.verdict == BAD for check in checks):
        settings["python"] = ""
    checked = tuple(_held_against_gpus(check) if has_gpus else check for check in checks)
    return dataclasses.replace(diagnosis, checks=checked, settings=settings)


def _beside(work: Callable[[], T]) -> "Future[T]":
    """Start work in a thread that nothing waits for when the command ends."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _slurm(spec: JobSpec, template_folder: Path | None) -> Diagnosis:
    """Check what Slurm says: first what it is, then what it takes."""

    def forecast(resources: Resources) -> "Future[tuple[bool, str]]":
        # The directives are the same for every launcher.
        asked = dataclasses.replace(spec, resources=resources, launcher="sbatch")
        script = load("sbatch").prepare(asked, template_folder)
        return _beside(lambda: outlook(script, os.environ))

    config_asked = _beside(site.configuration)
    accounting, accounts = _beside(site.check_accounting), _beside(site.accounts)
    records_asked, known_asked = _beside(site.partition_settings), _beside(partitions.read)
    submission = forecast(spec.resources)
    try:
        config, records, known = config_asked.result(), records_asked.result(), known_asked.result()
    except SlurmError as error:
        advice = "ask the site's staff, or try again later; 'scontrol ping' shows slurmctld"
        return Diagnosis((Check("slurm", BAD, formatting.line(str(error)), advice),), {})
    names = _in_order(known, spec.resources.partition)
    forecasts = {name: forecast(_one_node(spec, known[name])) for name in names[:MOST_PARTITIONS]}
    with_gpus = next((name for name in names if known[name].gpus), "")
    kinds = ("", *sorted(filter(None, known[with_gpus].gpus))[:1]) if with_gpus else ()
    gpu_forms = {
        (form, kind): forecast(_one_node(spec, known[with_gpus], form, kind))
        for kind in kinds
        for form in _FORMS
    }
    version, cluster = config["SLURM_VERSION"], config.get("ClusterName", "")
    facts = {"version": version, "cluster": cluster}
    checks = [Check("slurm", GOOD, f"Slurm {version}, cluster {cluster}, answers", facts=facts)]
    checks.append(_submission(_outcome(submission), accounts.result(), spec))
    open_ones = []
    for name in names:
        outcome = _outcome(forecasts[name]) if name in forecasts else None
        checks.append(_partition(known[name], records.get(name, {}), outcome))
        if outcome and outcome[0]:
            open_ones.append(name)
    outcomes = {form: _outcome(asked) for form, asked in gpu_forms.items()}
    gpus, settings = _gpus(with_gpus, outcomes, spec.resources.gpu_request)
    checks += [gpus, _accounting(accounting, accounts.result(), config)]
    usual = [name for name in names if known[name].is_default]
    used = [name for name in spec.resources.partition.split(",") if name in records] or usual
    checks += [_requeue(config), _preemption(config, records, used), _signals(config)]
    takes_gpus = any(known[name].gpus for name in used)
    if not spec.resources.partition and not takes_gpus and with_gpus in open_ones:
        settings["partition"] = with_gpus
    if set(filter(None, spec.resources.partition.split(","))) - known.keys():
        settings["partition"] = ""
    remarks = [f"Slurm {version}, cluster {cluster}", *map(_described, map(known.get, names))]
    return Diagnosis(tuple(checks), settings, tuple(remarks))


def _in_order(known: Mapping[str, Partition], asked: str) -> list[str]:
    """Return the partitions' names: those that are asked for, the default one, the others."""
    carried = [name for name in known if re.fullmatch(forms.PARTITIONS.pattern, name)]
    first = asked.split(",")
    return sorted(carried, key=lambda name: (name not in first, not known[name].is_default))


def _one_node(
    spec: JobSpec, partition: Partition, form: str | None = None, kind: str = ""
) -> Resources:
    """Return the request for one task on one node of a partition, with one GPU where it has any."""
    return dataclasses.replace(
        spec.resources,
        nodes=1,
        nodelist="",
        tasks_per_node=1,
        partition=partition.name,
        gpus_per_node=1 if partition.gpus else 0,
        gpu_type=kind,
        gpu_request=form or spec.resources.gpu_request,
    )


def _outcome(asked: "Future[tuple[bool, str]]") -> tuple[bool, str]:
    """Return whether Slurm takes a request, and its words; no where it did not answer."""
    try:
        return asked.result()
    except SlurmError as error:
        return False, str(error)


def _refusal(words: str) -> str:
    """Return the verdict on a refusal: it may pass, or Slurm refuses such a job for certain."""
    return WARNING if _PASSING.search(words) else BAD


def _submission(outcome: tuple[bool, str], accounts: Sequence[str], spec: JobSpec) -> Check:
    accepted, words = outcome
    asked = f"{formatting.count(spec.resources.nodes, 'node')} as submit would ask"
    if accepted:
        starts = _STARTS.search(words)
        seen = f"{asked}: accepted" + (f", would start at {starts[1]}" if starts else "")
        return Check("submission", GOOD, seen, facts={"accepted": True})
    advice = "read the lines of the partitions; name another with --partition"
    if re.search(r"account|association|permi", words, re.IGNORECASE):
        own = f" (yours: {formatting.some(accounts, 10, ', ')})" if accounts else ""
        advice = f"name an account with --account{own}, or ask the site's staff for access"
    facts = {"accepted": False, "accounts": list(accounts)}
    return Check("submission", _refusal(words), f"{asked}: {words}", advice, facts)


def _described(partition: Partition | None) -> str:
    """Describe a partition in one line: nodes, CPUs, GPUs and limit."""
    assert partition is not None
    gpus = [f"{count} {kind}" for kind, count in sorted(partition.gpus.items()) if kind]
    number = partition.gpus.get("", 0)
    return (
        f"partition {partition.name}{' (the default)' if partition.is_default else ''}: "
        f"{formatting.count(partition.nodes, 'node')} of up to "
        f"{formatting.count(partition.cpus, 'CPU')} and {formatting.count(number, 'GPU')}"
        f"{f' ({formatting.some(gpus, 8, chr(44) + chr(32))})' if gpus else ''}, "
        f"limit {partition.limit}"
    )


def _partition(
    partition: Partition, record: Mapping[str, str], outcome: tuple[bool, str] | None
) -> Check:
    limits = {key: record[key] for key in _LIMITS if record.get(key, "") not in _UNSET}
    _, _, described = _described(partition).partition(": ")
    parts = [described, *(f"{_LIMITS[key]} {value}" for key, value in limits.items())]
    if record.get("State", "UP") != "UP":
        parts.append(f"state {record['State']}")
    accepted, words = outcome or (None, "")
    facts = {
        "partition": partition.name,
        "default": partition.is_default,
        "nodes": partition.nodes,
        "cpus": partition.cpus,
        "gpus": dict(partition.gpus),
        "limit": partition.limit,
        "settings": limits,
        "accepted": accepted,
    }
    name = f"partition {partition.name}"
    if partition.is_default:
        parts.append("the default")
    if outcome is None:
        return Check(name, GOOD, ", ".join([*parts, "not tried"]), facts=facts)
    one = "a job of one GPU" if partition.gpus else "a job of one node"
    if accepted:
        return Check(name, GOOD, ", ".join([*parts, f"takes {one}"]), facts=facts)
    advice = "name another partition, or ask the site's staff for access"
    if _refusal(words) == WARNING:
        advice = "its nodes may be down, drained or reserved: look with sinfo -R"
    return Check(name, WARNING, ", ".join([*parts, f"refuses {one}: {words}"]), advice, facts)


def _gpus(
    partition: str, outcomes: Mapping[tuple[str, str], tuple[bool, str]], asked: str
) -> tuple[Check, dict[str, str]]:
    """Check which directives ask for a GPU; return also the settings that follow from it.

    asked: the directive that a submission uses.
    """
    if not partition:
        return Check("GPUs", GOOD, "no partition has any: ranks meet by gloo"), {}
    taken = [form for form, outcome in outcomes.items() if outcome[0]]
    facts = {"partition": partition, "forms": [_gpu_directive(*form) for form in taken]}
    shown = ", ".join(_gpu_directive(*form) for form in taken)
    if (asked, "") in taken:
        return Check("GPUs", GOOD, f"{partition} takes {shown}", facts=facts), {}
    words = outcomes[asked, ""][1]
    seen = f"{partition} refuses {_gpu_directive(asked, '')}: {words}"
    if not taken:
        advice = "ask the site's staff how its GPUs are asked for, or try when nodes are up"
        return Check("GPUs", _refusal(words), f"{seen}; no form is taken", advice, facts), {}
    form, kind = min(taken, key=lambda form: (form[1], form[0] != asked))
    advice = f"use --gpu-request {form}" if form != asked else ""
    if kind:
        advice = f"{advice or 'name the type'}: --gpus-per-node {kind}:N"
    settings = {"gpu-request": form} if form != asked else {}
    return Check("GPUs", BAD, f"{seen}; it takes {shown}", advice, facts), settings


def _gpu_directive(form: str, kind: str) -> str:
    value = f"{kind}:1" if kind else "1"
    return f"--gres=gpu:{value}" if form == "gres" else f"--{form}={value}"


def _accounting(asked: "Future[None]", accounts: Sequence[str], config: Mapping[str, str]) -> Check:
    enforced = config.get("AccountingStorageEnforce", "none")
    facts = {"accounts": list(accounts), "enforced": enforced}
    try:
        asked.result()
    except SlurmError as error:
        advice = "use 'clusterddp status', which reads the runs' own records"
        seen = f"sacct knows no ended jobs: {formatting.line(str(error))}"
        return Check("accounting", WARNING, seen, advice, facts)
    own = f", your accounts: {formatting.some(accounts, 10, ', ')}" if accounts else ""
    return Check("accounting", GOOD, f"sacct answers, enforced: {enforced}{own}", facts=facts)


def _requeue(config: Mapping[str, str]) -> Check:
    """Check that a job is started again where it should be, and only there."""
    keys = ("JobRequeue", "RequeueExit", "RequeueExitHold", "SlurmdTimeout")
    facts = {key: config.get(key, "") for key in keys}
    problems, advice = [], []
    for key in ("RequeueExit", "RequeueExitHold"):
        setting = f"{key}={facts[key]}"
        listed = [code for code in (1, 75) if lists_exit_code(setting, code)]
        if listed:
            codes = " and ".join(map(str, listed))
            problems.append(f"{setting}: Slurm requeues a run that ended with {codes}")
            advice.append("take such a job out of the queue with 'clusterddp cancel'")
    if facts["JobRequeue"] == "0":
        problems.append("JobRequeue=0: a COMMAND's job is not requeued")
        advice.append("give --requeue with a COMMAND; the training asks for it by itself")
    if _number(facts["SlurmdTimeout"]) == 0:
        problems.append("SlurmdTimeout=0: a lost node is never noticed")
        advice.append("look at long runs yourself: clusterddp status")
    if problems:
        return Check("requeue", WARNING, "; ".join(problems), "; ".join(advice), facts)
    lost = f"a lost node is noticed after {facts['SlurmdTimeout'] or '300 sec'}"
    return Check("requeue", GOOD, f"JobRequeue={facts['JobRequeue'] or '1'}, {lost}", facts=facts)


def _preemption(
    config: Mapping[str, str], records: Mapping[str, Mapping[str, str]], used: Collection[str]
) -> Check:
    """Check what a job of these partitions meets when Slurm preempts it."""
    kind = config.get("PreemptType", "").removeprefix("preempt/") or "none"
    facts: dict[str, object] = {"PreemptType": kind, "PreemptMode": config.get("PreemptMode", "")}
    if kind == "none":
        return Check("preemption", GOOD, "off (PreemptType=preempt/none)", facts=facts)
    if kind != "partition_prio":
        advice = "look with: sacctmgr show qos format=Name,Preempt,PreemptMode,GraceTime"
        return Check("preemption", WARNING, f"PreemptType=preempt/{kind}", advice, facts)
    tiers = {name: _number(record.get("PriorityTier", "")) for name, record in records.items()}
    seen, advices = [], []
    for name in used:
        mode = records[name].get("PreemptMode", "") or config.get("PreemptMode", "")
        if mode == "OFF" or tiers[name] >= max(tiers.values()):
            continue
        grace = _number(records[name].get("GraceTime", ""))
        facts[name] = {"PreemptMode": mode, "GraceTime": grace}
        seen.append(f"{name}: PreemptMode={mode}, GraceTime={grace} s")
        if "REQUEUE" not in mode:
            advices.append(f"a preempted job of {name} is not requeued: 'clusterddp resubmit' it")
        elif not grace:
            left = config.get("KillWait", "KillWait")
            advices.append(f"only {left} are left to save there: choose --save-every by that")
    if not seen:
        return Check(
            "preemption", GOOD, f"nothing preempts {', '.join(used) or 'a job'}", "", facts
        )
    verdict = WARNING if advices else GOOD
    return Check("preemption", verdict, "; ".join(seen), "; ".join(advices), facts)


def _signals(config: Mapping[str, str]) -> Check:
    text = config.get("KillWait", "")
    seen, facts = f"KillWait={text}: from TERM to KILL", {"KillWait": text}
    if _number(text) < SHORT_KILL_WAIT:
        advice = "keep --signal B:USR1@120, the training's default, which comes ahead of the limit"
        return Check("signals", WARNING, seen, advice, facts)
    return Check("signals", GOOD, seen, facts=facts)


def _number(text: str) -> int:
    """Return the number that a value of slurm.conf begins with, as in `30 sec`; -1 without one."""
    number = re.match(r"\d+", text)
    return int(number[0]) if number else -1


def _output_folder(run_dir: str, *, doubts: bool) -> Check:
    """Check the output root: that the nodes share it, that it can be written, and its room."""
    root = Path(run_dir).parent
    place = next(folder for folder in (root, *root.parents) if folder.exists())
    room = os.statvfs(place)
    free = room.f_bavail * room.f_frsize
    # Some file systems, btrfs and some servers of NFS among them, count none.
    inodes = room.f_favail if room.f_files else None
    kind, is_shared = _file_system(place)
    facts = {
        "path": str(root),
        "exists": place == root,
        "file_system": kind,
        "shared": is_shared,
        "free_bytes": free,
        "free_inodes": inodes,
    }
    counted = "inodes not counted" if inodes is None else f"{inodes:,} inodes"
    seen = f"{root} on {kind}, free: {formatting.memory(free)}, {counted}"
    few = inodes is not None and inodes < FEW_INODES
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        advice = "name a folder of yours with --output-root"
        return Check("output folder", BAD, f"{seen}; {place} cannot be written", advice, facts)
    if free < FEW_BYTES or few:
        advice = "make room there, or name another folder with --output-root"
        return Check("output folder", BAD, f"{seen}: too little", advice, facts)
    advices = [_doubt(kind, is_shared, "--output-root")] if doubts else []
    if free < LITTLE_BYTES or (inodes is not None and inodes < LITTLE_INODES):
        advices.append("make room: each checkpoint takes some")
    advice = "; ".join(filter(None, advices))
    return Check("output folder", WARNING if advice else GOOD, seen, advice, facts)


def _file_system(path: Path) -> tuple[str, bool | None]:
    """Return the type of a path's file system, and whether machines share it; None is unknown."""
    text = Path("/proc/self/mountinfo").read_text(errors="replace")
    kind = file_system_type(os.path.realpath(path), text.splitlines())
    return (
        kind,
        True if kind in SHARED_TYPES.split() else False if kind in LOCAL_TYPES.split() else None,
    )


def file_system_type(path: str, mountinfo: Iterable[str]) -> str:
    """Return the type of the file system of an absolute path, by lines of /proc/self/mountinfo.

    The form: proc(5). Of mounts over one another the last one counts.
    """
    found, longest = "unknown", -1
    for mount in mountinfo:
        before, dash, behind = mount.partition(" - ")
        fields = before.split(" ")
        if not dash or len(fields) < 5:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
        is_below = path == point or path.startswith(f"{point.rstrip('/')}/")
        if is_below and len(point) >= longest:
            found, longest = behind.split(" ")[0], len(point)
    return found


def _doubt(kind: str, is_shared: bool | None, option: str) -> str:
    """Return what to do about a folder that the nodes may not see; empty where they do."""
    if is_shared:
        return ""
    what = "is this machine's own" if is_shared is False else "is of no type known here"
    return f"{kind} {what}: make sure that all nodes see it, or name a shared folder with {option}"


def _dataset(spec: JobSpec, *, doubts: bool) -> Check:
    """Check that the dataset is whole, with its digests."""
    train = spec.train
    if train is None or is_reference(train.dataset):
        return Check("dataset", GOOD, "a function of yours reads it: not looked at")
    root = mnist.folder(train.dataset, train.data_dir)
    try:
        info = mnist.check(train.dataset, train.data_dir, checksums=True)
    except DataError as error:
        first, _, more = str(error).partition("\n")
        is_absent = len(mnist.missing_files(root)) == len(mnist.FILES)
        ways = [re.sub(r" {2,}", ": ", line.strip()) for line in more.splitlines() if line.strip()]
        advice = "; ".join(ways) or "see 'clusterddp data --help'"
        found = {"whole": False, "missing": is_absent}
        return Check("dataset", WARNING if is_absent else BAD, first.rstrip(":"), advice, found)
    kind, is_shared = _file_system(info.root)
    facts = {"whole": True, "file_system": kind, "shared": is_shared}
    advice = _doubt(kind, is_shared, "--data-dir") if doubts else ""
    seen = f"{info.describe()}, every byte verified, on {kind}"
    return Check("dataset", WARNING if advice else GOOD, seen, advice, facts)


def _python(spec: JobSpec) -> Check:
    """Check that the tasks' interpreter imports torch, with which CUDA, and how long that takes."""
    if spec.container_image or spec.launch_prefix:
        advice = "a run of one node shows it: clusterddp submit --max-steps 1"
        return Check("python", WARNING, "the image's Python is not started here", advice)
    mended = (
        " (modules and set-up lines of the job may mend it)" if spec.modules or spec.setup else ""
    )
    verdict = WARNING if mended else BAD
    advice = f"activate an environment with torch, or name its interpreter with --python{mended}"
    began = time.monotonic()
    try:
        code, output, errors = _started([spec.python, "-c", _IMPORT])
    except OSError as error:
        return Check("python", verdict, f"{spec.python} cannot run: {error.strerror}", advice)
    except subprocess.TimeoutExpired:
        seen = f"{spec.python} has not imported torch within {IMPORT_SECONDS:g} s"
        advice = "move the environment to a faster file system, or into an image"
        return Check("python", WARNING, seen, advice)
    seconds = time.monotonic() - began
    answer = _answer(output) if code == 0 else None
    if answer is None:
        last = ([line for line in errors.splitlines() if line.strip()] or [f"exit code {code}"])[-1]
        return Check("python", verdict, f"{spec.python} does not import torch: {last}", advice)
    on = f"CUDA {answer['cuda']}" if answer["cuda"] else "no CUDA"
    on = f"ROCm {answer['hip']}" if answer["hip"] else on
    seen = (
        f"{spec.python}: Python {answer['python']}, torch {answer['torch']}, {on}, "
        f"imported in {formatting.duration(seconds)}"
    )
    facts = {**answer, "seconds": round(seconds, 2), "has_gpu_build": on != "no CUDA"}
    if tuple(int(part) for part in re.findall(r"\d+", str(answer["python"]))[:2]) < (3, 10):
        return Check("python", verdict, f"{seen}; the tasks need Python 3.10", advice, facts)
    if seconds > SLOW_IMPORT_SECONDS:
        advice = "each start waits for that: move the environment to a faster place, or an image"
        return Check("python", WARNING, seen, advice, facts)
    return Check("python", GOOD, seen, facts=facts)


def _started(argv: Sequence[str]) -> tuple[int, str, str]:
    """Run a command; return its exit code and what it printed.

    Raises OSError, and subprocess.TimeoutExpired once it and what it started are killed.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=IMPORT_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, output, errors


def _answer(output: str) -> dict[str, object] | None:
    """Return the record in the last line of what was printed; None without one."""
    try:
        record = json.loads((output.splitlines() or [""])[-1])
    except ValueError:
        return None
    keys = {"python", "torch", "cuda", "hip", "nccl"}
    return record if isinstance(record, dict) and keys <= record.keys() else None


def _held_against_gpus(check: Check) -> Check:
    """Return the check of the Python, with a warning where it has no use for the site's GPUs."""
    if check.verdict != GOOD or check.facts.get("has_gpu_build", True):
        return check
    advice = "install a torch that is built for the GPUs of the partitions: this one uses CPUs"
    return dataclasses.replace(check, verdict=WARNING, advice=advice)


def proposed(diagnosis: Diagnosis, given: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of a proposed site.cfg, without what was found to be wrong."""
    settings = {**given, **diagnosis.settings}
    return {name: value for name, value in settings.items() if value}


def site_cfg(diagnosis: Diagnosis, given: Mapping[str, str]) -> str:
    """Return the text of a site.cfg, where a hint that is no setting stands in a comment.

    given: settings that are in force; those that follow from the checks come before them.
    """
    settings = proposed(diagnosis, given)
    lines = ["# Proposed by 'clusterddp doctor'. 'clusterddp site' shows what is in force."]
    lines += [f"# {formatting.line(remark)}" for remark in diagnosis.remarks]
    lines += ["", "[defaults]", *_set(settings)]
    return "\n".join([*lines, ""])


def _set(settings: Mapping[str, str]) -> Iterator[str]:
    hints = {
        "partition": "gpu",
        "account": "physics",
        "time": "04:00:00",
        "output-root": "/shared/runs",
        "data-dir": "/shared/datasets",
    }
    for name in sorted({*hints, *settings}):
        if name in settings:
            yield f"{name} = {settings[name]}"
        else:
            yield f"# {name} = {hints[name]}"
