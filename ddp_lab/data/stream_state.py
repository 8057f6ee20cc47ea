"""The state of a stream's dataset, by which a resume need not read again what was trained on.

It is the protocol of torchdata's StatefulDataLoader: `state_dict` after some samples, and
`load_state_dict` before an iteration that yields the next ones. A state is only kept of a dataset
that has shown that it does so: some lose samples, for example those in a shuffle buffer. Without a
state a resume counts: it reads the samples before again, and skips them.
"""

import base64
import io
import time
from typing import Any

import torch

from ddp_lab.config.errors import ConfigError, describe_error
from ddp_lab.data.stream import Position, Reader, fingerprint
from ddp_lab.data.trees import Tree, rows

# samples after its first state that a dataset with this state must yield again
TRIED = 8


class StateKeeper:
    """Keeps the states of a reader's dataset.

    Args:
        reader: from whose dataset they are.

    Attributes:
        problem: why there are none; "": there are some, or it is not known yet.
    """

    def __init__(self, reader: Reader):
        self.reader = reader
        self.problem = ""
        self._is_exact = False
        # of the samples after the first state, from a dataset with this state
        self._expected: list[str] = []
        self._first: Position | None = None
        self._kept_at = time.monotonic()
        methods = (
            getattr(reader.dataset, name, None) for name in ("state_dict", "load_state_dict")
        )
        if not all(map(callable, methods)):
            self.problem = "it has no state_dict and load_state_dict"

    @property
    def is_trying(self) -> bool:
        """Whether `compare` needs the next samples."""
        return bool(self._expected)

    def compare(self, sample: Any) -> None:
        """Compare a sample of the reader with that of a dataset with its first state."""
        number = self.reader.position.number - 1
        if self._fingerprint(self.reader, sample, number) != self._expected.pop(0):
            self._expected.clear()
            self.problem = (
                f"a dataset with its state does not yield sample {number} again, as after a "
                "shuffle buffer, whose samples are lost"
            )
        elif not self._expected:
            self._is_exact = True

    def keep(self) -> Position | None:
        """Return the position of the reader with a state, if one is due; else None."""
        now = time.monotonic()
        is_due = now - self._kept_at >= self.reader.stream.state_seconds
        if self.problem or self.is_trying or not is_due:
            return None
        self._kept_at = now
        position = self._position()
        if position is None or self._is_exact:
            return position
        self._begin_trial(position)
        return None

    def _position(self) -> Position | None:
        """Return the position with a state; None if there is none now."""
        try:
            state = self.reader.dataset.state_dict()
            if not state:
                return None
            return self.reader.position._replace(state=encode(state))
        except Exception as error:  # of the user
            self.problem = f"its state_dict cannot be saved: {describe_error(error)}"
            return None

    def _begin_trial(self, position: Position) -> None:
        """Read the samples after a state from another dataset."""
        reader = self.reader
        try:
            other = Reader(reader.stream, reader.index, position)
            numbers = range(position.number, position.number + TRIED)
            self._expected = [
                self._fingerprint(other, other.take(number), number) for number in numbers
            ]
            other.close()
        except Exception as error:  # of the user
            self._expected = []
            self.problem = f"it does not load its state: {describe_error(error)}"

    def _fingerprint(self, reader: Reader, sample: Any, number: int) -> str:
        stream = reader.stream
        parts: tuple[Tree, Tree] = rows(stream.collate([sample], number), torch.tensor(0))
        return fingerprint(parts)


def encode(state: Any) -> str:
    """Return a state as text.

    Raises:
        ConfigError: it has objects that are not loaded from files, which may come from others.
    """
    file = io.BytesIO()
    torch.save(state, file)
    text = base64.b64encode(file.getvalue()).decode()
    try:
        decode(text)
    except Exception:
        raise ConfigError(
            "it must consist of numbers, texts, tensors, and lists, tuples and dicts of them"
        ) from None
    return text


def decode(text: str) -> Any:
    """Return the state that a text was made of."""
    return torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)


def merge(states_by_rank: list[dict[str, list[Any]]]) -> list[Any]:
    """Return for each reader its number and the position with a state after most samples.

    Args:
        states_by_rank: of each rank the positions of its readers, by their numbers.
    """
    merged: dict[str, list[Any]] = {}
    for states in states_by_rank:
        for reader, position in states.items():
            if reader not in merged or position[0] > merged[reader][0]:
                merged[reader] = position
    return [*merged.items()]
