"""Checks of what a site's Slurm is and takes, for a request, and the site.cfg that follows.

All questions are asked beside each other.
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

GOOD, WARNING, BAD = "good", "warning", "bad"
SHORT_KILL_WAIT = 10
"""Seconds from TERM to KILL below which a checkpoint may not be saved any more."""
MOST_PARTITIONS = 12
"""Partitions of which Slurm is asked for a forecast: with the other questions fewer than the 30
that a user's bucket holds where slurmctld limits them (rl_bucket_size, Slurm 23.02 and later)."""
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


@dataclass(frozen=True)
class Check:
    """One line of the diagnosis."""

    name: str
    verdict: str
    seen: str
    advice: str = ""
    """Step to take; empty where it is good."""
    facts: Mapping[str, object] = field(default_factory=dict)
    """Findings, for scripts."""


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


def slurm(spec: JobSpec, template_folder: Path | None) -> Diagnosis:
    """Check what Slurm says: first what it is, then what it takes."""

    def forecast(resources: Resources) -> "Future[tuple[bool, str]]":
        # The directives are the same for every launcher.
        asked = dataclasses.replace(spec, resources=resources, launcher="sbatch")
        script = load("sbatch").prepare(asked, template_folder)
        return beside(lambda: predict_start(script, os.environ))

    config_asked = beside(site.configuration)
    accounting, accounts = beside(site.check_accounting), beside(site.accounts)
    records_asked, known_asked = beside(site.partition_settings), beside(read_partitions)
    submission = forecast(spec.resources)
    try:
        config, records, known = config_asked.result(), records_asked.result(), known_asked.result()
    except SlurmError as error:
        advice = "ask the site's staff, or try again later; 'scontrol ping' shows slurmctld"
        return Diagnosis((Check("slurm", BAD, formatting.line(str(error)), advice),), {})
    own = [spec.resources.account] if spec.resources.account else accounts.result()
    groups = site.groups()
    closed = {name: site.why_closed(records.get(name, {}), groups, own) for name in known}
    names = _in_order(known, spec.resources.partition)
    forecasts = {name: forecast(_one_node(spec, known[name])) for name in names[:MOST_PARTITIONS]}
    with_gpus = min((n for n in names if known[n].gpus), key=lambda n: bool(closed[n]), default="")
    gpu_forms = _with_one_gpu(spec, known[with_gpus]) if with_gpus else {}
    asked_forms = {form: forecast(resources) for form, resources in gpu_forms.items()}
    outcomes = {form: _outcome(asked) for form, asked in asked_forms.items()}
    tried = {name: _outcome(asked) for name, asked in forecasts.items()}
    # A job of one GPU may be refused for the form alone.
    if taken := next(filter(lambda outcome: outcome[0], outcomes.values()), None):
        tried[with_gpus] = taken
    tried |= {name: (False, f"{why}, a job waits for ever") for name, why in closed.items() if why}
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
        Check("slurm", GOOD, f"Slurm {version}, cluster {cluster}, answers", facts=facts),
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
    remarks = [f"Slurm {version}, cluster {cluster}", *(_described(known[name]) for name in names)]
    return Diagnosis(tuple(checks), settings, tuple(remarks))


