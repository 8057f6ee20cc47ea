"""Parts of a batch of any form, as ranks would get them."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor
from torch.utils.data import Subset

# Blocks of the batch for which a gradient is computed alone: the most that are worth their time.
MOST_BLOCKS = 32


def size_of(batch: Any) -> int | None:
    """Return the number of samples of a batch; None: it has none that can be selected.

    A batch is a tensor, a mapping or a sequence of tensors with the same first dimension, a list of
    samples, or a map-style dataset.
    """
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.dim() else None
    tensors = tensors_of(batch)
    if tensors is not None:
        sizes = {tensor.shape[0] for tensor in tensors if tensor.dim()}
        return sizes.pop() if len(sizes) == 1 else None
    if isinstance(batch, (Mapping, str, bytes)) or not hasattr(batch, "__getitem__"):
        return None
    try:
        return len(batch)
    except TypeError:
        return None


def tensors_of(batch: Any) -> list[Tensor] | None:
    """Return the tensors of a batch that is a mapping or a sequence of them; otherwise None."""
    values = list[Any]()
    if isinstance(batch, Mapping):
        values = list(cast("Mapping[Any, Any]", batch).values())
    elif isinstance(batch, (tuple, list)):
        values = list(cast("Sequence[Any]", batch))
    if values and all(isinstance(value, Tensor) for value in values):
        return values
    return None


def select(batch: Any, rows: Sequence[int]) -> Any:
    """Return a batch of the same form with some of the rows."""
    if isinstance(batch, Tensor):
        return batch[list(rows)] if batch.dim() else batch
    if tensors_of(batch) is not None:
        if isinstance(batch, Mapping):
            pairs = cast("Mapping[Any, Any]", batch).items()
            return {key: select(value, rows) for key, value in pairs}
        values = [select(value, rows) for value in batch]
        if isinstance(batch, tuple) and hasattr(batch, "_fields"):
            return type(batch)(*values)
        return tuple(values) if isinstance(batch, tuple) else values
    if isinstance(batch, (list, tuple)):
        return [cast("Sequence[Any]", batch)[row] for row in rows]
    return Subset(batch, rows)


def consecutive(size: int, ranks: int) -> list[list[int]]:
    """Return the rows of each rank if ranks get consecutive rows, the first ones one row more."""
    least, rest = divmod(size, ranks)
    starts = [rank * least + min(rank, rest) for rank in range(ranks + 1)]
    return [list(range(starts[rank], starts[rank + 1])) for rank in range(ranks)]


def strided(size: int, ranks: int) -> list[list[int]]:
    """Return the rows of each rank if rank r gets rows r, r + ranks, r + 2 ranks, ..."""
    return [list(range(rank, size, ranks)) for rank in range(ranks)]


def blocks(size: int) -> list[list[int]]:
    """Return the rows one by one, or consecutive blocks of equal size if they are many."""
    return consecutive(size, min(size, MOST_BLOCKS))


def rows_text(rows: Sequence[int]) -> str:
    """Return numbers of rows for a message: "row 3" or "rows 0-3, 6"."""
    spans = list[list[int]]()
    for row in sorted(rows):
        if spans and spans[-1][1] == row - 1:
            spans[-1][1] = row
        else:
            spans.append([row, row])
    texts = [f"{first}-{last}" if last > first else f"{first}" for first, last in spans]
    return f"{'row' if len(rows) == 1 else 'rows'} {', '.join(texts)}"
