"""The construction of a run's parts from the config (build.py), its execution (train.py), and what is done with a trained run."""
