"""Find an entry, or build it; and a job's plan."""
