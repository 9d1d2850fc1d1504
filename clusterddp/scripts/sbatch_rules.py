"""Rules that find mistakes of sbatch files.

A rule says "will" only if the file proves it for every Slurm and every site; a script whose counts
come from the command line proves little. "Seen" means observed on Slurm 22.05 and 24.11.
"""

import re
from collections.abc import Iterator
from pathlib import PurePath

from clusterddp.request import nested_launcher
from clusterddp.request.nested_launcher import START_PYTHON
from clusterddp.scripts import sbatch_file
from clusterddp.scripts.findings import Found, Rules
from clusterddp.scripts.job_script import JobScript, Run, in_loop
from clusterddp.scripts.sbatch_file import Directive, SrunCommand
from clusterddp.scripts.shell import Command, Expansion, Script, is_known, on_one_line, typed

SBATCH_RULES = rule = Rules()


_TASK_VARIABLES = {
    "SLURM_PROCID": "0, the batch script's own",
    "SLURM_LOCALID": "0, the batch script's own",
    "SLURM_NODEID": "0, the first node's",
}
"""Variables that differ in each task but are set in the batch script, too."""
_RANKS = {
    "RANK": "SLURM_PROCID",
    "GLOBAL_RANK": "SLURM_PROCID",
    "LOCAL_RANK": "SLURM_LOCALID",
    "NODE_RANK": "SLURM_NODEID",
    "GROUP_RANK": "SLURM_NODEID",
    "MACHINE_RANK": "SLURM_NODEID",
}
_FIRST_NODE = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
_ADDRESS_OPTIONS = ("master-addr", "rdzv-endpoint", "main-process-ip")
_PORT_OPTIONS = ("master-port", "rdzv-endpoint", "main-process-port")
_LOOPBACK = re.compile(r"(?:localhost|127\.\d+\.\d+\.\d+|::1|\[::1\]|0\.0\.0\.0)")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*")
_OWN_NAME = frozenset({"HOSTNAME", "SLURMD_NODENAME", "HOST"})
_NODELISTS = frozenset({"SLURM_JOB_NODELIST", "SLURM_NODELIST"})
_WAITED_FOR = "& step=$!; while kill -0 $step 2>/dev/null; do wait $step; done"
"""Suffix that lets bash run traps while a step runs; a trap ends a single wait."""
_NUMBERS = {"0": "EXIT", "1": "HUP", "2": "INT", "10": "USR1", "12": "USR2", "15": "TERM"}
_QUICK = frozenset({"echo", "printf", "date", "exit", ":", "true"})
_QUOTED = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'[^']*'|\\.", re.DOTALL)
_AGENT = re.compile(r"\btorchrun\b|\btorch\.distributed\.run\b")
_AGENT_WORDS = re.compile(r"PET_NNODES|SLURM_(?:PROCID|NODEID)")
"""Words of a script whose agents find each other, or get separate parts of the work."""
_TASK_WORDS = re.compile("|".join(_TASK_VARIABLES))
_TELL_TASKS = _TASK_VARIABLES.keys() | {"NODE_RANK", "node_rank", "machine_rank"}
"""Names in a script whose tasks may each start some of the ranks."""
_JOB_PORT = "$((20000 + SLURM_JOB_ID % 10000))"


# Starting the ranks


@rule
def launcher_per_rank(job: JobScript) -> Iterator[Found]:
    """torchrun or accelerate in as many tasks per node as there are GPUs.

    Source: torchrun's documentation, and torch/distributed/run.py: one agent per node.
    """
    for run, step in job.in_tasks:
        tasks = job.step_tasks_per_node(step)
        if run.starts not in START_PYTHON or not tasks or tasks < 2:
            continue
        ranks = job.number(run.options.get("nproc-per-node"))
        each = run.options.get("nproc-per-node", "1")
        agents, total = job.number(run.options.get("nnodes")), job.step_tasks(step)
        own_gpus = (step.value("gpus-per-task") or job.file.value("gpus-per-task")) is not None
        if own_gpus or (ranks == 1 and agents and agents == total):
            continue  # each task counts as a node with its own GPUs
        same = tasks in (job.gpus_per_node, ranks) or each in ("gpu", "auto")
        how_many = f"{ranks}" if ranks else "its"
        yield Found(
            run.line,
            same and ranks != 1,
            f"each of the {tasks} tasks per node starts {run.starts}, which starts {how_many} "
            "ranks there itself: several ranks share each GPU.",
            _one_task_per_node(job, step),
        )


@rule
def agents_apart(job: JobScript) -> Iterator[Found]:
    """torchrun on several nodes without --nnodes, or without an address of its agents.

    Source: torchrun's documentation, and torch/distributed/run.py: --nnodes defaults to 1, the
    node's rank to 0 and the address to 127.0.0.1.
    """
    for run, step in job.in_tasks:
        if run.starts != "torchrun" or not run.launcher or run.launcher.command != run.texts:
            continue
        tasks, line = job.step_tasks(step) or 1, job.line(run.line)
        typed = _AGENT.search(line)
        counted, agents = "nnodes" in run.options, job.number(run.options.get("nnodes"))
        is_meant = counted and (agents == 1 or not _lacks_address(run))
        is_meant = is_meant or "standalone" in run.options or bool(_AGENT_WORDS.search(job.typed))
        if tasks < 2 or job.step_tasks_per_node(step) != 1 or is_meant or not typed:
            continue
        why = "the default --nnodes 1, so each runs a separate training."
        if counted:
            why = "the default address 127.0.0.1, so each waits for the rest."
        yield Found(
            run.line,
            False,
            f"each of the {tasks} nodes starts torchrun with {why}",
            _agents(run, line),
        )


