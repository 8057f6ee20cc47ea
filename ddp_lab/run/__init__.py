"""The construction of a run's parts from the config (job.py) and its execution (train.py)."""
