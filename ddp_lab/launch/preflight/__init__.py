"""Checks of the machines before a run: host names, ports, the run directory, the disk.

train.py runs them before it opens the process group, and `ddp-lab doctor` reports all of them. Mistakes in the config
are reported by the code that reads it: the strategies, Plan, the datasets, RunDir.
"""