def _lacks_address(run: Run) -> bool:
    """Return whether torchrun gets no address of another agent and no node rank."""
    return not run.options.keys() & {*_ADDRESS_OPTIONS, "node-rank", "rdzv-backend", "rdzv-conf"}


def _agents(run: Run, line: str) -> str:
    """Return a line of torchrun with the options that it lacks for several nodes."""
    typed = _AGENT.search(line)
    if not typed or run.starts != "torchrun":
        return line
    options = "" if "nnodes" in run.options else " --nnodes=$SLURM_JOB_NUM_NODES"
    if _lacks_address(run):
        options += " --rdzv-id=$SLURM_JOB_ID --rdzv-backend=c10d"
        options += f" --rdzv-endpoint={_FIRST_NODE}:{_JOB_PORT}"
    return line[: typed.end()] + options + line[typed.end() :]


@rule
def spawn_per_task(job: JobScript) -> Iterator[Found]:
    """mp.spawn in several tasks per node.

    Source: torch.multiprocessing's documentation, spawn; seen: all but one end with EADDRINUSE.
    """
    for run, step in job.in_tasks:
        script, named = job.python_of(run)
        tasks, nodes = job.step_tasks(step), job.step_nodes(step)
        if not script or not named or run.starts or not tasks or tasks <= (nodes or 1):
            continue
        by_task = _TELL_TASKS & set(script.names_in(script.tree))
        if by_task or _TASK_WORDS.search(step.command.source):
            continue
        if line := script.always_spawns:
            yield Found(
                run.line,
                False,
                f"each of the {tasks} tasks starts {PurePath(script.name).name}, which spawns all "
                f"ranks itself (line {line}): the tasks compete for the node's GPUs and port.",
                _one_task_per_node(job, step),
            )


def _one_task_per_node(job: JobScript, step: SrunCommand) -> str:
    """Return a step's line with one task per node; without --ntasks srun keeps the job's count."""
    nodes = job.step_nodes(step) or '"$SLURM_JOB_NUM_NODES"'
    source = on_one_line(step.command.source)
    source = re.sub(r"\s(?:--ntasks(?:-per-node)?[= ]|-n *)\S+", "", source)
    counts = f"srun --ntasks={nodes} --ntasks-per-node=1"
    return _in_line(job, step.command, re.sub(r"\bsrun\b", counts, source, count=1))


def _in_line(job: JobScript, command: Command, instead: str) -> str:
    """Return the line of a command with the command replaced and the rest unchanged."""
    line, source = job.line(command.line), on_one_line(command.source)
    if source in line:
        return line.replace(source, instead, 1)
    return f"{instead} &" if command.background else instead


@rule
def srun_missing(job: JobScript) -> Iterator[Found]:
    """A launcher or the training without srun, in a job of several nodes or tasks.

    Source: sbatch(1): the batch script runs once, on the first node.
    """
    if any(run.trains for run, _ in job.in_tasks):
        return
    for run in job.in_batch:
        if not run.trains or _is_elsewhere(run):
            continue
        line = job.line(run.line)
        nodes = job.number(run.options.get("nnodes") or run.options.get("num-machines"))
        if run.starts in START_PYTHON and job.spans_nodes and not in_loop(run.command):
            waits = bool(nodes and nodes > 1)
            sure = waits and "deepspeed" not in " ".join(run.texts)
            end = "and waits there for the rest" if waits else "so the rest is idle"
            why = f"{run.starts} starts only on the first of {job.nodes} nodes, {end}."
            yield Found(run.line, sure, why, _srun(run, line, job))
            continue
        is_plain = not run.starts and not job.file.steps and not run.command.inside
        if is_plain and (job.ntasks or 0) > 1 and job.asks_for_gpus:
            why = f"the job has {job.ntasks} tasks, but without srun only one process starts."
            yield Found(run.line, False, why, _srun(run, line, job))


def _is_elsewhere(run: Run) -> bool:
    """Return whether the command starts processes on other nodes without srun."""
    return bool({"mpirun", "mpiexec", "ssh", "pdsh", "clush"}.intersection(run.texts))


def _srun(run: Run, line: str, job: JobScript) -> str:
    several = run.starts in START_PYTHON and (job.tasks_per_node or 1) > 1
    counts = f"--ntasks={job.nodes} --ntasks-per-node=1 " if several else ""
    return f"srun {counts}{_agents(run, line) if job.spans_nodes else line}"


@rule
def no_rank_variables(job: JobScript) -> Iterator[Found]:
    """Python under srun that uses env:// without RANK, WORLD_SIZE or MASTER_ADDR.

    Source: torch.distributed's documentation, environment variable initialization; seen: srun
    sets none of them.
    """
    names = set(re.findall(r"\w+", job.typed))
    for run, step in job.in_tasks:
        script, named = job.python_of(run)
        started = nested_launcher.started(run.texts)
        if not script or not named or run.starts or run.python_script not in started:
            continue
        assert step
        if step.value("task-prolog") is not None or (run.in_own_shell and _sets_up(run.script)):
            continue
        line, needed = script.rendezvous
        missing = sorted(needed - names)
        if not missing:
            continue
        yield Found(
            step.command.line,
            "RANK" in missing and script.is_whole and not _sources(job),
            f"neither srun nor this script sets {', '.join(missing)}, which init_process_group "
            f"({PurePath(script.name).name}, line {line}) needs.",
            _with_variables(job, run, missing),
        )


