"""Which errors of a rank only follow from the end of another rank, whose error is the first cause.

A rank that ends closes its connections, and with them the store that it keeps. The ranks that wait
for it then raise errors of the network, often before it has reported its own. Such errors wait, and
come last when the first one is chosen.
"""

from typing import TypedDict

from ddp_lab.config.errors import ConfigError, SampleError, TrainingError, describe_error

# Seconds for which a rank waits before it reports an error that another rank most likely causes, or
# reports, too. The launcher ends it meanwhile, as soon as that rank exits.
WAIT_FOR_CAUSE = 5.0
# The base class of torch's errors of stores, networks and backends. It is known by name, because
# importing torch takes 1.5 s.
NETWORK_TYPE = "DistError"
# Errors of gloo, NCCL and sockets have no type of their own; they are known by their texts.
NETWORK_TEXTS = (
    "Connection closed by peer",
    "Connection reset",
    "Connection refused",
    "Broken pipe",
    "Socket Timeout",
    "NCCL",
    "gloo",
    "TCPStore",
    "DistNetworkError",
)
# Errors whose texts say all that a user needs.
WITHOUT_TRACEBACK = (ConfigError, SampleError, TrainingError)


class OtherRankError(Exception):
    """An exception of another rank, in one line: rank, type, text, and place in the user's code."""


class Record(TypedDict):
    """An exception as the ranks pass it on through their store.

    Attributes:
        error: what is wrong.
        is_config: whether it is a ConfigError.
    """

    error: str
    is_config: bool


def to_record(error: BaseException, rank: int) -> Record:
    """Return an exception that this rank, `rank`, has raised, as the other ranks get it."""
    if isinstance(error, (*WITHOUT_TRACEBACK, OtherRankError)):
        text = str(error)
    else:
        text = f"rank {rank} raised {describe_error(error)}"
    return {"error": text, "is_config": isinstance(error, ConfigError)}


def from_record(record: Record) -> Exception:
    """Return the exception to raise for another rank's; it never hides that rank's own report."""
    return ConfigError(record["error"]) if record["is_config"] else OtherRankError(record["error"])


def is_secondary(error: BaseException) -> bool:
    """Return whether an error most likely follows from the end of another rank.

    That is an error of the network, also one that was raised while such an error was handled. If no
    rank reports another one, it is shown nevertheless.
    """
    if isinstance(error, WITHOUT_TRACEBACK):
        return False
    before: BaseException | None = error
    while before is not None:
        if is_of_network(before):
            return True
        before = before.__cause__ or (None if before.__suppress_context__ else before.__context__)
    return False


def is_of_network(error: BaseException) -> bool:
    """Return whether an error stands for another rank's, or is one of connections between ranks."""
    if isinstance(error, OtherRankError):
        return True
    has_type = NETWORK_TYPE in [kind.__name__ for kind in type(error).__mro__]
    return has_type or any(text in str(error) for text in NETWORK_TEXTS)
