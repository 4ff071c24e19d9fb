"""The job of a user: `job.yaml`, its keys, and the schema that editors read."""