def _with_variables(job: JobScript, run: Run, missing: list[str]) -> str:
    """Return a step's line that sets the rank variables of its tasks."""
    assert run.step
    values = {"MASTER_ADDR": _FIRST_NODE, "MASTER_PORT": _JOB_PORT}
    if values.keys() >= set(missing):
        exports = " ".join(f"{name}={values[name]}" for name in missing)
        return f"export {exports}\n{job.line(run.step.command.line)}"
    command, program = run.step.command, typed(run.command.words)
    head, found, tail = on_one_line(command.source).rpartition(program)
    instead = f"{head}clusterddp exec -- {found}{tail}" if found else "srun clusterddp exec -- …"
    return _in_line(job, command, instead)


@rule
def step_not_waited_for(job: JobScript) -> Iterator[Found]:
    """`srun … &` at the end of the script without wait.

    Source: sbatch(1): the job ends with the script; seen: the step is killed, or never starts.
    """
    commands = job.file.script.commands
    if any("wait" in re.split(r"\W+", command.source) for command in commands):
        return
    steps = [step.command for run, step in job.in_tasks if run.trains]
    for command in steps[-1:]:
        later = commands[commands.index(command) + 1 :]
        quick = all(each.texts[:1] and each.texts[0] in _QUICK for each in later)
        if not command.background or not quick or not {*command.inside} <= {"for", "{"}:
            continue
        texts = enumerate(job.file.lines, 1)
        last = max(n for n, text in texts if text.strip() and not text.lstrip().startswith("#"))
        line = job.line(last)
        yield Found(
            last,
            True,
            f"the srun of line {command.line} runs in the background and nothing waits for it: "
            "the job, and the training, ends here.",
            f"wait\n{line}" if line.startswith("exit") else f"{line}\nwait",
        )


# Expansions by the batch shell


@rule
def batch_shell_rank(job: JobScript) -> Iterator[Found]:
    """`$SLURM_PROCID`, `$SLURM_NODEID`, `$SLURM_LOCALID` or `hostname` expanded by the batch shell.

    Source: srun(1), output environment variables; seen: the batch script has 0 in all three.
    """
    reported: set[tuple[int, str]] = set()
    for run, step in job.in_tasks:
        tasks, nodes = job.step_tasks(step), job.step_nodes(step)
        if in_loop(run.command) and tasks in (1, None):
            continue
        for text in run.texts:
            for expansion in job.expanded_by_batch(run, text):
                several = nodes if expansion.name == "SLURM_NODEID" else tasks
                key = (expansion.line, expansion.name)
                if expansion.name not in _TASK_VARIABLES or several == 1 or key in reported:
                    continue
                own = run.launcher if run.launcher and run.launcher.command == run.texts else None
                of_launcher = run.command.texts[: own.last] if own else run.command.texts
                if run.starts in START_PYTHON and not (run.is_static and text in of_launcher):
                    continue  # agents with a dynamic rendezvous ignore these ranks
                reported.add(key)
                yield Found(
                    expansion.line,
                    bool(several),
                    f"the batch shell expands {expansion.source} before srun starts, so every "
                    f"task gets {_TASK_VARIABLES[expansion.name]}.",
                    _left_to_task(job, run, expansion),
                )
        yield from _one_rank_for_all(job, run)
        name = run.options.get("local-addr", "")
        for expansion in job.expanded_by_batch(run, name):
            if _is_own_name(expansion) and nodes != 1:
                why = f"the batch shell expands {expansion.source}: all nodes get the first's name."
                yield Found(expansion.line, bool(nodes), why, _left_to_task(job, run, expansion))
    yield from _exported_ranks(job)


def _one_rank_for_all(job: JobScript, run: Run) -> Iterator[Found]:
    """Find a constant node rank in a step of several nodes."""
    assert run.step
    for name in ("node-rank", "machine-rank"):
        rank = run.options.get(name, "")
        nodes = job.step_nodes(run.step)
        if run.starts in START_PYTHON and run.is_static and rank.isdecimal() and (nodes or 0) > 1:
            yield Found(
                run.line,
                not in_loop(run.command),
                f"srun starts this on {nodes} nodes, and all of them get node rank {rank}.",
                _in_task_shell(job, run.step, of_rank=rank),
            )


def _exported_ranks(job: JobScript) -> Iterator[Found]:
    """Find `export RANK=$SLURM_PROCID` in the batch script: every task gets 0."""
    ranks: dict[str, int] = {}
    for run in job.in_batch:
        for assignment in run.command.assignments:
            is_exported = assignment.exported or assignment.name in job.file.script.exported
            names = {each.name for each in job.expanded_by_batch(run, assignment.text)}
            if assignment.name in _RANKS and is_exported and names.intersection(_TASK_VARIABLES):
                ranks[assignment.name] = assignment.line
    for reader, step in job.in_tasks:
        read = [name for name in ranks if _reads_ranks(reader, name)]
        tasks = job.step_tasks(step)
        if not read or tasks == 1:
            continue
        exports = " ".join(f"{name}=\\${_RANKS[name]}" for name in read)
        yield Found(
            step.command.line,
            bool(tasks) and reader.trains,
            f"the batch shell sets {' and '.join(read)} once, to 0 (line {ranks[read[0]]}), for "
            "all tasks.",
            _in_task_shell(job, step, f"export {exports}; exec "),
        )


def _reads_ranks(run: Run, name: str) -> bool:
    """Return whether a task probably reads a rank from its environment."""
    if run.starts or any(each.name == name for each in run.command.assignments):
        return False
    if run.in_own_shell and any(
        each.name == name for other in run.script.commands for each in other.assignments
    ):
        return False
    return run.trains or any(text.endswith((".sh", ".bash")) for text in run.texts)


