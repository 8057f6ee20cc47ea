"""The start of a run: reports of command-line errors, preflight checks, sweeps, Slurm."""
