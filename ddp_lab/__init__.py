"""Train one model under any way of spreading it over devices, with the same result.

Rooms, from the bottom up; each imports only from those before it (tests/test_layout.py):

config      what a user may set, and the errors for what they may not
world       this process among the others: rank, device, process group
observe     what a run shows: log, TensorBoard, plots, profiles
models      networks as chains of blocks
data        datasets, and which rank reads which sample
strategies  one file for each way of spreading a training step
training    the loop, its step and schedule; `training/speed` makes the step faster
resilience  checkpoints, the watchdog, preemption, the run directory
launch      starting: command line, preflight, sweeps, Slurm
run         puts them together: the parts of a run, and its life

`doctor.py` is the command that checks a machine before a run.
"""
