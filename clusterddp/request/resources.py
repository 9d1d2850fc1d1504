"""What Slurm is asked to allocate: nodes, GPUs, tasks, time, and where.

Checked when it is built, so that the code after it can trust it. Fields carry Slurm's names and
forms.
"""

from dataclasses import dataclass

from clusterddp.errors import RequestError
from clusterddp.request.options import COUNT, WHOLE, Choice, check_fields, option
from clusterddp.slurm.forms import (
    ACCOUNT,
    CONSTRAINT,
    DEPENDENCY,
    MAIL_EVENTS,
    MAIL_USER,
    MEMORY,
    PARTITIONS,
    QOS,
    RESERVATIONS,
    TIME_LIMIT,
)


@dataclass(frozen=True)
class Resources:
    """What Slurm is asked to allocate. An empty string or None leaves the choice to the site."""

    nodes: int = option(1, "Number of nodes.", COUNT, "--nodes -N")
    gpus_per_node: int = option(
        0,
        "GPUs on each node.",
        WHOLE,
        "--gpus-per-node SBATCH_GPUS_PER_NODE [TYPE:]N",
        type=str,
    )
    gpu_type: str = ""
    gpu_request: str = option(
        "gpus-per-node",
        "Directive that asks for the GPUs; sites differ.",
        Choice(("gpus-per-node", "gres", "gpus-per-task")),
    )
    tasks_per_node: int = option(
        0,
        "Ranks on each node.",
        COUNT,
        "--ntasks-per-node",
        shown="one per GPU, or one",
    )
    cpus_per_task: int | None = option(
        None, "CPUs for each rank.", COUNT, "--cpus-per-task -c", shown="the site's"
    )
    mem: str = option(
        "",
        "Memory of each node, such as 64G; 0 is all of it.",
        MEMORY,
        "--mem SBATCH_MEM_PER_NODE SIZE",
    )
    time: str = option(
        "",
        "Wall-clock limit, such as 90, 02:30:00 or 1-12.",
        TIME_LIMIT,
        "--time -t SBATCH_TIMELIMIT LIMIT",
    )
    partition: str = option(
        "", "Partition, or several with commas.", PARTITIONS, "--partition -p SBATCH_PARTITION"
    )
    account: str = option("", "Account to charge.", ACCOUNT, "--account -A SBATCH_ACCOUNT NAME")
    qos: str = option("", "Quality of service.", QOS, "--qos -q SBATCH_QOS NAME")
    constraint: str = option(
        "",
        "Features that nodes must have.",
        CONSTRAINT,
        "--constraint -C SBATCH_CONSTRAINT FEATURES",
    )
    reservation: str = option(
        "", "Reservation to use.", RESERVATIONS, "--reservation SBATCH_RESERVATION NAME"
    )
    nodelist: str = option(
        "", "Hosts that must be in the job: gpu[01-03].", names="--nodelist -w HOSTS"
    )
    exclude: str = option("", "Hosts that must not be in the job.", names="--exclude -x HOSTS")
    dependency: str = option(
        "", "Jobs to wait for, such as afterok:1234.", DEPENDENCY, "--dependency -d LIST"
    )
    exclusive: bool = option(
        False, "Share no node with other jobs.", names="--exclusive SBATCH_EXCLUSIVE"
    )
    mail_type: str = option(
        "", "Events to mail about, such as END,FAIL.", MAIL_EVENTS, "--mail-type EVENTS"
    )
    mail_user: str = option("", "Address to mail to.", MAIL_USER, "--mail-user ADDRESS")

    def __post_init__(self) -> None:
        if self.tasks_per_node == 0:
            object.__setattr__(self, "tasks_per_node", self.gpus_per_node or 1)
        check_fields(self)
        if self.gpus_per_node and self.gpus_per_node % self.tasks_per_node:
            relation = (
                "more tasks than GPUs"
                if self.tasks_per_node > self.gpus_per_node
                else ("the GPUs cannot be shared out evenly")
            )
            raise RequestError(
                f"--tasks-per-node {self.tasks_per_node} against --gpus-per-node "
                f"{self.gpus_per_node}: {relation}. Use one task per GPU (the default).",
                option="--tasks-per-node",
            )
        self._check_hosts()

    def _check_hosts(self) -> None:
        if not (self.nodelist or self.exclude):
            return
        from clusterddp.slurm.hostlist import expand_nodelist

        wanted = expand_nodelist(self.nodelist) if self.nodelist else []
        unwanted = set(expand_nodelist(self.exclude)) if self.exclude else set()
        if len(set(wanted)) > self.nodes:
            raise RequestError(
                f"--nodelist {self.nodelist} names {len(set(wanted))} hosts, but --nodes asks for "
                f"{self.nodes}: Slurm gives a job every host of its list. Use --nodes "
                f"{len(set(wanted))} or a shorter list.",
                option="--nodelist",
            )
        both = [host for host in wanted if host in unwanted]
        if both:
            raise RequestError(
                f"--nodelist {self.nodelist} and --exclude {self.exclude} both name {both[0]}.",
                option="--nodelist",
            )

    @property
    def num_tasks(self) -> int:
        """The number of ranks of the whole job (torch's world size)."""
        return self.nodes * self.tasks_per_node
