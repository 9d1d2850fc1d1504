"""Checks of a site's Slurm for a request, and the resulting site.cfg.

All queries run in parallel.
"""

import dataclasses
import os
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from clusterddp import formatting
from clusterddp.errors import SlurmError
from clusterddp.launchers import load
from clusterddp.request.resources import Resources
from clusterddp.request.spec import JobSpec
from clusterddp.slurm import forms, site
from clusterddp.slurm.client import lists_exit_code, predict_start
from clusterddp.slurm.site import Partition, read_partitions

T = TypeVar("T")

OK, WARNING, ERROR = "ok", "warning", "error"
SHORT_KILL_WAIT = 10
"""Seconds from SIGTERM to SIGKILL below which saving a checkpoint may fail."""
MAX_PARTITIONS = 12
"""Number of partitions to forecast. With the other queries this stays below 30, the default bucket
of slurmctld's rate limit per user (rl_bucket_size, Slurm 23.02 and later)."""
_FORMS = ("gpus-per-node", "gres", "gpus-per-task")
# For a drained node or a partition that is down, Slurm 22.05 prints the same as for an impossible
# request.
_TRANSIENT = re.compile(r"not available|unavailable|busy|drained|reserved", re.IGNORECASE)
_STARTS = re.compile(r"to start at (\S+)")
_UNSET = ("", "N/A", "NONE", "UNLIMITED")
_LIMITS = {
    "DefaultTime": "default time",
    "MaxNodes": "max nodes",
    "DefMemPerNode": "default MB per node",
    "DefMemPerCPU": "default MB per CPU",
    "MaxMemPerNode": "max MB per node",
    "MaxMemPerCPU": "max MB per CPU",
    "QoS": "QOS",
}


@dataclass(frozen=True)
class Check:
    """One line of the diagnosis."""

    name: str
    result: str
    found: str
    advice: str = ""
    """Step to take; empty if the result is ok."""
    facts: Mapping[str, object] = field(default_factory=dict)
    """Findings, for scripts."""


@dataclass(frozen=True)
class Diagnosis:
    """All checks, and the settings of site.cfg that follow from them."""

    checks: tuple[Check, ...]
    settings: Mapping[str, str]
    """An empty value means that the current one is wrong and no better one is known."""
    remarks: tuple[str, ...] = ()
    """Facts about the site, for comments in site.cfg."""

    @property
    def result(self) -> str:
        """Worst result of the checks."""
        results = {check.result for check in self.checks}
        return next((result for result in (ERROR, WARNING) if result in results), OK)


def slurm(spec: JobSpec, template_folder: Path | None) -> Diagnosis:
    """Check Slurm's configuration, then which requests it accepts."""

    def forecast(resources: Resources) -> "Future[tuple[bool, str]]":
        # All launchers send the same directives.
        asked = dataclasses.replace(spec, resources=resources, launcher="sbatch")
        script = load("sbatch").prepare(asked, template_folder)
        return in_thread(lambda: predict_start(script, os.environ))

    config_asked = in_thread(site.configuration)
    accounting, accounts = in_thread(site.check_accounting), in_thread(site.accounts)
    records_asked, known_asked = in_thread(site.partition_settings), in_thread(read_partitions)
    submission = forecast(spec.resources)
    try:
        config, records, known = config_asked.result(), records_asked.result(), known_asked.result()
    except SlurmError as error:
        return Diagnosis((_no_response(error),), {})
    own = [spec.resources.account] if spec.resources.account else accounts.result()
    groups = site.groups()
    closed = {name: site.why_closed(records.get(name, {}), groups, own) for name in known}
    names = _ordered_names(known, spec.resources.partition)
    forecasts = {name: forecast(_one_node(spec, known[name])) for name in names[:MAX_PARTITIONS]}
    with_gpus = min((n for n in names if known[n].gpus), key=lambda n: bool(closed[n]), default="")
    gpu_forms = _gpu_requests(spec, known[with_gpus]) if with_gpus else {}
    asked_forms = {form: forecast(resources) for form, resources in gpu_forms.items()}
    outcomes = {form: _outcome(asked) for form, asked in asked_forms.items()}
    tried = {name: _outcome(asked) for name, asked in forecasts.items()}
    # A one-GPU job may be rejected only because of the directive.
    if taken := next(filter(lambda outcome: outcome[0], outcomes.values()), None):
        tried[with_gpus] = taken
    tried |= {n: (False, f"{why}: the job would never start") for n, why in closed.items() if why}
    asked_for = spec.resources.partition.split(",")
    of_job = (n for n in names if n in asked_for or (asked_for == [""] and known[n].is_default))
    used = [name for name in of_job if name in records]
    submitted = _outcome(submission)
    if submitted[0] and used and all(closed[name] for name in used):
        submitted = tried[used[0]]

    version, cluster = config["SLURM_VERSION"], config.get("ClusterName", "")
    facts = {"version": version, "cluster": cluster}
    gpus, settings = _gpus(with_gpus, outcomes, spec.resources)
    checks = [
        Check("slurm", OK, f"Slurm {version}, cluster {cluster}, responds", facts=facts),
        _submission(submitted, accounts.result(), spec),
        *(_partition(known[name], records.get(name, {}), tried.get(name)) for name in names),
        gpus,
        _accounting(accounting, accounts.result(), config),
        _requeue(config),
        _preemption(config, records, used),
        _signals(config),
    ]
    if not spec.resources.partition and not any(known[name].gpus for name in used):
        settings |= {"partition": with_gpus} if tried.get(with_gpus, (False,))[0] else {}
    if set(filter(None, asked_for)) - known.keys():
        settings["partition"] = ""
    remarks = [f"Slurm {version}, cluster {cluster}", *(_describe(known[name]) for name in names)]
    return Diagnosis(tuple(checks), settings, tuple(remarks))