def beside(work: Callable[[], T]) -> "Future[T]":
    """Start work in a thread that nothing waits for when the command ends."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


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
        gpu_directive=form or spec.resources.gpu_directive,
    )


def _with_one_gpu(spec: JobSpec, partition: Partition) -> dict[tuple[str, str], Resources]:
    """Return the requests for one GPU of a partition, by the directive and the type they name."""
    types = sorted(filter(None, partition.gpus))
    kinds = dict.fromkeys(("", spec.resources.gpu_type or "".join(types[:1])))
    forms_and_kinds = [(form, kind) for kind in kinds for form in _FORMS]
    return {each: _one_node(spec, partition, *each) for each in forms_and_kinds}


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
    advice = "see the lines of the partitions; name another with --partition"
    if re.search(r"account|association|permi|group|yours", words, re.IGNORECASE):
        own = f" (yours: {formatting.join_limited(accounts, 10, ', ')})" if accounts else ""
        advice = f"name an account with --account{own}, or ask the site's staff for access"
    facts = {"accepted": False, "accounts": list(accounts)}
    return Check("submission", _refusal(words), f"{asked}: {words}", advice, facts)


def _described(partition: Partition) -> str:
    """Describe a partition in one line: nodes, CPUs, GPUs and limit."""
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
        return Check(name, GOOD, ", ".join([*parts, "not tried"]), facts=facts)
    one = "a job of one GPU" if partition.gpus else "a job of one node"
    if accepted:
        return Check(name, GOOD, ", ".join([*parts, f"takes {one}"]), facts=facts)
    advice = "name another partition, or ask the site's staff for access"
    if _refusal(words) == WARNING:
        advice = "its nodes may be down, drained or reserved: look with sinfo -R"
    return Check(name, WARNING, ", ".join([*parts, f"refuses {one}: {words}"]), advice, facts)


def _gpus(
    partition: str, outcomes: Mapping[tuple[str, str], tuple[bool, str]], resources: Resources
) -> tuple[Check, dict[str, str]]:
    """Check which directives ask for a GPU; return also the settings that follow from it.

    resources: what a submission asks for.
    """
    asked = (resources.gpu_directive, resources.gpu_type)
    if not partition:
        return Check("GPUs", GOOD, "no partition has any: ranks meet by gloo"), {}
    taken = [form for form, outcome in outcomes.items() if outcome[0]]
    facts = {"partition": partition, "forms": [_gpu_directive(*form) for form in taken]}
    shown = ", ".join(_gpu_directive(*form) for form in taken)
    if asked in taken:
        return Check("GPUs", GOOD, f"{partition} takes {shown}", facts=facts), {}
    seen = f"{partition} refuses {_gpu_directive(*asked)}: {outcomes[asked][1]}"
    if not taken:
        advice = "ask the site's staff how its GPUs are asked for, or try when nodes are up"
        return Check("GPUs", _refusal(seen), f"{seen}; no form is taken", advice, facts), {}
    form, kind = min(taken, key=lambda form: (form[1], form[0] != asked[0]))
    advice = f"use --gpu-directive {form}" if form != asked[0] else ""
    if kind:
        advice = f"{advice or 'name the type'}: --gpus-per-node {kind}:N"
    advice = advice or "leave the type out of --gpus-per-node"
    settings = {"gpu-directive": form} if form != asked[0] else {}
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
    own = f", your accounts: {formatting.join_limited(accounts, 10, ', ')}" if accounts else ""
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
    of_partitions: dict[str, object] = {}
    facts = {"PreemptType": kind, "partitions": of_partitions}
    if kind == "none":
        return Check("preemption", GOOD, "off (PreemptType=preempt/none)", facts=facts)
    if kind != "partition_prio":
        advice = "look with: sacctmgr show qos format=Name,Preempt,PreemptMode,GraceTime"
        return Check("preemption", WARNING, f"PreemptType=preempt/{kind}", advice, facts)
    if not used:
        advice = (
            "name a partition that there is: 'clusterddp doctor' without --partition lists them"
        )
        return Check("preemption", WARNING, "depends on the partition", advice, facts)
    tiers = {name: _number(record.get("PriorityTier", "")) for name, record in records.items()}
    seen, advices = [], []
    for name in used:
        mode = records[name].get("PreemptMode", "") or config.get("PreemptMode", "")
        if mode == "OFF" or tiers[name] >= max(tiers.values()):
            continue
        grace = _number(records[name].get("GraceTime", ""))
        of_partitions[name] = {"PreemptMode": mode, "GraceTime": grace}
        seen.append(f"{name}: PreemptMode={mode}, GraceTime={grace} s")
        if "REQUEUE" not in mode:
            advices.append(f"a preempted job of {name} is not requeued: 'clusterddp resume' it")
        elif not grace:
            left = config.get("KillWait", "KillWait")
            advices.append(f"only {left} are left to save there: choose --save-every by that")
    if not seen:
        return Check("preemption", GOOD, f"nothing preempts {', '.join(used)}", "", facts)
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
        "runs-dir": "/shared/runs",
        "data-dir": "/shared/datasets",
    }
    for name in sorted({*hints, *settings}):
        if name in settings:
            yield f"{name} = {settings[name]}"
        else:
            yield f"# {name} = {hints[name]}"
