"""Train one model with any distribution strategy, with the same result.

The subpackages from the lowest layer up; each imports only from those before it (tests/test_layout.py):

config      the keys that a user can set, their validation, and the error messages
world       the distributed environment of this process: rank, device, process group
observe     the output of a run: log, TensorBoard, plots, profiles
models      networks as chains of blocks
data        datasets, and which rank reads which sample
strategies  one file for each way of distributing a training step over devices
training    the loop, its step and schedule
speed       how a step is executed: captured, compiled, fused
checkpoints what a checkpoint holds, how it is written and verified, and which one a launch resumes from
resilience  the watchdog, preemption, the run directory
launch      the start of a run: command line, preflight checks, sweeps, Slurm
run         construction of the parts of a run, and its execution
advise      what a run would need, from real steps on fake tensors, and what to use in place of it
commands    the commands of `ddp-lab`, one file each; `__main__.py` chooses the command
"""
