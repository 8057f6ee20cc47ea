"""A run from its config to its end: its parts (job.py) and its life (train.py). Nothing but wiring here."""
