"""The batch process of a job."""