def _no_response(error: SlurmError) -> Check:
    """Return the check of a Slurm that is not configured here or does not respond."""
    advice = "try again later, or ask the administrators; 'scontrol ping' tests slurmctld"
    if error.code == "CD0402":
        advice = "run it on a login node; submit --launcher local rehearses a run here"
    found = str(error).splitlines()[-1].removesuffix(" Use a login node.")
    return Check("slurm", ERROR, found, advice)


def in_thread(work: Callable[[], T]) -> "Future[T]":
    """Start work in a daemon thread, which does not delay the end of the command."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _ordered_names(known: Mapping[str, Partition], asked: str) -> list[str]:
    """Return the partitions' names: the requested ones, the default one, the others."""
    carried = [name for name in known if re.fullmatch(forms.PARTITIONS.pattern, name)]
    first = asked.split(",")
    return sorted(carried, key=lambda name: (name not in first, not known[name].is_default))


def _one_node(
    spec: JobSpec, partition: Partition, form: str | None = None, kind: str = ""
) -> Resources:
    """Return a request for one task on one node of a partition, with one GPU if it has any."""
    return dataclasses.replace(
        spec.resources,
        nodes=1,
        nodelist="",
        tasks_per_node=1,
        partition=partition.name,
        gpus_per_node=1 if partition.gpus else 0,
        gpu_type=kind,
        gpu_directive=form or spec.resources.gpu_directive,
    )


def _gpu_requests(spec: JobSpec, partition: Partition) -> dict[tuple[str, str], Resources]:
    """Return requests for one GPU of a partition, by directive and GPU type."""
    types = sorted(filter(None, partition.gpus))
    kinds = dict.fromkeys(("", spec.resources.gpu_type or "".join(types[:1])))
    forms_and_kinds = [(form, kind) for kind in kinds for form in _FORMS]
    return {each: _one_node(spec, partition, *each) for each in forms_and_kinds}


def _outcome(asked: "Future[tuple[bool, str]]") -> tuple[bool, str]:
    """Return whether Slurm accepts a request, and its message; False if it did not respond."""
    try:
        return asked.result()
    except SlurmError as error:
        return False, str(error)


def _severity(words: str) -> str:
    """Return a warning for a transient refusal, an error for a permanent one."""
    return WARNING if _TRANSIENT.search(words) else ERROR


def _submission(outcome: tuple[bool, str], accounts: Sequence[str], spec: JobSpec) -> Check:
    accepted, words = outcome
    asked = f"{formatting.count(spec.resources.nodes, 'node')}, as submit requests"
    if accepted:
        starts = _STARTS.search(words)
        found = f"{asked}: accepted" + (f", would start at {starts[1]}" if starts else "")
        return Check("submission", OK, found, facts={"accepted": True})
    advice = "see the partitions below, and choose one with --partition"
    if re.search(r"account|association|permi|group|yours", words, re.IGNORECASE):
        own = f" (yours: {formatting.join_limited(accounts, 10, ', ')})" if accounts else ""
        advice = f"choose an account with --account{own}, or ask the administrators for access"
    facts = {"accepted": False, "accounts": list(accounts)}
    return Check("submission", _severity(words), f"{asked}: {words}", advice, facts)


