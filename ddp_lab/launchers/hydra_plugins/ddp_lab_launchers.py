"""The launchers as Hydra plug-ins: Hydra finds only classes that are defined in a package called hydra_plugins."""

from ddp_lab.launchers import slurm, torchrun


class TorchrunLauncher(torchrun.TorchrunLauncher):
    """The launcher of hydra/launcher=torchrun."""


class SlurmLauncher(slurm.SlurmLauncher):
    """The launcher of hydra/launcher=slurm."""
