"""The rollout server: groups that producers put, kept in a log and formed into steps."""
