"""The type of `--partition`: a name or several with commas, completed from the live cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class PartitionName(click.types.StringParamType):
    """Text; where a Slurm answers, its partitions are offered for completion."""

    name = "partition"

    def shell_complete(
        self,
        ctx: click.Context,
        param: click.Parameter,
        incomplete: str,
    ) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        from clusterddp.slurm.queries import partitions

        before, comma, last = incomplete.rpartition(",")
        return [
            CompletionItem(f"{before}{comma}{name}")
            for name in partitions()
            if name.startswith(last) and name not in before.split(",")
        ]


PARTITION = PartitionName()
