"""Launching runs: command-line errors, preflight checks, sweeps, Slurm."""
