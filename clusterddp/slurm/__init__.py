"""Client for Slurm's commands: calls, value formats, and the job of this process.

It turns the commands' output into plain values. Every call has a timeout, because a command waits
9 s or more for a slurmctld that is down. Slurm forgets a job MinJobAge (300 s) after its end, so
`run.status` reads a run's own records.
"""
