"""What is known of a comparison beside the two results, and what a hypothesis asks of it."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ddp_lab.proof.numbers import constant_factor, is_equal

Tensors = Mapping[str, Tensor]
# "step 2/layer.weight" is the tensor layer.weight after the second step.
STEP = re.compile(r"^((?:step|epoch)[ _]?)(\d+)(/.*)$")
MOST_ELEMENTS = 2000  # of a tensor, from which coefficients are computed
SMALLEST = 1e-7  # relative; below it columns count as dependent


@dataclass(frozen=True)
class Part:
    """What one rank computes for some rows of the batch alone.

    Attributes:
        rows: their numbers.
        tensors: the result.
    """

    rows: Sequence[int]
    tensors: Tensors


@dataclass(frozen=True)
class Evidence:
    """What may be known beside the result of one rank and that of several.

    Attributes:
        ranks: the result of each rank. A rank may lack names, as a stage of a pipeline does.
        parts: the results of one rank for the part of each rank, by how the batch is divided.
        blocks: the results of one rank for single rows or small blocks, which together are the
            batch.
        other_factors: for other numbers of ranks the factor of the first tensor that differs.
    """

    ranks: Sequence[Tensors] = ()
    parts: Mapping[str, Sequence[Part]] = field(default_factory=dict[str, Sequence[Part]])
    blocks: Sequence[Part] = ()
    other_factors: Mapping[int, float | None] = field(default_factory=dict[int, "float | None"])


@dataclass(frozen=True)
class Case:
    """A tensor that differs, with all that a hypothesis about its cause may ask.

    Attributes:
        name: of the first tensor that differs.
        wrong: the names of all tensors that differ, in order.
        expected: the result of one rank.
        evidence: with the results of all ranks.
        world_size: number of ranks.
        tolerance: see `numbers.is_equal`.
        floor: the absolute difference that is rounding.
        is_update: whether the tensors are the changes of a step.
    """

    name: str
    wrong: Sequence[str]
    expected: Tensors
    evidence: Evidence
    world_size: int
    tolerance: float | None
    floor: float
    is_update: bool = False

    @property
    def reference(self) -> Tensor:
        """The expected value of the tensor."""
        return self.expected[self.name]

    @property
    def step(self) -> int | None:
        """The step of the tensor; None: its name has none."""
        return step_of(self.name)

    def of_step(self, names: Sequence[str] | Tensors) -> list[str]:
        """Return those of the names that belong to the step of the tensor."""
        match = STEP.match(self.name)
        if not match:
            return [name for name in names if not STEP.match(name)]
        return [name for name in names if name.startswith(f"{match[1]}{match[2]}/")]

    @property
    def wrong_of_step(self) -> list[str]:
        """Those names of the step that differ, in the same shape on the ranks that have them."""
        return [
            name
            for name in self.of_step(self.wrong)
            if self.expected[name].is_floating_point()
            and self.values(name)
            and all(value.shape == self.expected[name].shape for value in self.values(name))
        ]

    @property
    def is_everywhere(self) -> bool:
        """Whether all tensors of the step differ that are not zero."""
        names = [name for name in self.of_step(self.expected) if self.expected[name].any()]
        return len(names) > 1 and set(names) <= set(self.wrong)

    def values(self, name: str | None = None) -> list[Tensor]:
        """Return a tensor of the ranks that have it; by default the one that differs."""
        key = self.name if name is None else name
        return [tensors[key] for tensors in self.evidence.ranks if key in tensors]

    def equal(self, one: Tensor, other: Tensor) -> bool:
        """Whether two tensors differ by rounding at most."""
        return is_equal(one, other, self.tolerance, self.floor)

    def all_equal(self, one: Tensors, other: Tensors, names: Sequence[str]) -> bool:
        """Whether two results agree in some tensors."""
        return all(
            name in one and name in other and self.equal(one[name], other[name]) for name in names
        )

    def factor(self, one: Tensor, other: Tensor) -> float | None:
        """Return c if the other tensor is c times the one; otherwise None."""
        return constant_factor(one, other, self.tolerance, self.floor)

    @property
    def agree(self) -> bool:
        """Whether all ranks have the same value."""
        first, *others = self.values()
        return all(self.equal(first, other) for other in others)

    @property
    def merged(self) -> Tensors:
        """The tensors of all ranks, each of the first rank that has it."""
        return merge(self.evidence.ranks)


def merge(ranks: Sequence[Tensors]) -> dict[str, Tensor]:
    """Return the tensors of all ranks, each of the first rank that has it."""
    merged = dict[str, Tensor]()
    for tensors in ranks:
        for name, tensor in tensors.items():
            merged.setdefault(name, tensor)
    return merged


def step_of(name: str) -> int | None:
    """Return the step in a name; None: it has none."""
    match = STEP.match(name)
    return int(match[2]) if match else None


def before(name: str) -> str | None:
    """Return the name of a tensor after the previous step; None: the name has no step."""
    match = STEP.match(name)
    return f"{match[1]}{int(match[2]) - 1}{match[3]}" if match else None


def map_results(evidence: Evidence, function: Callable[[Tensors], Tensors]) -> Evidence:
    """Return the evidence with all results replaced by a function of them."""
    divided = {
        scheme: [replace(part, tensors=function(part.tensors)) for part in parts]
        for scheme, parts in evidence.parts.items()
    }
    alone = [replace(part, tensors=function(part.tensors)) for part in evidence.blocks]
    ranks = [function(tensors) for tensors in evidence.ranks]
    return replace(evidence, ranks=ranks, parts=divided, blocks=alone)


def vector(tensors: Tensors, names: Sequence[str]) -> Tensor:
    """Return elements of the tensors in one vector, of each tensor at most MOST_ELEMENTS."""
    columns = list[Tensor]()
    for name in names:
        flat = tensors[name].detach().double().flatten()
        columns.append(flat[:: max(1, -(-flat.numel() // MOST_ELEMENTS))])
    return torch.cat(columns)


def coefficients(
    parts: Sequence[Part], target: Tensors, names: Sequence[str], tolerance: float
) -> list[float] | None:
    """Return the c for which the target is the sum of c times each part.

    Returns:
        None if the target is no such sum, or if the parts are linearly dependent.
    """
    usable = [name for name in names if all(name in part.tensors for part in parts)]
    same = [
        name
        for name in usable
        if name in target and all(part.tensors[name].shape == target[name].shape for part in parts)
    ]
    if not parts or not same:
        return None
    basis = torch.stack([vector(part.tensors, same) for part in parts], dim=1)
    wanted = vector(target, same)
    if not bool(basis.isfinite().all()) or not bool(wanted.isfinite().all()):
        return None
    lengths = basis.norm(dim=0)
    if basis.shape[0] < basis.shape[1] or not bool((lengths > 0).all()):
        return None
    scaled = basis / lengths
    singular = torch.linalg.svdvals(scaled)
    if float(singular[-1]) < SMALLEST * float(singular[0]):
        return None
    solution = torch.linalg.lstsq(scaled, wanted.unsqueeze(1)).solution.squeeze(1)
    rest = float((scaled @ solution - wanted).abs().max())
    # The errors of all parts add up.
    if rest > tolerance * len(parts) * max(float(wanted.abs().max()), float(basis.abs().max())):
        return None
    return (solution / lengths).tolist()
