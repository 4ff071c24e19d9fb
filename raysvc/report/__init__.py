"""One self-contained HTML page about an entry, a plan and a run."""
