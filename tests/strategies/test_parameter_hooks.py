"""Hooks of users on parameters, lost where a strategy replaces parameters by shards."""

import pytest
from configs import config
from torch import nn

from ddp_lab.config.build import call_target
from ddp_lab.config.errors import ConfigError
from ddp_lab.models.chain import Chain
from ddp_lab.world.runtime import Runtime

STRATEGIES = ("fsdp", "mesh strategy.shard=null", "tp")


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("options", STRATEGIES)
def test_hooks_that_shards_would_lose_are_refused_by_name(options, register):
    model = Chain((4,), first=nn.Linear(4, 4), last=nn.Linear(4, 2))
    words = f"strategy={options}".split()
    with Runtime("cpu") as runtime:
        strategy = call_target(config(*words).strategy, runtime)
        strategy.partition(model, 4)
        getattr(model.get_parameter("last.weight"), register)(lambda _: None)
        message = (
            f"strategy={strategy.name}: shards the parameter last.weight, .* for example ddp or "
            "pipeline$"
        )
        with pytest.raises(ConfigError, match=message):
            strategy.partition(model, 4)
