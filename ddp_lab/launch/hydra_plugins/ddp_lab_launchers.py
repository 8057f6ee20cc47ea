"""How Hydra finds the launchers: it takes plug-ins from a package of this name only, and only what is defined there."""

from ddp_lab.launch import slurm, torchrun


class TorchrunLauncher(torchrun.TorchrunLauncher):
    """hydra/launcher=torchrun"""


class SlurmLauncher(slurm.SlurmLauncher):
    """hydra/launcher=slurm"""
