"""What a user is told without a traceback: what was wrong, the value, what is allowed, and what to do."""

from typing import Literal

# What ended a launch, for scripts: the field `kind` of failure.json. Its message is for people and may change.
FailureKind = Literal["lost_rank", "hang", "exception", "not_finite", "replicas_drifted", "checkpoint"]


class ConfigError(Exception):
    """A mistake in the config or the launch line. Every rank finds the same one, rank 0 reports it."""


class NodeError(ConfigError):
    """A mistake that only this machine may have (its devices, its files): the first rank of each machine reports it."""


class TrainingError(Exception):
    """Training cannot go on, and the message says why: nobody's mistake in the code, so no traceback.

    Raised on all ranks alike; `rank` is the one that it began on, which tells it.
    """

    def __init__(self, message: str, kind: FailureKind, rank: int = 0):
        super().__init__(message)
        self.kind: FailureKind = kind
        self.rank = rank
