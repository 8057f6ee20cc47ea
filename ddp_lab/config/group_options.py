"""Validation of `optimizer.groups`, whose options are those of the optimizer's class."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, create_model

from ddp_lab.config.build import OF_GROUPS
from ddp_lab.config.check import unknown_key, validate
from ddp_lab.config.errors import ConfigError
from ddp_lab.config.schema import Keys
from ddp_lab.config.types import Positive

# They say how a step is executed, which is one choice for all groups.
OF_EXECUTION = {"fused", "foreach", "capturable", "differentiable"}


class ScaleKeys(Keys):
    """The keys of a group that are no options of the optimizer's class."""

    match: str
    lr_scale: Positive = 1.0


def check_groups(entries: Sequence[Mapping[str, Any]], schema: type[BaseModel]) -> None:
    """Check the options of groups of parameters.

    Args:
        entries: `optimizer.groups`.
        schema: Of the options of the optimizer's class.

    Raises:
        ConfigError: An option does not exist, or its value is not allowed.
    """
    accepts_any = schema.model_config.get("extra") == "allow"
    fields = {
        name: field
        for name, field in schema.model_fields.items()
        if name not in OF_EXECUTION and name not in OF_GROUPS and name != "lr"
    }
    allowed = [*ScaleKeys.model_fields, *fields]
    for place, entry in enumerate(entries):
        prefix = f"optimizer.groups[{place}]."
        if "lr" in entry:
            raise ConfigError(
                f"{prefix}lr={entry['lr']}: the learning rate of a group is a multiple of "
                "optimizer.lr, so that lr_scaling and the schedule apply to it. Use lr_scale"
            )
        unknown = [name for name in entry if name not in allowed]
        if unknown and (not accepts_any or unknown[0] in OF_EXECUTION):
            raise ConfigError(
                unknown_key(f"{prefix}{unknown[0]}", entry[unknown[0]], prefix, allowed)
            )
        chosen: dict[str, Any] = {
            name: (field.annotation, field) for name, field in fields.items() if name in entry
        }
        model = create_model("Group", __base__=ScaleKeys, **chosen)
        values = {name: value for name, value in entry.items() if name in allowed}
        validate(model, values, prefix)
