"""A linear layer on one device, and the comparison of a rank's part with it."""

import torch

from ddp_lab.exercises.explain import Wrong, expect_tensor


def layer(ranks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x [3, inputs], weight [outputs, inputs], bias [outputs] and the outputs' gradient.

    The number of ranks divides both.
    """
    generator = torch.Generator().manual_seed(1)
    inputs = 2 * ranks
    outputs = 3 * ranks
    shapes = ([3, inputs], [outputs, inputs], [outputs], [3, outputs])
    x, weight, bias, grad_y = (
        torch.rand(shape, generator=generator, dtype=torch.float64) for shape in shapes
    )
    return x, weight, bias, grad_y


def compare(
    value: object, expected: torch.Tensor, name: str, causes: dict[str, torch.Tensor]
) -> None:
    """Compare a tensor.

    Args:
        value: of the learner.
        expected: what it should be.
        name: the subject of the message.
        causes: what it would be, by the explanation.

    Raises:
        Wrong: it is not the expected one.
    """
    for text, other in causes.items():
        same = (
            isinstance(value, torch.Tensor)
            and value.shape == other.shape
            and torch.allclose(value, other)
        )
        if same and not (other.shape == expected.shape and torch.allclose(other, expected)):
            raise Wrong(f"{name} is wrong. {text}")
    result = expect_tensor(value, expected.shape, name)
    if not torch.allclose(result, expected):
        raise Wrong(
            f"{name} begins with {float(result.flatten()[0]):.4g}, expected "
            f"{float(expected.flatten()[0]):.4g}."
        )
