"""How a fault to inject is written: KIND@rank=R,step=S."""

import re

KINDS = ("crash", "segfault", "raise", "exit", "hang", "slow", "nan", "sigterm", "disk_full")


def parse(word: str) -> tuple[str, int, int] | None:
    """Kind, rank and step; None where it is no injection."""
    match = re.fullmatch(r"(\w+)@rank=(\d+),step=([1-9]\d*)", word)
    return (match[1], int(match[2]), int(match[3])) if match and match[1] in KINDS else None
