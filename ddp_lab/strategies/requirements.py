"""What a strategy refuses of a launch and of inputs; model_checks.py has what of a model."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ddp_lab.config.errors import ConfigError
from ddp_lab.config.worlds import require_division, require_one_process

if TYPE_CHECKING:
    from ddp_lab.data.trees import Tree
    from ddp_lab.strategies.base import Strategy
    from ddp_lab.world.runtime import Runtime


def check_launch(strategy: "Strategy", runtime: "Runtime", mesh_axes: Mapping[str, int]) -> None:
    """Check that a strategy supports the ranks, the device and the precision.

    Args:
        strategy: under construction.
        runtime: of this rank.
        mesh_axes: as for `Strategy`.

    Raises:
        ConfigError: it does not.
    """
    if strategy.one_process:
        require_one_process(strategy.name, runtime.world_size)
    if runtime.device.type == "mps" and not strategy.supports_mps:
        raise ConfigError(
            f"device=mps: is not supported by strategy={strategy.name}: a Mac has one such device, "
            "and gloo and NCCL do not take its tensors. Use strategy=single, or device=cpu"
        )
    if runtime.precision == "fp16" and runtime.device.type not in strategy.fp16_devices:
        raise ConfigError(
            f"precision=fp16: is supported on NVIDIA GPUs only, and the device is "
            f"{runtime.device.type}. Use precision=bf16, or float32, the default"
        )
    require_division(runtime.world_size, mesh_axes)


def refuse_several(strategy: "Strategy", inputs: "Tree") -> None:
    """Refuse inputs that are a tuple or a dict.

    Args:
        strategy: that cuts the model into blocks.
        inputs: of the model.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        f"strategy={strategy.name}: cuts the model into blocks, each of which gets one tensor, "
        f"so inputs that are a {type(inputs).__name__} are not supported. Use single, "
        "scratch, dp, ddp, fsdp or tp, or put the inputs into one tensor"
    )
