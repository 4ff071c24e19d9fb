"""What a run is measured on beside its training rows, and what follows from it."""
