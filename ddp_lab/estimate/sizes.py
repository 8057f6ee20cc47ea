"""Numbers of bytes as text."""


def describe_bytes(size: float) -> str:
    """Return a number of bytes with its unit: GiB, MiB or KiB."""
    unit, name = next((pair for pair in ((2**30, "GiB"), (2**20, "MiB")) if size >= 0.1 * pair[0]), (2**10, "KiB"))
    return f"{size / unit:,.2f} {name}"