def _left_to_task(job: JobScript, run: Run, expansion: Expansion) -> str:
    """Return the line that leaves an expansion to each task."""
    assert run.step
    escaped = job.line(expansion.line).replace(expansion.source, "\\" + expansion.source)
    if run.in_own_shell:
        return escaped
    step = _in_task_shell(job, run.step, left=expansion.source)
    in_step = run.step.command.line <= expansion.line <= run.step.command.last_line
    return step if in_step else f"{escaped}\n{step}"


def _in_task_shell(
    job: JobScript, step: SrunCommand, before: str = "", left: str = "", of_rank: str = ""
) -> str:
    """Return a step's line whose tasks run the program through a shell.

    before: commands that run before the program. left: an expansion for the tasks' shells.
    of_rank: the number given as node rank.
    """
    command, first, last = step.command, step.program[0], step.program[-1]
    words = _QUOTED.sub(_in_double_quotes, typed(step.program))
    head, tail = command.source[: first.start - command.start], ""
    if "srun" in head:
        tail = command.source[last.start + len(last.source) - command.start :]
    else:  # a variable holds srun and perhaps the first words of the program
        texts = [job.file.script.with_sources(text) for text in command.texts]
        count = len(texts) - len(step.program)
        head, words = " ".join(texts[:count]) + " ", " ".join(texts[count:])
    words = words.replace(left, f"\\{left}") if left else words
    words = re.sub(rf"(rank[= ]){of_rank}\b", r"\1\\$SLURM_NODEID", words) if of_rank else words
    return _in_line(job, command, on_one_line(f'{head}bash -c "{before}{words}"{tail}'))


def _in_double_quotes(part: re.Match[str]) -> str:
    """Escape a quoted part of a line for use in double quotes."""
    if len(part[0]) > 2 and part[0][0] == '"':
        return re.sub(r'\\.|"', _in_double_quotes, part[0])
    return re.sub(r'[\\"$`]', r"\\\g<0>", part[0])


# Rendezvous


@rule
def fixed_port(job: JobScript) -> Iterator[Found]:
    """A fixed MASTER_PORT on nodes that may be shared.

    Source: torch.distributed's documentation, environment variable initialization; sbatch(1),
    --exclusive.
    """
    if job.has_whole_nodes or not job.asks_for_gpus:
        return
    if not any(run.trains for run in job.runs):
        return
    why = (
        "every job uses the same port, so another job on the node, perhaps your own, may have "
        "taken it."
    )
    for run in job.runs:
        for assignment in run.command.assignments:
            if assignment.name == "MASTER_PORT" and _is_port(assignment.text):
                line = f"{'export ' if assignment.exported else ''}MASTER_PORT={_JOB_PORT}"
                yield Found(assignment.line, False, why, line)
                return
        if run.starts not in {*START_PYTHON, "deepspeed"} or "standalone" in run.options:
            continue
        for name in _PORT_OPTIONS:
            port = run.options.get(name, "").rpartition(":")[2]
            if _is_port(port) and port != "0":
                at = run.line_of(port)
                line = job.line(at).replace(port, _JOB_PORT)
                yield Found(at, False, why, line)
                return


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and 0 < int(text[:6]) < 65536


@rule
def address_per_task(job: JobScript) -> Iterator[Found]:
    """MASTER_ADDR or the rendezvous host expanded in each task: each node names itself.

    Source: torch.distributed's documentation, environment variable initialization: the address of
    rank 0, the same for all.
    """
    for run, step in job.in_tasks:
        nodes = job.step_nodes(step)
        if nodes == 1 or not run.in_own_shell:
            continue
        for _, text in _addresses(run):
            for expansion in run.script.expanded(text):
                if job.is_of_batch(expansion) or not _is_own_name(expansion):
                    continue
                command = step.command
                source = on_one_line(command.source).replace(expansion.source, "$MASTER_ADDR")
                yield Found(
                    command.line,
                    bool(nodes),
                    f"each task expands {expansion.source} itself, so every node has another "
                    "address.",
                    f"export MASTER_ADDR={_FIRST_NODE}\n{_in_line(job, command, source)}",
                )


def _addresses(run: Run) -> Iterator[tuple[int, str]]:
    """Yield line and value of each address of rank 0."""
    for assignment in run.command.assignments:
        if assignment.name in ("MASTER_ADDR", "MASTER_IP", "HEAD_NODE_IP"):
            yield assignment.line, assignment.text
    for name in _ADDRESS_OPTIONS:
        if run.starts in START_PYTHON and (value := run.options.get(name)):
            yield run.line_of(value), value


def _is_own_name(expansion: Expansion) -> bool:
    """Return whether an expansion yields the local node's name."""
    if expansion.name in _OWN_NAME:
        return True
    commands = [command.texts[:1] for command in expansion.commands]
    return commands[:1] == [("hostname",)] and not (
        set(expansion.commands[0].texts[1:]) - {"-f", "-s", "-i", "-I", "--fqdn", "--short"}
    )


