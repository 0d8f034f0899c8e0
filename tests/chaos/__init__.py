"""Groups of real processes, each of which loses a rank at a random moment: ``python -m tests.chaos --faults 200``."""
