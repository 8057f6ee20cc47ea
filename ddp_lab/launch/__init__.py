"""Starting: the command line and its errors, checks before a run, sweeps, Slurm."""
