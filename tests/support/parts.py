"""Parts of the slow tests, one of which a run of the gate takes."""

from collections.abc import Sequence

import pytest

# whose slow tests belong to every part: what proves the invariants
IN_EVERY_PART = ("test_equivalence.py",)


def read_part(text: str) -> tuple[int, int]:
    """Return number and count of `--part NUMBER/COUNT`.

    Raises:
        UsageError: it is no such text, or there is no part of this number.
    """
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise pytest.UsageError(f"--part {text}: must be NUMBER/COUNT, from 1/COUNT to COUNT/COUNT")
    return int(number), int(count)


def files_of_part(files: Sequence[str], part: tuple[int, int]) -> set[str]:
    """Return the files whose slow tests belong to a part.

    Files take turns, so that the parts take equally long where `files` begins with the longest.

    Args:
        files: names of all files with slow tests.
        part: as from `read_part`.
    """
    number, count = part
    divided = [name for name in files if name not in IN_EVERY_PART]
    return {*divided[number - 1 :: count], *IN_EVERY_PART}


def divide(
    items: Sequence[pytest.Item], part: tuple[int, int]
) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return the items that belong to a part, and the others.

    Fast tests belong to every part.

    Args:
        items: of all files, those that take longest first.
        part: as from `read_part`.
    """
    slow = [item for item in items if item.get_closest_marker("slow")]
    # Extra tests must not decide in which part a file is.
    lasting = [item for item in slow if not item.get_closest_marker("extra")]
    names = files_of_part(list(dict.fromkeys(item.path.name for item in lasting)), part)
    others = [item for item in slow if item.path.name not in names]
    left_out = {*others}
    return [item for item in items if item not in left_out], others
