"""How the state of model and optimizer leaves a strategy and returns to any other."""

from typing import Any, ClassVar, TypedDict, cast

import torch
import torch.distributed as dist
from torch import nn

from ddp_lab.strategies.all_reduce import trainable
from ddp_lab.strategies.sharding import full_state


class StateOptions(TypedDict, total=False):
    """The options of torch's StateDictOptions that are used here.

    torch.distributed.checkpoint loads 700 modules in 0.5 s, so it is imported only where a state is saved or loaded.
    """

    full_state_dict: bool
    cpu_offload: bool


FULL_STATE: StateOptions = {"full_state_dict": True, "cpu_offload": True}


class SavedState:
    """What a strategy saves and loads: the complete state under plain names, and this rank's part of it.

    Attributes:
        module: this rank's part of the model, unwrapped, so that its parameters keep their plain names.
        pp_group: the ranks of this rank's pipeline, each with its own stages; None if every rank has all blocks.
    """

    save_options: ClassVar[StateOptions] = FULL_STATE
    load_options: ClassVar[StateOptions] = FULL_STATE

    module: nn.Module
    pp_group: dist.ProcessGroup | None = None

    def model_state(self) -> dict[str, torch.Tensor]:
        """Return the complete model's state under plain names, on the CPU. Collective; as `state_dict`, without optimizer."""
        own = self._read_model(self.save_options)
        if self.pp_group is None:
            return own
        return {name: tensor for state in gather_states(full_state(own), self.pp_group) for name, tensor in state.items()}

    def _read_model(self, options: StateOptions) -> dict[str, torch.Tensor]:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        if not self.module.state_dict():  # a stage of a pipeline without parameters, such as nn.ReLU, which torch refuses
            return {}
        return cast("dict[str, torch.Tensor]", get_model_state_dict(self.module, options=StateDictOptions(**options)))

    def load_model_state(self, state: dict[str, torch.Tensor]) -> None:
        """Load what the `model_state` of any strategy returned. Collective; `state` must be complete on every rank."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        held = self.module.state_dict().keys()
        own: dict[str, Any] = {name: tensor for name, tensor in state.items() if name in held}
        if held:
            set_model_state_dict(self.module, own, options=StateDictOptions(**self.load_options))

    def state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the complete state of model and optimizer under plain names, on the CPU.

        Collective. The state is complete on rank 0 and may be empty on the other ranks.
        """
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

        options = StateDictOptions(**self.save_options)
        own: dict[str, Any] = {
            "model": self._read_model(self.save_options),
            "optimizer": get_optimizer_state_dict(self.module, optimizer, options=options),
        }
        return own if self.pp_group is None else merge(gather_states(full_state(own), self.pp_group))

    def local_model_state(self) -> dict[str, torch.Tensor]:
        """Return this rank's part of the model under plain names. Sharded tensors are DTensors, and nothing is copied."""
        return self._read_model({})

    def local_optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the optimizer's state of `local_model_state`: "state" and "param_groups". Nothing is copied.

        An optimizer without a state gets its initial one.
        """
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        return cast("dict[str, Any]", get_optimizer_state_dict(self.module, optimizer))

    def load_state_dict(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Load a state that the `state_dict` of any strategy returned. Collective; `state` must be complete on every rank."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

        without_state = not state["optimizer"]["state"] or optimizer.defaults.get("momentum") == 0
        if without_state or not list(trainable(self.module.parameters())):
            # SGD without momentum has no state, and neither has a rank that trains nothing because its stage is frozen.
            # torch's set_state_dict does not support that, in the file or in `optimizer`.
            self.load_model_state(state["model"])
            return
        # The parameter groups and their options are those of this launch: the file may have other groups.
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        groups = [group | {"params": [names[parameter] for parameter in group["params"]]} for group in optimizer.param_groups]
        held = self.module.state_dict().keys()
        set_state_dict(
            self.module,
            optimizer,
            model_state_dict={name: tensor for name, tensor in state["model"].items() if name in held},
            optim_state_dict=state["optimizer"] | {"param_groups": groups},
            options=StateDictOptions(**self.load_options, strict=False),
        )
        for parameter, name in names.items():
            if name not in state["optimizer"]["state"]:  # it had no gradient; torch has given it an initial state
                optimizer.state.pop(parameter, None)


def gather_states(own: dict[str, Any], group: dist.ProcessGroup) -> list[dict[str, Any]]:
    """Return the states of all ranks of a pipeline on rank 0, if it is the first pipeline, and nothing on the other ranks.

    Args:
        own: the state of this rank's stages.
        group: the ranks of this rank's pipeline.
    """
    ranks = dist.get_process_group_ranks(group)
    if 0 not in ranks:
        return []
    states: list[dict[str, Any]] | None = [{} for _ in ranks] if dist.get_rank() == 0 else None
    dist.gather_object(own, states, dst=0, group=group)
    return states or []


def merge(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the states of ranks, each with its own part, into that of the full model and optimizer."""
    groups = zip(*(state["optimizer"]["param_groups"] for state in states), strict=True)
    return {
        "model": {name: tensor for state in states for name, tensor in state["model"].items()},
        "optimizer": {
            "state": {name: values for state in states for name, values in state["optimizer"]["state"].items()},
            "param_groups": [
                same[0] | {"params": list(dict.fromkeys(name for group in same for name in group["params"]))} for same in groups
            ],
        },
    }
