"""The syntax of an injected fault: KIND@rank=R,step=S."""

import re

KINDS = ("crash", "segfault", "raise", "exit", "hang", "slow", "nan", "sigterm", "disk_full")


def parse(text: str) -> tuple[str, int, int] | None:
    """Return kind, rank and step; None if `text` does not have this form or the kind is unknown."""
    match = re.fullmatch(r"(\w+)@rank=(\d+),step=([1-9]\d*)", text)
    return (match[1], int(match[2]), int(match[3])) if match and match[1] in KINDS else None
