"""The request for a run: the job, its resources, the training, the site's settings."""
