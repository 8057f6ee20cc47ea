"""Random numbers of a user's step, the same for any number of ranks.

Every rank draws the numbers of the GLOBAL batch and takes the rows of its samples.
"""

import torch

from ddp_lab.config.errors import ConfigError
from ddp_lab.data.seeds import seed_of
from ddp_lab.strategies.base import Strategy


class Draws:
    """The random numbers that a loop draws for its batches.

    Args:
        strategy: of the trainer.
        batch_size: samples in the GLOBAL batch.
        seed: of the Lab.
        number: of the trainer in its Lab.
    """

    def __init__(self, strategy: Strategy, batch_size: int, seed: int, number: int):
        self.strategy = strategy
        self.batch_size = batch_size
        self.seed = seed
        self.number = number
        # the step for which the random numbers of a name were drawn last
        self._drawn: dict[str, int] = {}

    def randn(self, shape: tuple[int, ...], name: str, step: int) -> torch.Tensor:
        """Return rows of normally distributed numbers that are drawn for the GLOBAL batch.

        Args:
            shape: [b, ...] of this rank.
            name: of what is drawn, once in a step.
            step: number of the step.

        Raises:
            ConfigError: there are more rows than samples, or the name was drawn before.
        """
        strategy = self.strategy
        most = self.batch_size // strategy.dp_size
        if not shape or not 0 <= shape[0] <= most:
            raise ConfigError(
                f"randn: got the shape {list(shape)}, expected [b, ...] with a row for each sample "
                f"of this rank, at most {most}"
            )
        if self._drawn.get(name) == step:
            raise ConfigError(
                f"randn: name={name} was drawn in this step before, and would be the same numbers. "
                "Use another name"
            )
        self._drawn[name] = step
        key = seed_of(f"randn {name}", seed=self.seed, trainer=self.number, step=step)
        generator = torch.Generator().manual_seed(key)
        drawn = torch.randn(self.batch_size, *shape[1:], generator=generator)
        return drawn[strategy.dp_rank :: strategy.dp_size][: shape[0]].to(strategy.device)
