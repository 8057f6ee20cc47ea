"""Errors that are shown without a traceback: what is wrong, the value, what is allowed, and what to do."""

from typing import Literal

# The values of the field `kind` of failure.json, from which scripts read why a launch failed. The text in its field `message`
# is for people and may change.
FailureKind = Literal["lost_rank", "hang", "exception", "not_finite", "replicas_drifted", "checkpoint"]


class ConfigError(Exception):
    """A mistake in the config or on the command line. It is raised on every rank; rank 0 reports it."""


class NodeError(ConfigError):
    """A problem of one machine (its devices, its files). The first rank of each machine reports it."""


class TrainingError(Exception):
    """Training cannot continue, for a reason that is not a bug. The message explains it, so no traceback is shown.

    It is raised on all ranks.

    Args:
        message: What is wrong, and what to do.
        kind: The field `kind` of failure.json.
        rank: The rank on which the problem began; it reports the error.
    """

    def __init__(self, message: str, kind: FailureKind, rank: int = 0):
        super().__init__(message)
        self.kind: FailureKind = kind
        self.rank = rank
