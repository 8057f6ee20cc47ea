"""The strategies that copy the model to every rank or shard it, with numbers of ranks."""

from typing import Any

# (strategy, number of ranks, options of the strategy)
REPLICATING: list[tuple[str, int, dict[str, Any]]] = [
    (strategy, ranks, options)
    for strategy, options in (
        ("scratch", {}),
        ("scratch", {"algorithm": "bucketed"}),
        ("ddp", {}),
        ("fsdp", {}),
    )
    for ranks in (2, 3)
]
