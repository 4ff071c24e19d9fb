"""Defines both ends of a rollout server: who puts rollouts, who learns from them, and how one is started."""
