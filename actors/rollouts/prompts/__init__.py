"""The prompts that a rollout server hands out: where they come from, what became of them, and the desk between."""
