"""Muon: the momentum of a matrix is orthogonalised before it is subtracted; the rest by AdamW.

    buffer <- momentum x buffer + (1 - momentum) x gradient           elementwise
    update  = gradient + momentum x (buffer - gradient)               Nesterov
    weight <- (1 - lr x weight_decay) x weight - lr x scale x orthogonal(update)

(Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024). The scale 0.2 x
sqrt(max(m, n)) of a matrix [m, n] gives the updates the size of AdamW's, so that both have one
learning rate and one weight decay (Liu et al., Muon is Scalable for LLM Training, 2025).

The numbers are those of torch.optim.Muon, which reads the learning rate on the host and takes no
shards. Here shards are gathered for the orthogonalisation only (strategies/whole_matrices.py).
"""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.optim.adamw import adamw

from ddp_lab.models.trial import some
from ddp_lab.strategies.dtensor import local, sharded_as
from ddp_lab.strategies.whole_matrices import of_complete
from ddp_lab.training.orthogonal import orthogonal

DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32}


class Muon(torch.optim.Optimizer):
    """Muon for matrices, and AdamW for all other parameters.

    Args:
        params: parameters, or groups of them. DTensors are updated in shards.
        lr: learning rate of both.
        momentum: of matrices.
        nesterov: whether the momentum is Nesterov's.
        weight_decay: of both, decoupled.
        ns_steps: steps of the Newton-Schulz iteration.
        ns_dtype: in which it computes. In bf16 a difference in the last digit of a gradient may
            change an element of an update by 0.4 %, which strategies then differ by.
        adjust_lr: scale of a matrix [m, n]: 0.2 x sqrt(max(m, n)), or sqrt(max(1, m / n)).
        betas, eps: of AdamW.
        use_muon: whether the matrices of a group are updated by Muon, and not by AdamW.

    Attributes:
        supports_cuda_graph: it waits for no device, and its state begins with zeros, to which a
            capture sets it after the warm-up.

    Raises:
        ValueError: an option is out of its range.
    """

    supports_cuda_graph = True

    def __init__(  # noqa: PLR0913, the options of an optimizer are the arguments of its class
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        ns_steps: int = 5,
        ns_dtype: Literal["bf16", "float32"] = "bf16",
        adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        use_muon: bool = True,
    ):
        if not 1 <= ns_steps < 100:
            raise ValueError(f"ns_steps must be from 1 to 99, got {ns_steps}")
        if ns_dtype not in DTYPES:
            raise ValueError(f"ns_dtype must be {' or '.join(DTYPES)}, got {ns_dtype}")
        if adjust_lr not in ("match_rms_adamw", "original"):
            raise ValueError(f"adjust_lr must be match_rms_adamw or original, got {adjust_lr}")
        for beta in betas:
            if not 0 <= beta < 1:
                raise ValueError(f"betas must be from 0 to below 1, got {beta}")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "ns_steps": ns_steps,
            "ns_dtype": ns_dtype,
            "adjust_lr": adjust_lr,
            "betas": tuple(betas),
            "eps": eps,
            "use_muon": use_muon,
        }
        super().__init__(params, defaults)

    @staticmethod
    def default_groups(model: nn.Module) -> tuple[dict[str, Any], set[str]]:
        """Return options of a group, and the names of the parameters that belong to it by default.

        Those are updated by AdamW: all but the weights of linear layers, of which the last one is
        the output layer.

        Args:
            model: the complete model.
        """
        linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        matrices = {f"{name}.weight" for name in linear[:-1]}
        shared = {
            id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
        }
        names = {
            name
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if name not in matrices or id(parameter) in shared
        }
        return {"use_muon": False}, names

    @staticmethod
    def check_group(options: Mapping[str, Any], shapes: Mapping[str, torch.Size]) -> str | None:
        """Return a line about parameters that AdamW updates although Muon was asked for.

        Return None if there are none.

        Args:
            options: of the group.
            shapes: of its parameters by name.

        Raises:
            ValueError: no parameter is a matrix.
        """
        if not options.get("use_muon"):
            return None
        others = [name for name, shape in shapes.items() if len(shape) != 2]
        if not others:
            return None
        shape = list(shapes[others[0]])
        example = f"{others[0]} has the shape {shape}"
        if len(others) == len(shapes):
            raise ValueError(
                f"use_muon=true: Muon updates matrices, and none is matched: {example}. Match the "
                "weights of linear layers, or leave the parameters to AdamW"
            )
        return f"AdamW updates {some(others)}, because Muon updates matrices: {example}"

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update all parameters that have a gradient. Collective if matrices are in shards."""
        for group in self.param_groups:
            used = [parameter for parameter in group["params"] if parameter.grad is not None]
            matrices = [
                parameter for parameter in used if group["use_muon"] and parameter.dim() == 2
            ]
            chosen = {*map(id, matrices)}
            self._update_matrices(group, matrices)
            self._update_others(group, [each for each in used if id(each) not in chosen])

    def _update_matrices(self, group: dict[str, Any], matrices: list[nn.Parameter]) -> None:
        momentum = group["momentum"]
        updates: list[torch.Tensor] = []
        for matrix in matrices:
            state = self.state[matrix]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(
                    matrix, memory_format=torch.preserve_format
                )
            gradient = local(cast("torch.Tensor", matrix.grad))
            buffer = local(state["momentum_buffer"])
            buffer.lerp_(gradient, 1 - momentum)
            updates.append(gradient.lerp(buffer, momentum) if group["nesterov"] else buffer)

        dtype = DTYPES[group["ns_dtype"]]
        divided = [
            sharded_as(matrix, update) for matrix, update in zip(matrices, updates, strict=True)
        ]
        orthogonals = of_complete(
            divided, partial(orthogonal, steps=group["ns_steps"], dtype=dtype), dtype
        )
        lr = group["lr"]
        for matrix, update in zip(matrices, orthogonals, strict=True):
            weight = local(matrix)
            rate = lr * scale_of(matrix.shape, group["adjust_lr"])
            weight.mul_(1 - lr * group["weight_decay"])
            if isinstance(rate, torch.Tensor):  # on the device, where a number would be waited for
                weight.sub_(update * rate)
            else:
                weight.add_(update, alpha=-rate)

    def _update_others(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        if not parameters:
            return
        for parameter in parameters:
            state = self.state[parameter]
            if "step" not in state:
                state["step"] = torch.zeros((), device=local(parameter).device)
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        states = [self.state[parameter] for parameter in parameters]
        beta1, beta2 = group["betas"]
        adamw(
            [local(parameter) for parameter in parameters],
            [local(cast("torch.Tensor", parameter.grad)) for parameter in parameters],
            [local(state["exp_avg"]) for state in states],
            [local(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            capturable=states[0]["step"].is_cuda,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def scale_of(shape: torch.Size, adjust_lr: str) -> float:
    """Return the factor of the learning rate of a matrix, [m, n]."""
    m, n = shape
    if adjust_lr == "match_rms_adamw":
        return 0.2 * math.sqrt(max(m, n))
    return math.sqrt(max(1, m / n))
