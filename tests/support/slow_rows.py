"""Rows of the table of a parametrized test that only some of the suites run."""

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
    return [row if row in fast else marked(row, "slow") for row in rows]


def slow(rows: Iterable[Any]) -> list[Any]:
    """Return the rows, each marked slow. A row is as in `slow_but`."""
    return [marked(row, "slow") for row in rows]


def extra(rows: Iterable[Any]) -> list[Any]:
    """Return the rows, each marked extra. A row is as in `slow_but`."""
    return [marked(row, "extra") for row in rows]


def marked(row: Any, mark: str) -> Any:
    """Return a row with a mark."""
    values = row if isinstance(row, tuple) else (row,)
    return pytest.param(*values, marks=getattr(pytest.mark, mark))
