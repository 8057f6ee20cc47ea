"""The launchers as Hydra plug-ins: Hydra looks only in packages called hydra_plugins, and only at classes defined there."""

from ddp_lab.launch import slurm, torchrun


class TorchrunLauncher(torchrun.TorchrunLauncher):
    """The launcher of hydra/launcher=torchrun."""


class SlurmLauncher(slurm.SlurmLauncher):
    """The launcher of hydra/launcher=slurm."""
