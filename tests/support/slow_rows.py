"""Rows of a table of which the fast tests run some."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but(fast: Collection[Any], rows: Iterable[Any]) -> list[Any]:
    """Return the rows of a parametrized test, all marked slow but those in `fast`.

    A row is a value, or a tuple of the values of several parameters.

    Raises:
        ValueError: one of `fast` is not a row, so a test would be missing.
    """
    rows = list(rows)
    unknown = [row for row in fast if row not in rows]
    if unknown:
        raise ValueError(f"no rows of the table: {unknown}")
    return [row if row in fast else as_slow(row) for row in rows]


def as_slow(row: Any) -> Any:
    """Return a row, marked slow."""
    values = row if isinstance(row, tuple) else (row,)
    return pytest.param(*values, marks=pytest.mark.slow)