def _describe(partition: Partition) -> str:
    """Describe a partition in one line: nodes, CPUs, GPUs and time limit."""
    gpus = [f"{count} {kind}" for kind, count in sorted(partition.gpus.items()) if kind]
    number = partition.gpus.get("", 0)
    return (
        f"partition {partition.name}{' (the default)' if partition.is_default else ''}: "
        f"{formatting.count(partition.nodes, 'node')} of up to "
        f"{formatting.count(partition.cpus, 'CPU')} and {formatting.count(number, 'GPU')}"
        f"{f' ({formatting.join_limited(gpus, 8, chr(44) + chr(32))})' if gpus else ''}, "
        f"limit {partition.limit}"
    )


def _partition(
    partition: Partition, record: Mapping[str, str], outcome: tuple[bool, str] | None
) -> Check:
    limits = {key: record[key] for key in _LIMITS if record.get(key, "") not in _UNSET}
    _, _, described = _describe(partition).partition(": ")
    parts = [described, *(f"{_LIMITS[key]} {value}" for key, value in limits.items())]
    if record.get("State", "UP") != "UP":
        parts.append(f"state {record['State']}")
    accepted, words = outcome or (None, "")
    facts = {
        "partition": partition.name,
        "default": partition.is_default,
        "nodes": partition.nodes,
        "cpus": partition.cpus,
        "gpus": partition.gpus.get("", 0),
        "gpu_types": {kind: count for kind, count in partition.gpus.items() if kind},
        "limit": partition.limit,
        "settings": limits,
        "accepted": accepted,
    }
    name = f"partition {partition.name}"
    if partition.is_default:
        parts.append("the default")
    if outcome is None:
        return Check(name, OK, ", ".join([*parts, "not tried"]), facts=facts)
    one = f"a one-{'GPU' if partition.gpus else 'node'} job"
    if accepted:
        return Check(name, OK, ", ".join([*parts, f"accepts {one}"]), facts=facts)
    advice = "choose another partition, or ask the administrators for access"
    if _severity(words) == WARNING:
        advice = "its nodes may be down, drained or reserved: see sinfo -R"
    return Check(name, WARNING, ", ".join([*parts, f"rejects {one}: {words}"]), advice, facts)


def _gpus(
    partition: str, outcomes: Mapping[tuple[str, str], tuple[bool, str]], resources: Resources
) -> tuple[Check, dict[str, str]]:
    """Check which directives request a GPU; return the check and the resulting settings.

    resources: the request of a submission.
    """
    asked = (resources.gpu_directive, resources.gpu_type)
    if not partition:
        return Check("GPUs", OK, "no partition has GPUs: the ranks use gloo"), {}
    taken = [form for form, outcome in outcomes.items() if outcome[0]]
    facts = {"partition": partition, "forms": [_gpu_directive(*form) for form in taken]}
    shown = ", ".join(_gpu_directive(*form) for form in taken)
    if asked in taken:
        return Check("GPUs", OK, f"{partition} accepts {shown}", facts=facts), {}
    found = f"{partition} rejects {_gpu_directive(*asked)}: {outcomes[asked][1]}"
    if not taken:
        advice = "ask the administrators how to request GPUs, or try again when nodes are up"
        return Check("GPUs", _severity(found), f"{found}; it accepts none", advice, facts), {}
    form, kind = min(taken, key=lambda form: (form[1], form[0] != asked[0]))
    advice = f"use --gpu-directive {form}" if form != asked[0] else ""
    if kind:
        advice = f"{advice or 'give the type'}: --gpus-per-node {kind}:N"
    advice = advice or "omit the type in --gpus-per-node"
    settings = {"gpu-directive": form} if form != asked[0] else {}
    return Check("GPUs", ERROR, f"{found}; it accepts {shown}", advice, facts), settings


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
        found = f"sacct cannot list ended jobs: {formatting.line(str(error))}"
        return Check("accounting", WARNING, found, advice, facts)
    own = f", your accounts: {formatting.join_limited(accounts, 10, ', ')}" if accounts else ""
    return Check("accounting", OK, f"sacct responds, enforced: {enforced}{own}", facts=facts)


