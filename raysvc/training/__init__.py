"""The trainer of `raysvc train`: loop, run folder, evaluation, figures."""