@rule
def launch_node(job: JobScript) -> Iterator[Found]:
    """SLURM_LAUNCH_NODE_IPADDR as the address of rank 0.

    Source: srun(1): the host that ran srun; seen: unset in the batch script.
    """
    for run in job.runs:
        values = [*run.texts, *(each.text for each in run.command.assignments)]
        for expansion in {e for text in values for e in run.script.expanded(text)}:
            if expansion.name != "SLURM_LAUNCH_NODE_IPADDR":
                continue
            in_batch = job.is_of_batch(expansion) and "-" not in expansion.source
            why = (
                "SLURM_LAUNCH_NODE_IPADDR is only set in tasks: here it is empty."
                if in_batch
                else "SLURM_LAUNCH_NODE_IPADDR is the host that ran srun: rank 0's node under "
                "sbatch, but the login host under salloc."
            )
            line = job.line(expansion.line).replace(expansion.source, _FIRST_NODE)
            yield Found(expansion.line, in_batch, why, line)


@rule
def rendezvous_host(job: JobScript) -> Iterator[Found]:
    """A rendezvous host outside the allocation or different on each node; a static master address
    that is not the first node's.

    Source: torch.distributed's documentation, environment variable initialization; torchrun's
    documentation, and torch/distributed/run.py; sbatch(1), SLURM_SUBMIT_HOST.
    """
    used: set[int] = set()
    for run in job.runs:
        nodes = job.step_nodes(run.step) if run.step else job.nodes
        if nodes == 1 or (not run.step and not job.in_tasks):
            continue
        for line, text in _addresses(run):
            for of_host, host, sure, why in _wrong_hosts(job, run, text, nodes):
                at = of_host or _typed_in(job, line, host)
                if at not in used:
                    used.add(at)
                    yield Found(at, sure, why, job.line(at).replace(host, _FIRST_NODE, 1))


def _wrong_hosts(
    job: JobScript, run: Run, text: str, nodes: int | None
) -> Iterator[tuple[int, str, bool, str]]:
    """Yield the mistakes in an address: the line if known, the host, whether sure, why."""
    host = text.rpartition(":")[0] if re.search(r":\d+$", text) else text
    if _LOOPBACK.fullmatch(host):
        yield 0, host, bool(nodes), f"on each node {host} is that node itself, not rank 0's."
    is_name = _HOST.fullmatch(host) and not host.isdecimal()
    is_asked_for = host in (job.file.value("nodelist") or "")
    if nodes and is_name and not is_asked_for and not _LOOPBACK.fullmatch(host):
        yield 0, host, False, f"Slurm may run the job on nodes other than {host}."
    for expansion in run.script.direct(text):
        line, name, typed_as = expansion.line, expansion.name, expansion.source
        if name == "SLURM_SUBMIT_HOST":
            why = "SLURM_SUBMIT_HOST is the host that ran sbatch, not a node of the job."
            yield line, typed_as, True, why
        elif name in _NODELISTS and len(host) == 1 and typed_as.strip("${}") == name:
            why = "this is a compressed node list such as gpu[01-04], not a host name."
            yield line, typed_as, bool(nodes), why
        elif run.is_static and nodes and _is_not_first(job, expansion):
            why = "rank 0 runs on the first node, but this static address is another node's."
            yield line, typed_as, True, why


def _is_not_first(job: JobScript, expansion: Expansion) -> bool:
    """Return whether an expansion yields a node of the job other than the first."""
    if element := re.fullmatch(r"\$\{(\w+)\[(?!0\])[-\w]+\]\}", expansion.source):
        array = job.file.script.variables.get(element[1], "")
        return any(_lists_nodes(each) for each in job.file.script.direct(array))
    last = [command.texts[:1] == ("tail",) for command in expansion.commands]
    return any(last) and _lists_nodes(expansion) and "+1" not in expansion.source


def _lists_nodes(expansion: Expansion) -> bool:
    words = {text for command in expansion.commands for text in command.texts[1:]}
    return bool(words & {"hostnames", "hostname"})


def _typed_in(job: JobScript, line: int, host: str) -> int:
    """Return the line that contains a host: this one or a variable's assignment."""
    if host in job.line(line):
        return line
    assignments = [each for run in job.runs for each in run.command.assignments]
    return next((each.line for each in assignments if host in each.text), line)


# Signals


@rule
def signal_to_steps(job: JobScript) -> Iterator[Found]:
    """`--signal` without `B:` although the shell traps it, `B:` without a trap, or no handler.

    Source: sbatch(1), --signal; seen: without B: the batch shell gets nothing.
    """
    directive = job.file.directive("signal")
    if not directive or not directive.value:
        return
    to_batch, name = _signal(directive.value)
    trapped = [run for run in job.in_batch if name in _trapped(run.command)]
    waiting = [run for run in trapped if run.command.texts[1] not in ("", ":")]
    if any("srun" in run.texts for run in job.in_batch):
        return  # a function of the script starts the steps
    training = next((run for run in job.runs if run.trains), None)
    if to_batch and not trapped and not _execs(job):
        at = _started(training) if training else next(iter(job.file.script.commands), None)
        line = at.line if at else directive.line
        why = (
            f"line {directive.line} sends SIG{name} to the batch shell, which has no trap and dies."
        )
        fixed = _waited_for(at) if at and training else job.line(line)
        passed_on = "USR1" if name in ("TERM", "INT") else name  # these make srun kill its tasks
        trap = f"trap 'kill -{passed_on} $step' {name}\n{fixed}"
        traps = set().union(*(_trapped(run.command) for run in job.in_batch))
        sure = not _sources(job) and "EXIT" not in traps and all(map(is_known, traps))
        yield Found(line, sure, why, trap)
    elif not to_batch and waiting:
        trap = f"the trap at line {waiting[0].line}"
        why = f"without B:, SIG{name} goes to the steps, and {trap} never runs."
        sure = not job.in_tasks or _no_handler(job)
        right = _with_directive(directive, f"--signal=B:{directive.value}")
        yield Found(directive.line, sure, why, right)
    elif not to_batch and not job.in_tasks and training:
        why = (
            f"without B:, SIG{name} (line {directive.line}) goes only to steps, and the script "
            "starts none."
        )
        sure = not any(run.starts for run in job.in_batch)
        yield Found(training.line, sure, why, f"srun {job.line(training.line)}")
    elif not to_batch and _no_handler(job):
        why = f"SIG{name} kills every rank, because no script checked here handles it."
        handler = f"# in the training script: signal.signal(signal.SIG{name}, handler)"
        yield Found(directive.line, False, why, f"{directive.text}\n{handler}")
    if trapped:
        yield from _foreground(job, name, is_sure=to_batch)


