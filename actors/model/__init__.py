"""Language models as workers run them: how they are loaded, what a step asks of them, how they are written."""
