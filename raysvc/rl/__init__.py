"""Groups of rollouts and their advantages."""
