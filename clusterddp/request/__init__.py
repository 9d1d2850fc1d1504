"""What a user asks for: the job, its resources, the training, the site's settings."""