def _sources(job: JobScript) -> bool:
    """Return whether the batch shell sources a file that may set a trap."""
    known = ("activate", "conda.sh", "bashrc", "profile", "mamba.sh")
    return any(
        run.texts[:1] in (("source",), (".",)) and not "".join(run.texts[1:2]).endswith(known)
        for run in job.in_batch
    )


def _signal(value: str) -> tuple[bool, str]:
    """Return whether the batch shell gets the signal, and its name without SIG."""
    where, colon, rest = value.rpartition(":")
    name = rest.partition("@")[0].upper().removeprefix("SIG")
    return colon == ":" and "B" in where.upper(), _NUMBERS.get(name, name)


def _trapped(command: Command) -> set[str]:
    if command.texts[:1] != ("trap",) or len(command.texts) < 3:
        return set()
    names = (text.upper().removeprefix("SIG") for text in command.texts[2:])
    return {_NUMBERS.get(name, name) for name in names}


def _execs(job: JobScript) -> bool:
    """Return whether the batch shell execs another program, which then gets the signal."""
    return any(command.texts[:1] == ("exec",) for command in job.file.script.commands)


def _no_handler(job: JobScript) -> bool:
    scripts = [script for run, _ in job.in_tasks if (script := job.python_of(run)[0])]
    return bool(scripts) and not any(each.handles_signals for each in scripts)


def _foreground(job: JobScript, name: str, *, is_sure: bool) -> Iterator[Found]:
    """Find a training in the foreground, which delays bash's traps."""
    for command in dict.fromkeys(_started(run) for run in job.runs if run.trains):
        if command.background or command.piped or "function" in command.inside or _execs(job):
            continue
        why = f"this runs in the foreground, so bash runs the trap for {name} only after it ends."
        yield Found(command.line, is_sure, why, _waited_for(command))


def _started(run: Run) -> Command:
    """Return the script's command that starts a run: the step's srun, or the command itself."""
    return run.step.command if run.step else run.command


def _waited_for(command: Command) -> str:
    """Return a command's line, changed so that bash runs traps meanwhile."""
    return f"{on_one_line(command.source)} {_WAITED_FOR}"


# Counts and GPUs


@rule
def cpus_for_srun(job: JobScript) -> Iterator[Found]:
    """cpus-per-task not passed to srun, which stopped inheriting it from the job in 22.05.

    Source: Slurm's changes: 22.05 removed it, 23.11 restored it.
    """
    if not (job.cpus_per_task or 0) > 1 or "SRUN_CPUS_PER_TASK" in job.file.script.exported:
        return
    for run, step in job.in_tasks:
        assert step
        if not run.trains or step.value("cpus-per-task", "cpus-per-gpu", "cpu-bind") is not None:
            continue
        if "SRUN_CPUS_PER_TASK" in dict(step.environment):
            continue
        typed_words = [option.source for option in step.options]
        typed_words += [word.text for word in step.program[:1]]  # a variable may hold options
        if not all(map(is_known, typed_words)):
            continue
        yield Found(
            step.command.line,
            False,
            f"srun of Slurm 22.05 to 23.02 does not inherit the job's --cpus-per-task="
            f"{job.cpus_per_task}: each task gets one CPU.",
            _with_cpus(job, step),
        )
        return


def _with_cpus(job: JobScript, step: SrunCommand) -> str:
    """Return the step's line with the job's CPUs: as srun's option, or exported before it."""
    source = on_one_line(step.command.source)
    fixed = re.sub(r"\bsrun\b", 'srun --cpus-per-task="$SLURM_CPUS_PER_TASK"', source, count=1)
    line = _in_line(job, step.command, fixed)
    if fixed != source:
        return line
    return f"export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK\n{line}"


@rule
def ntasks_product(job: JobScript) -> Iterator[Found]:
    """ntasks other than nodes x ntasks-per-node.

    Source: sbatch(1), --ntasks-per-node: a maximum if --ntasks is given; seen: more is refused.
    """
    directive = job.file.directive("ntasks")
    per_node = job.number(job.file.value("ntasks-per-node"))
    nodes = job.number(job.file.value("nodes"))
    ntasks = job.number(job.file.value("ntasks"))
    if not directive or not per_node or not nodes or not ntasks or ntasks == nodes * per_node:
        return
    product = nodes * per_node
    why = (
        f"{ntasks} tasks do not fit on {nodes} nodes with {per_node} each: sbatch refuses the job."
        if ntasks > product
        else f"{nodes} nodes with {per_node} tasks each make {product} tasks, but "
        f"--ntasks={ntasks} takes precedence."
    )
    yield Found(directive.line, True, why, _with_directive(directive, f"--ntasks={product}"))


