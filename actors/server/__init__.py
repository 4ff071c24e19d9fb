"""The batch server and the rollout server."""
