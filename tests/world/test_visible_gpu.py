"""Ranks that see one GPU each, as with Slurm's --gpus-per-task: each has cuda:0.

torch's view of GPUs is faked. What real ones answer is tested in tests/test_gpu.py.
"""

import os
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from worlds import run_world

from ddp_lab.config.errors import NodeError
from ddp_lab.world import ranks, visible_gpu
from ddp_lab.world.runtime import Runtime


def device_with(uuids: list[list[str]]) -> str:
    """Return the device of this rank, or the error.

    Args:
        uuids: of the GPUs that each rank sees.
    """
    visible = uuids[int(os.environ["RANK"])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(visible_gpu, "PATIENCE", 2.0)
        patch.setattr(ranks, "START_TIMEOUT", timedelta(seconds=30))
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: len(visible))
        patch.setattr(torch.cuda, "set_device", lambda device: None)
        patch.setattr(
            torch.cuda,
            "get_device_properties",
            lambda device: SimpleNamespace(
                uuid=visible[getattr(device, "index", device)], name="H100", total_memory=2**36
            ),
        )
        try:
            runtime = Runtime("auto", timeout=30)
        except NodeError as error:
            return str(error)
        if len({len(each) for each in uuids}) > 1:
            assert runtime.store is not None, "the rank that sees one GPU waits for it"
        return str(runtime.device)


# "mixed" is the last: rank 0 does not wait for rank 1 there, and might begin another launch before.
WORLDS = {
    "one each": [["a"], ["b"]],
    "the same": [["a"], ["a"]],
    "both": [["a", "b"], ["a", "b"]],
    "mixed": [["a", "b"], ["a"]],
}


def devices_with(worlds: dict[str, list[list[str]]]) -> dict[str, str]:
    return {name: device_with(uuids) for name, uuids in worlds.items()}


def test_ranks_that_see_one_gpu_each_use_it_if_no_other_rank_sees_it():
    first, second = run_world(2, devices_with, WORLDS, timeout=200)
    assert (first["one each"], second["one each"]) == ("cuda:0", "cuda:0")
    assert (first["both"], second["both"]) == ("cuda:0", "cuda:1")
    assert first["mixed"] == "cuda:0"
    for error in (first["the same"], second["the same"], second["mixed"]):
        assert error.startswith("device=cuda: 2 ranks on "), error
        assert "need one GPU each, but this setting provides 1. " in error