def _with_directive(directive: Directive, option: str) -> str:
    """Return a directive's line with its option replaced and other options kept."""
    if directive.source in directive.text:
        return directive.text.replace(directive.source, option, 1)
    return f"#SBATCH {option}"


@rule
def gpus_per_task_count(job: JobScript) -> Iterator[Found]:
    """gpus-per-task without ntasks.

    Source: sbatch(1), --gpus-per-task: needs an explicit task count; seen: refused.
    """
    directive = job.file.directive("gpus-per-task")
    counts = ("ntasks", "gpus", "ntasks-per-node", "ntasks-per-gpu")
    if not directive or job.file.value(*counts) is not None:
        return
    why = (
        "sbatch refuses --gpus-per-task without a task count, unless the site adds one."
        if job.file.value("nodes") is None
        else "--gpus-per-task needs a task count; --nodes only implies one task per node."
    )
    yield Found(directive.line, False, why, f"#SBATCH --ntasks={job.nodes or 1}\n{directive.text}")


@rule
def gpu_bind_closest(job: JobScript) -> Iterator[Found]:
    """`--gpu-bind=closest` (or `single`) hides GPUs from the tasks.

    Source: srun(1), --gpu-bind; NCCL's documentation, GPU to GPU communication.
    """
    if _has_amd(job):
        return
    options = [each for each in job.file.directives if each.is_read]
    for option in (*options, *(each for step in job.file.steps for each in step.options)):
        value = option.value or ""
        text = job.line(option.line)
        kind = value.removeprefix("verbose,").partition(":")[0]
        if option.name == "gpu-bind" and kind in ("closest", "single"):
            why = (
                f"with {kind}, a task sees only some GPUs of its node: cuda:LOCAL_RANK may be "
                "hidden, and NCCL falls back to host memory."
            )
            yield Found(option.line, False, why, text.replace(value, "none"))
        elif option.name == "accel-bind" and "g" in value:
            why = "with --accel-bind=g, a task sees only the GPUs of its NUMA node."
            yield Found(option.line, False, why, " ".join(text.replace(option.source, "").split()))


def _has_amd(job: JobScript) -> bool:
    """Return whether the GPUs are AMD's, with which the closest binding does no harm."""
    for run in job.runs:
        names = [each.name for each in run.command.assignments]
        if any(name.startswith(("ROCM_", "ROCR_", "HIP_", "MIOPEN_")) for name in names):
            return True
        if run.texts[:1] in (("module",), ("ml",)) and "rocm" in " ".join(run.texts):
            return True
    return False


@rule
def local_rank_isolated(job: JobScript) -> Iterator[Found]:
    """LOCAL_RANK as the number of a GPU, although each task sees only its own GPU.

    Source: srun(1), --gpus-per-task; seen: each task has one device, number 0.
    """
    for run, step in job.in_tasks:
        tasks = job.step_tasks_per_node(step)
        each = step.value("gpus-per-task") or job.file.value("gpus-per-task")
        bind = step.value("gpu-bind", "tres-bind") or job.file.value("gpu-bind", "tres-bind") or ""
        per_gpu = step.value("ntasks-per-gpu") or job.file.value("ntasks-per-gpu")
        isolated = each is not None or per_gpu == "1" or bind.startswith(("single:1", "per_task:1"))
        shared = step.value("gres-flags") or job.file.value("gres-flags") or ""
        if "allow-task-sharing" in shared:
            continue  # each task sees the other tasks' GPUs, too
        if not isolated or bind == "none" or tasks == 1 or run.starts:
            continue
        script, named = job.python_of(run)
        line = script.local_rank_device if script else 0
        if script and line:
            yield Found(
                step.command.line,
                named and bool(tasks) and each == "1",
                f"each task sees one GPU, number 0, but {PurePath(script.name).name} selects the "
                f"GPU by local rank (line {line}).",
                f"#SBATCH --gpus-per-node={job.gpus_per_node or tasks or 'N'}  "
                "# instead of --gpus-per-task",
            )
        for assignment in run.command.assignments:
            if assignment.name == "CUDA_VISIBLE_DEVICES" and "SLURM_LOCALID" in {
                e.name for e in run.script.expanded(assignment.text)
            }:
                why = "Slurm already shows each task only its own GPU, as number 0."
                yield Found(run.line, bool(tasks), why, "# remove CUDA_VISIBLE_DEVICES")


@rule
def more_tasks_than_gpus(job: JobScript) -> Iterator[Found]:
    """More tasks per node than GPUs, although each task selects the GPU by local rank.

    Source: sbatch(1), --gpus-per-node, --gres; torch.cuda.set_device's documentation.
    """
    for run, step in job.in_tasks:
        script, named = job.python_of(run)
        tasks, gpus = job.step_tasks_per_node(step), job.visible_gpus(step)
        if not script or not named or run.starts or not tasks or not gpus or tasks <= gpus:
            continue
        if line := script.local_rank_device:
            at, right = _with_tasks(job, step, gpus)
            yield Found(
                at,
                True,
                f"each node has {tasks} tasks but {gpus} GPUs, and {PurePath(script.name).name} "
                f"selects the GPU by local rank (line {line}): {tasks - gpus} tasks get none.",
                right,
            )


def _with_tasks(job: JobScript, step: SrunCommand, each: int) -> tuple[int, str]:
    """Return the line that sets the task count, and its text with `each` tasks per node."""
    of_step = [option for option in step.options if option.name in ("ntasks", "ntasks-per-node")]
    total, per_node = job.file.directive("ntasks"), job.file.directive("ntasks-per-node")
    option = next((o for o in reversed(of_step) if o.name == "ntasks"), total or per_node)
    option = option or next(iter(of_step))
    count = each * (job.step_nodes(step) or 1) if option.name == "ntasks" else each
    return option.line, job.line(option.line).replace(option.source, f"--{option.name}={count}", 1)


