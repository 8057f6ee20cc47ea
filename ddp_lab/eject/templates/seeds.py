"""Seeds by what is drawn."""

import hashlib


def seed_of(text: str) -> int:
    """Return the seed of what is drawn for `text`: the first 32 bits of its SHA-256."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
