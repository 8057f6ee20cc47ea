"""The run directory on a node that does not share the disk of rank 0."""

from unittest.mock import MagicMock

import pytest

from ddp_lab.resilience.run_directory import RunDir


@pytest.mark.parametrize("local_rank", [0, 1])
def test_first_rank_of_a_node_makes_the_directory_that_rank_0_has_chosen(local_rank, tmp_path):
    root = tmp_path / "of" / "this" / "node"
    runtime = MagicMock(local_rank=local_rank)
    runtime.broadcast_from_rank0 = lambda key, decide: ["chosen", None]
    for _ in range(2):  # an attempt after a failure finds it there
        made = RunDir(runtime, root, None, "auto", "label")
        assert made.path == root / "chosen"
        assert made.path.is_dir() == (local_rank == 0)
