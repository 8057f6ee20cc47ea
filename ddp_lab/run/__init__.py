"""A run from its config to its end: construction of its parts (job.py) and execution (train.py)."""
