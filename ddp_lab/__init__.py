"""Train one model with any distribution strategy, with the same result.

The library is seven names; everything else may change:

Lab         the ranks that torchrun or `launch` has started, and trainers of models on them
launch      starts ranks from a script or a notebook
gather      the outputs of the global batch, for a loss that compares its samples
own_rows    which of them are those of this rank
Hook        what a training calls between its steps, the base class of callbacks
tasks       what a model can be trained for, with its loss and its metrics
verify      whether a step of your own computes on several ranks what it computes on one

The subpackages from the lowest layer up; each imports only from those before it
(tests/test_layout.py):

config      the keys that a user can set, their validation, and the error messages
world       the distributed environment of this process: rank, device, process group
observe     the output of a run: log, trackers, plots, profiles
data        datasets, and which rank reads which sample
models      networks as chains of blocks
tasks       losses with weights, and metrics as sums
strategies  one file for each way of distributing a training step over devices
training    the loop, its step and schedule
speed       how a step is executed: captured, compiled, fused
checkpoints what a checkpoint holds, how it is written and verified, and which one is resumed
resilience  the watchdog, preemption, the run directory
lab         the library
launchers   the start of a run: command line, preflight checks, sweeps, Slurm
run         construction of the parts of a run, and its execution
advise      what a run would need, from real steps on fake tensors, and what to use in place of it
eject       a run as one file of plain PyTorch, from templates
proof       the comparison of any number of ranks with one, and the cause of a difference
exercises   the mechanisms as exercises, which check themselves
commands    the commands of `ddp-lab`, one file each; `__main__.py` chooses the command
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_lab import tasks
    from ddp_lab.lab.lab import Lab
    from ddp_lab.lab.launch import launch
    from ddp_lab.proof.foreign import verify
    from ddp_lab.strategies.gathering import gather, own_rows
    from ddp_lab.training.hooks import Hook

__all__ = ["Hook", "Lab", "gather", "launch", "own_rows", "tasks", "verify"]

MODULES = {
    "Hook": "ddp_lab.training.hooks",
    "Lab": "ddp_lab.lab.lab",
    "gather": "ddp_lab.strategies.gathering",
    "launch": "ddp_lab.lab.launch",
    "own_rows": "ddp_lab.strategies.gathering",
    "verify": "ddp_lab.proof.foreign",
}


def __getattr__(name: str) -> Any:
    """Import one of the names when it is first used.

    They import torch, which `ddp-lab --help` does not need.
    """
    if name in MODULES:
        return getattr(importlib.import_module(MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
