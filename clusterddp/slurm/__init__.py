"""The Slurm client: its commands, the values they take and give, the job of this process.

Text comes from Slurm's commands and goes out as plain values; every call has a bound, because a
command waits 9 s and more for a slurmctld that is down. A run's own records are read elsewhere
(`run.status`): Slurm forgets a job MinJobAge (300 s) after its end.
"""
