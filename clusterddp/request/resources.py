"""Resources requested from Slurm, in its names and formats, checked at construction."""

from dataclasses import dataclass

from clusterddp.errors import OptionError, RequestError
from clusterddp.request.options import COUNT, SIZE, WHOLE, Choice, Record, check_fields, option
from clusterddp.slurm import forms
from clusterddp.slurm.forms import LINE


@dataclass(frozen=True, eq=False, repr=False)
class Resources(Record):
    """Nodes, GPUs, tasks, time and partition to request; empty or None means the site's default."""

    nodes: int = option(1, "Number of nodes.", SIZE, "--nodes -N")
    spare_nodes: int = option(0, "Idle nodes that replace failed ones.", WHOLE)
    gpus_per_node: int = option(
        0, "GPUs per node.", WHOLE, "--gpus-per-node SBATCH_GPUS_PER_NODE [TYPE:]N", type=str
    )
    gpu_type: str = ""
    gpu_directive: str = option(
        "gpus-per-node", "Directive for GPUs.", Choice(("gpus-per-node", "gres", "gpus-per-task"))
    )
    tasks_per_node: int = option(
        0, "Ranks per node.", SIZE, "--ntasks-per-node", shown="one per GPU, or one"
    )
    cpus_per_task: int | None = option(
        None, "CPUs per rank.", COUNT, "--cpus-per-task -c", shown="the site's"
    )
    mem: str = option(
        "",
        "Memory per node: 64G, 4000 (MB), 0 for all.",
        forms.MEMORY,
        "--mem SBATCH_MEM_PER_NODE SIZE",
    )
    time: str = option(
        "",
        "Time limit: 90 (minutes), 02:30:00 or 1-12 (d-h).",
        forms.TIME_LIMIT,
        "--time -t SBATCH_TIMELIMIT LIMIT",
    )
    partition: str = option(
        "",
        "Partitions, comma-separated.",
        forms.PARTITIONS,
        "--partition -p SBATCH_PARTITION NAMES",
    )
    account: str = option(
        "", "Account to charge.", forms.ACCOUNT, "--account -A SBATCH_ACCOUNT NAME"
    )
    qos: str = option("", "Quality of service.", forms.QOS, "--qos -q SBATCH_QOS NAME")
    constraint: str = option(
        "",
        "Required node features.",
        forms.CONSTRAINT,
        "--constraint -C SBATCH_CONSTRAINT FEATURES",
    )
    reservation: str = option(
        "", "Reservation to use.", forms.RESERVATIONS, "--reservation SBATCH_RESERVATION NAME"
    )
    switches: str = option(
        "",
        "Most leaf switches, with the minutes to wait for them: 2@60.",
        forms.SWITCHES,
        "--switches SBATCH_REQ_SWITCH COUNT[@TIME]",
    )
    nodelist: str = option(
        "", "Nodes that must be in the job: gpu[01-03].", names="--nodelist -w HOSTS"
    )
    exclude: str = option("", "Nodes that must not be in the job.", LINE, "--exclude -x HOSTS")
    dependency: str = option(
        "", "Jobs to wait for: afterok:1234.", forms.DEPENDENCY, "--dependency -d LIST"
    )
    exclusive: bool = option(
        False, "Do not share nodes with other jobs.", names="--exclusive SBATCH_EXCLUSIVE"
    )
    mail_type: str = option(
        "", "Events that send mail: END,FAIL.", forms.MAIL_EVENTS, "--mail-type EVENTS"
    )
    mail_user: str = option("", "Address for the mail.", forms.MAIL_USER, "--mail-user ADDRESS")

    def __post_init__(self) -> None:
        if self.tasks_per_node == 0:
            object.__setattr__(self, "tasks_per_node", self.gpus_per_node or 1)
        check_fields(self)
        self._check_gpus()
        self._check_hosts()

    def _check_gpus(self) -> None:
        """Raise OptionError if ranks cannot share the GPUs of a node evenly."""
        gpus, tasks = self.gpus_per_node, self.tasks_per_node
        problem = ""
        if gpus % tasks and self.gpu_directive == "gpus-per-task":
            problem = "--gpu-directive gpus-per-task needs the same number of GPUs for every task"
        elif 0 < gpus < tasks and tasks % gpus:
            problem = "GPUs would have different numbers of tasks"
        if gpus and problem:
            raise OptionError(
                f"--tasks-per-node {tasks}",
                f" conflicts with --gpus-per-node {gpus}: {problem}. Use one task per GPU (the "
                "default).",
            )

    def _check_hosts(self) -> None:
        """Raise OptionError if the hosts cannot all be in the job."""
        wanted, unwanted = {*_hosts("--nodelist", self.nodelist)}, _hosts("--exclude", self.exclude)
        if len(wanted) > self.job_nodes:
            more = f" and --spare-nodes for {self.spare_nodes} more" if self.spare_nodes else ""
            raise OptionError(
                f"--nodelist {self.nodelist}",
                f" names {len(wanted)} hosts, but --nodes requests {self.nodes}{more}: Slurm "
                f"allocates every listed host. Use --nodes {len(wanted) - self.spare_nodes} or a "
                "shorter list.",
            )
        if self.spare_nodes and len(wanted) == self.nodes:
            raise OptionError(
                f"--spare-nodes {self.spare_nodes}",
                f" conflicts with --nodelist {self.nodelist}, which leaves none of the hosts as a "
                "spare. List the spares too, or fewer hosts, or remove --nodelist.",
            )
        both = next((host for host in unwanted if host in wanted), None)
        if both:
            raise OptionError(
                f"--nodelist {self.nodelist}",
                f" and --exclude {self.exclude} both name {both}. Remove it from one of them.",
                code="CD0103",
            )

    @property
    def job_nodes(self) -> int:
        """Number of nodes to request from Slurm, including the spares."""
        return self.nodes + self.spare_nodes

    @property
    def num_tasks(self) -> int:
        """Number of ranks of the whole job (torch's world size)."""
        return self.nodes * self.tasks_per_node

    @property
    def layout(self) -> str:
        """Layout as text: `2 nodes x 4 tasks = 8 ranks, and 1 spare node`."""
        spares = self.spare_nodes
        counts = ((self.nodes, "node"), (self.tasks_per_node, "task"), (self.num_tasks, "rank"))
        nodes, tasks, ranks = (f"{n} {word}{'s' if n != 1 else ''}" for n, word in counts)
        more = f", and {spares} spare node{'s' if spares != 1 else ''}" if spares else ""
        return f"{nodes} x {tasks} = {ranks}{more}"


def _hosts(option: str, text: str) -> list[str]:
    try:
        return forms.expand_nodelist(text) if text else []
    except RequestError as error:
        raise OptionError(option, f": {error}", code=error.code) from None
