"""What one rank computes for a part of the batch alone, from which causes are computed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ddp_lab.proof.batches import blocks, consecutive, strided
from ddp_lab.proof.evidence import Evidence, Part, Tensors

SCHEMES = {"consecutive": consecutive, "strided": strided}
Rows = tuple[int, ...]


@dataclass(frozen=True)
class Alone:
    """The results of one rank for some rows of the batch.

    Attributes:
        size: number of rows of the batch; 0: they cannot be selected.
        results: by the rows. Those for which the step has failed are missing.
    """

    size: int = 0
    results: Mapping[Rows, Tensors] = field(default_factory=dict[Rows, Tensors])

    def evidence(self, ranks: Sequence[Tensors]) -> Evidence:
        """Return the evidence about the results of some ranks."""
        if not self.size:
            return Evidence(ranks=ranks)
        divided = {
            scheme: self.parts_of(divide(self.size, len(ranks)))
            for scheme, divide in SCHEMES.items()
        }
        parts = {scheme: alone for scheme, alone in divided.items() if alone}
        return Evidence(ranks=ranks, parts=parts, blocks=self.parts_of(blocks(self.size)))

    def parts_of(self, divided: Sequence[Sequence[int]]) -> list[Part]:
        """Return the results of all parts of the batch; none if one is missing."""
        keys = [tuple(rows) for rows in divided]
        if any(key not in self.results for key in keys):
            return []
        return [Part(key, self.results[key]) for key in keys]


def rows_needed(size: int, world_sizes: Sequence[int]) -> list[Rows]:
    """Return the rows for which the step is run alone, the parts of the ranks first."""
    divided = [
        rows
        for world_size in sorted(world_sizes)
        if world_size <= size
        for divide in SCHEMES.values()
        for rows in divide(size, world_size)
    ]
    return list(dict.fromkeys(tuple(rows) for rows in [*divided, *blocks(size)]))
