"""What Slurm is asked to allocate: nodes, GPUs, tasks, time, and where.

Checked when it is built, so that the code after it can trust it. Fields carry Slurm's names and
forms.
"""

from dataclasses import dataclass

from clusterddp.errors import RequestError
from clusterddp.slurm import forms

GPU_REQUESTS = ("gpus-per-node", "gres", "gpus-per-task")


@dataclass(frozen=True)
class Resources:
    """What Slurm is asked to allocate. An empty string or None leaves the choice to the site."""

    nodes: int = 1
    gpus_per_node: int = 0
    gpu_type: str = ""
    gpu_request: str = "gpus-per-node"
    """Which directive asks for the GPUs: gpus-per-node, gres or gpus-per-task."""
    tasks_per_node: int = 0
    """Ranks on each node; 0 is resolved to one per GPU, or to one."""
    cpus_per_task: int | None = None
    """CPUs for each rank."""
    mem: str = ""
    """Memory of each node, such as 64G."""
    time: str = ""
    """Wall-clock limit, such as 1-02:30:00."""
    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    reservation: str = ""
    nodelist: str = ""
    exclude: str = ""
    dependency: str = ""
    exclusive: bool = False
    mail_type: str = ""
    mail_user: str = ""

    def __post_init__(self) -> None:
        forms.positive("--nodes", self.nodes)
        if self.gpus_per_node < 0:
            raise RequestError(f"--gpus-per-node: {self.gpus_per_node} is negative.")
        if self.gpu_request not in GPU_REQUESTS:
            raise RequestError(
                f"--gpu-request: {self.gpu_request!r} is not one of {', '.join(GPU_REQUESTS)}."
            )
        if self.tasks_per_node == 0:
            object.__setattr__(self, "tasks_per_node", self.gpus_per_node or 1)
        forms.positive("--tasks-per-node", self.tasks_per_node)
        if self.cpus_per_task is not None:
            forms.positive("--cpus-per-task", self.cpus_per_task)
        if self.gpus_per_node and self.gpus_per_node % self.tasks_per_node:
            relation = (
                "more tasks than GPUs"
                if self.tasks_per_node > self.gpus_per_node
                else ("the GPUs cannot be shared out evenly")
            )
            raise RequestError(
                f"--tasks-per-node {self.tasks_per_node} against --gpus-per-node "
                f"{self.gpus_per_node}: {relation}. Use one task per GPU (the default)."
            )
        if self.mem:
            forms.memory("--mem", self.mem)
        if self.time:
            forms.time_limit("--time", self.time)
        if self.dependency:
            forms.dependency("--dependency", self.dependency)
        if self.mail_type:
            forms.mail_type("--mail-type", self.mail_type)
        for option, value, pattern, example in (
            ("--partition", self.partition, forms.NAMES, "gpu or gpu,long"),
            ("--account", self.account, forms.NAME, "physics"),
            ("--qos", self.qos, forms.NAME, "normal"),
            ("--constraint", self.constraint, forms.CONSTRAINT, "a100&nvlink"),
            ("--reservation", self.reservation, forms.NAMES, "maintenance"),
            ("--mail-user", self.mail_user, forms.MAIL_USER, "me@example.org"),
        ):
            if value:
                forms.matching(option, value, pattern, example)
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
                f"{len(set(wanted))} or a shorter list."
            )
        both = [host for host in wanted if host in unwanted]
        if both:
            raise RequestError(
                f"--nodelist {self.nodelist} and --exclude {self.exclude} both name {both[0]}."
            )

    @property
    def num_tasks(self) -> int:
        """The number of ranks of the whole job (torch's world size)."""
        return self.nodes * self.tasks_per_node