# Reading by sbatch


@rule
def dos_line_ends(job: JobScript) -> Iterator[Found]:
    """DOS line endings.

    Source: sbatch's source, contains_dos_linebreak; seen: refused.
    """
    for line in job.file.dos_lines[:1]:
        count = len(job.file.dos_lines)
        more = f" and in {count - 1} more" if count > 1 else ""
        yield Found(
            line,
            True,
            f"DOS line ending (CR LF) in this line{more}: sbatch refuses the file. To remove them: "
            "sed -i 's/\\r$//' FILE",
            job.line(line),
        )


@rule
def unknown_option(job: JobScript) -> Iterator[Found]:
    """An option name that sbatch does not have but that resembles one that it has.

    Source: sbatch(1); seen: refused.
    """
    for directive in job.file.directives:
        near = sbatch_file.nearest_name(directive.name) if directive.is_read else ""
        if near:
            yield Found(
                directive.line,
                False,
                f"sbatch has no option --{directive.name}; it refuses the file unless a plugin of "
                "the site adds it.",
                directive.text.replace(f"--{directive.name}", f"--{near}", 1),
            )


@rule
def directive_below_command(job: JobScript) -> Iterator[Found]:
    """A directive after the first command.

    Source: sbatch(1): directives after the first non-comment line are not read.
    """
    read = {(each.name, each.value) for each in job.file.directives if each.is_read}
    below = [each for each in job.file.directives if not each.is_read]
    lines = {each.line: each.text for each in below if (each.name, each.value) not in read}
    if not lines:
        return
    texts = enumerate(job.file.lines, 1)
    first = next(n for n, text in texts if text.strip() and not text.lstrip().startswith("#"))
    numbers = ", ".join(map(str, lines))
    which = f"line {numbers} has" if len(lines) == 1 else f"lines {numbers} have"
    why = f"this is the first command, and sbatch reads no directives after it: {which} no effect."
    yield Found(first, True, why, "\n".join((*lines.values(), job.line(first))))


@rule
def export_none(job: JobScript) -> Iterator[Found]:
    """`--export=NONE`: the script's environment does not reach the tasks.

    Source: sbatch(1), --export, SLURM_EXPORT_ENV; seen: the tasks inherit nothing.
    """
    directive = job.file.directive("export")
    kept = job.file.script.variables.get("SLURM_EXPORT_ENV", "")
    unset = any(
        run.texts[:1] == ("unset",) and "SLURM_EXPORT_ENV" in run.texts for run in job.in_batch
    )
    if not (job.file.script.exported or _sets_up(job.file.script)):
        return
    for step in job.file.steps:
        value = step.value("export")
        if value is None and directive and not kept and not unset:
            value = directive.value
        if value in ("NONE", "NIL"):
            line = re.sub(r"\s--export[= ]\S+", "", on_one_line(step.command.source))
            yield Found(
                step.command.line,
                True,
                "with --export=NONE, srun starts the tasks without the variables and modules that "
                "this script sets.",
                _in_line(job, step.command, line.replace("srun", "srun --export=ALL", 1))
                if "srun" in line
                else f"export SLURM_EXPORT_ENV=ALL\n{job.line(step.command.line)}",
            )
            return


def _sets_up(script: Script) -> bool:
    names = {"module", "ml", "source", ".", "conda", "spack", "eval"}
    return any(each.texts[:1] and each.texts[0] in names for each in script.commands)


@rule
def log_overwritten(job: JobScript) -> Iterator[Found]:
    """A log that a requeue overwrites.

    Source: sbatch(1), --open-mode; slurm.conf(5), JobFileAppend.
    """
    directive = job.file.directive("requeue")
    if job.file.value("no-requeue") is not None or job.file.value("open-mode") == "append":
        return
    requeue = next((run for run in job.runs if _requeues(run)), None)
    if not directive and not requeue:
        return
    if job.file.value("output") == "/dev/null":
        return
    line = directive.line if directive else 1
    by = f" (line {requeue.line})" if requeue else ""
    why = f"a requeued job{by} truncates its log, so the earlier output is lost."
    yield Found(line, False, why, f"{job.line(line)}\n#SBATCH --open-mode=append")


def _requeues(run: Run) -> bool:
    return run.texts[:2] == ("scontrol", "requeue") or run.texts[:2] == ("scontrol", "requeuehold")


@rule
def array_requeue(job: JobScript) -> Iterator[Found]:
    """An array task requeued by the wrong id.

    Source: scontrol(1), requeue; seen: the last task's SLURM_JOB_ID is the array's.
    """
    if job.file.value("array") is None:
        return
    right = "scontrol requeue ${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"
    for run in job.runs:
        text = ""
        if _requeues(run):
            text = " ".join(run.script.with_sources(word) for word in run.texts[2:])
        elif run.texts[:1] == ("trap",) and "scontrol requeue" in " ".join(run.texts):
            text = " ".join(run.texts)
        if not text or "ARRAY_TASK_ID" in text:
            continue
        if "SLURM_ARRAY_JOB_ID" in text:
            yield Found(run.line, True, "SLURM_ARRAY_JOB_ID requeues every array task.", right)
        elif "SLURM_JOB_ID" in text or "SLURM_JOBID" in text:
            why = "in one array task SLURM_JOB_ID is the array's id, which requeues every task."
            yield Found(run.line, True, why, right)
