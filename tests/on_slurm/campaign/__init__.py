"""The fault campaign: a real Slurm of several hosts does to a run everything that clusters do.

Every fault is a row of a table: a run is started, struck, shown to have been struck, shown to have
trained on, and held against the weights of an uninterrupted run, bit for bit.

    python -m tests.on_slurm.campaign --list
    python -m tests.on_slurm.campaign --data-dir ../shared/data
    python -m tests.on_slurm.campaign signal-before-limit 'kill-*'
    python -m tests.on_slurm.campaign --random 20 --seed 7
    python -m tests.on_slurm.campaign --random 40 --of memory

Read in this order: `fault` (what a row is), `run` (a run as a fault sees it), `place` (where runs
live), a file of faults (`stops`, `ranks`, …), `__main__`.
"""

from tests.on_slurm.campaign import (  # noqa: F401 -- each registers its rows
    files,
    loops,
    memory,
    network,
    nodes,
    pairs,
    ranks,
    slow,
    spares,
    stops,
    submissions,
)
from tests.on_slurm.campaign.fault import FAULTS as FAULTS_OF_ALL_SUBJECTS

__all__ = ["FAULTS_OF_ALL_SUBJECTS"]
