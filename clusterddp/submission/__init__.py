"""From a checked request to a job, and again from a run to its next job."""