def _requeue(config: Mapping[str, str]) -> Check:
    """Check that Slurm requeues a job when it should, and only then."""
    keys = ("JobRequeue", "RequeueExit", "RequeueExitHold", "SlurmdTimeout")
    facts = {key: config.get(key, "") for key in keys}
    problems, advice = [], []
    for key in ("RequeueExit", "RequeueExitHold"):
        setting = f"{key}={facts[key]}"
        listed = [code for code in (1, 75) if lists_exit_code(setting, code)]
        if listed:
            codes = " and ".join(map(str, listed))
            problems.append(f"{setting}: Slurm requeues a run that exits with {codes}")
            advice.append("remove such a job from the queue with 'clusterddp cancel'")
    if facts["JobRequeue"] == "0":
        problems.append("JobRequeue=0: a COMMAND's job is not requeued")
        advice.append("add --requeue for a COMMAND; the training requests it automatically")
    if _number(facts["SlurmdTimeout"]) == 0:
        problems.append("SlurmdTimeout=0: a lost node is never detected")
        advice.append("check long runs manually: clusterddp status")
    if problems:
        return Check("requeue", WARNING, "; ".join(problems), "; ".join(advice), facts)
    lost = f"a lost node is detected after {facts['SlurmdTimeout'] or '300 sec'}"
    return Check("requeue", OK, f"JobRequeue={facts['JobRequeue'] or '1'}, {lost}", facts=facts)


def _preemption(
    config: Mapping[str, str], records: Mapping[str, Mapping[str, str]], used: Collection[str]
) -> Check:
    """Check how Slurm preempts jobs of these partitions."""
    kind = config.get("PreemptType", "").removeprefix("preempt/") or "none"
    of_partitions: dict[str, object] = {}
    facts = {"PreemptType": kind, "partitions": of_partitions}
    if kind == "none":
        return Check("preemption", OK, "off (PreemptType=preempt/none)", facts=facts)
    if kind != "partition_prio":
        advice = "see: sacctmgr show qos format=Name,Preempt,PreemptMode,GraceTime"
        return Check("preemption", WARNING, f"PreemptType=preempt/{kind}", advice, facts)
    if not used:
        advice = "choose an existing partition: 'clusterddp doctor' without --partition lists them"
        return Check("preemption", WARNING, "depends on the partition", advice, facts)
    tiers = {name: _number(record.get("PriorityTier", "")) for name, record in records.items()}
    found, advices = [], []
    for name in used:
        mode = records[name].get("PreemptMode", "") or config.get("PreemptMode", "")
        if mode == "OFF" or tiers[name] >= max(tiers.values()):
            continue
        grace = _number(records[name].get("GraceTime", ""))
        of_partitions[name] = {"PreemptMode": mode, "GraceTime": grace}
        found.append(f"{name}: PreemptMode={mode}, GraceTime={grace} s")
        if "REQUEUE" not in mode:
            advices.append(f"a preempted job of {name} is not requeued: use 'clusterddp resume'")
        elif not grace:
            left = config.get("KillWait", "KillWait")
            advices.append(
                f"a preempted job has only {left} to save there: set --save-every accordingly"
            )
    if not found:
        return Check("preemption", OK, f"nothing preempts {', '.join(used)}", "", facts)
    result = WARNING if advices else OK
    return Check("preemption", result, "; ".join(found), "; ".join(advices), facts)


def _signals(config: Mapping[str, str]) -> Check:
    text = config.get("KillWait", "")
    found, facts = f"KillWait={text} from SIGTERM to SIGKILL", {"KillWait": text}
    if _number(text) < SHORT_KILL_WAIT:
        advice = "keep --signal B:USR1@120, the default of built-in training"
        return Check("signals", WARNING, found, advice, facts)
    return Check("signals", OK, found, facts=facts)


def _number(text: str) -> int:
    """Return the leading number of a value of slurm.conf such as `30 sec`; -1 without one."""
    number = re.match(r"\d+", text)
    return int(number[0]) if number else -1


def proposed_settings(diagnosis: Diagnosis, given: Mapping[str, str]) -> dict[str, str]:
    """Return the settings for a new site.cfg, without the wrong ones."""
    return {name: value for name, value in {**given, **diagnosis.settings}.items() if value}


def site_cfg(diagnosis: Diagnosis, given: Mapping[str, str]) -> str:
    """Return the text of a site.cfg; hints are comments.

    given: settings in effect; settings from the checks take precedence.
    """
    settings = proposed_settings(diagnosis, given)
    lines = ["# Proposed by 'clusterddp doctor'. 'clusterddp site' shows the settings in effect."]
    lines += [f"# {formatting.line(remark)}" for remark in diagnosis.remarks]
    lines += ["", "[defaults]", *_setting_lines(settings)]
    return "\n".join([*lines, ""])


def _setting_lines(settings: Mapping[str, str]) -> Iterator[str]:
    hints = {
        "partition": "gpu",
        "account": "physics",
        "time": "04:00:00",
        "runs-dir": "/shared/runs",
        "data-dir": "/shared/datasets",
    }
    for name in sorted({*hints, *settings}):
        if name in settings:
            yield f"{name} = {settings[name]}"
        else:
            yield f"# {name} = {hints[name]}"
