"""Tests of the agreement of ranks before the process group exists, as on a run directory."""

import os
import socket
import time
from datetime import datetime, timedelta
from types import SimpleNamespace

import pytest
from launches import SMALL, launch, read_metrics
from torch.distributed import HashStore
from worlds import run_world

from ddp_lab.config.errors import ConfigError, NodeError
from ddp_lab.resilience import run_directory
from ddp_lab.resilience.run_directory import LAUNCH_FILE, RunDir, find_launch, make_unused
from ddp_lab.world.process import RankInfo
from ddp_lab.world.ranks import Ranks
from ddp_lab.world.runtime import Runtime


def on_two_nodes() -> Runtime:
    """Return this rank's runtime as if the ranks were on two machines.

    One has the first half of them, the other the second half.
    """
    rank = int(os.environ["RANK"])
    half = int(os.environ["WORLD_SIZE"]) // 2
    os.environ |= {
        "LOCAL_RANK": str(rank % half),
        "LOCAL_WORLD_SIZE": str(half),
        "GROUP_RANK": str(rank // half),
    }
    return Runtime("cpu", timeout=30)


def places(sizes: list[int], virtual: bool) -> list[tuple[RankInfo, int]]:
    """Return what torchrun's ranks of nodes with so many ranks take for their places, and theirs.

    Args:
        sizes: Number of ranks by node.
        virtual: Whether LOCAL_RANK is 0 on all of them.
    """
    known = []
    for node, size in enumerate(sizes):
        for local in range(size):
            environment = {
                "RANK": sum(sizes[:node]) + local,
                "WORLD_SIZE": sum(sizes),
                "LOCAL_RANK": 0 if virtual else local,
                "LOCAL_WORLD_SIZE": size,
                "GROUP_RANK": node,
                "GROUP_WORLD_SIZE": len(sizes),
            }
            texts = {name: str(value) for name, value in environment.items()}
            known.append((RankInfo.of(texts | {"TORCHELASTIC_RUN_ID": "x"}), local))
    return known


@pytest.mark.parametrize("sizes", [[1], [4], [2, 2], [4, 2], [1, 3], [2, 2, 2]])
@pytest.mark.parametrize("virtual", [False, True])
def test_place_on_a_node_is_known_although_local_rank_is_0_everywhere(sizes, virtual):
    for known, local in places(sizes, virtual):
        assert known.local_rank == local
        assert known.has_known_place


def test_ranks_that_all_take_themselves_for_the_first_are_refused():
    """On a node between others that have another number of ranks."""
    store = HashStore()
    for known, local in places([1, 2, 2], virtual=False):
        ranks = Ranks(known, timedelta(seconds=10))
        if not known.has_known_place:
            ranks._require_one_first_rank(store)
            assert (known.node, local) == (1, 0)
    taken = [known for known, _ in places([1, 2, 2], virtual=True) if not known.has_known_place]
    assert [(known.rank, known.node) for known in taken] == [(1, 1), (2, 1)]
    with pytest.raises(ConfigError, match="--virtual-local-rank: gives all ranks of a machine LOC"):
        Ranks(taken[1], timedelta(seconds=10))._require_one_first_rank(store)


@pytest.mark.slow
def test_virtual_local_rank_trains_as_without_it(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")  # of which torch gives one to each rank
    line = "ddp-lab train --nproc 2 strategy=ddp device=cpu"
    losses = []
    for name, more in (("plain", []), ("virtual", ["--virtual-local-rank"])):
        code, output = launch(
            line, *more, *SMALL, "epochs=1", f"name={name}", f"runs_dir={tmp_path}", gpus=True
        )
        assert code == 0, output
        losses.append([row["train_loss"] for row in read_metrics(tmp_path / name)])
    assert losses[0] == losses[1]


def prepare_once_per_node(folder) -> str:
    with on_two_nodes() as runtime:

        def prepare() -> str:
            time.sleep(0.5)
            path = folder / f"by_rank_{runtime.rank}"
            path.touch()
            return str(path)

        path = runtime.broadcast_from_rank0("data", prepare, per_node=True)
        assert os.path.exists(path), "the rank did not wait for its node's first rank"
        return path


def test_agree_per_node_runs_once_per_node_and_the_other_ranks_wait(tmp_path):
    answers = run_world(4, prepare_once_per_node, tmp_path)
    assert [os.path.basename(path) for path in answers] == [
        "by_rank_0",
        "by_rank_0",
        "by_rank_2",
        "by_rank_2",
    ]
    assert sorted(os.listdir(tmp_path)) == ["by_rank_0", "by_rank_2"]


def fail_on_one_node(failing: int) -> str:
    def decide() -> str:
        if runtime.node == failing:
            raise NodeError(f"node {failing} has no folder")
        return "found"

    with on_two_nodes() as runtime:
        try:
            return runtime.broadcast_from_rank0("data", decide, per_node=True)
        except ConfigError as error:
            return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("failing", [0, 1])
def test_agree_per_node_raises_the_error_of_a_node_on_the_others_which_would_wait_for_it(failing):
    """The first rank of the node raises a NodeError, which is printed there."""
    answers = run_world(4, fail_on_one_node, failing)
    assert answers.pop(2 * failing) == f"NodeError: node {failing} has no folder"
    assert answers == [f"ConfigError: node {failing} has no folder"] * 3


def test_launches_of_the_same_second_get_different_directories(tmp_path, monkeypatch):
    noon = datetime(2026, 1, 2, 12)
    monkeypatch.setattr(run_directory, "datetime", SimpleNamespace(now=lambda: noon))
    names = {make_unused(tmp_path, "label") for _ in range(3)}
    assert names == {path.name for path in tmp_path.iterdir()}
    assert len(names) == 3
    assert all(name.startswith("label-20260102-120000") for name in names)


def restart_with(agent: str, runs_dir) -> str:
    """Choose the run directory of a launch whose node 0 has this agent."""
    with on_two_nodes() as runtime:
        os.environ |= {
            "TORCHELASTIC_RUN_ID": "test",
            "DDP_LAB_LAUNCH": agent if runtime.node == 0 else "always",
        }
        return str(RunDir(runtime, runs_dir, name=None, resume="never", label="label").path)


def test_launch_whose_first_node_was_replaced_keeps_its_directory(tmp_path):
    paths = {
        path
        for agent in ("first", "second")
        for path in run_world(2, restart_with, agent, tmp_path)
    }
    assert paths == {str(path) for path in tmp_path.iterdir()}
    assert len(paths) == 1


def test_find_launch_returns_the_directory_of_a_launch_also_if_some_nodes_were_replaced(tmp_path):
    for name, text in (("one", "node1-1-10\nnode2-1-10"), ("two", "host-2-20")):
        (tmp_path / name).mkdir()
        (tmp_path / name / LAUNCH_FILE).write_text(text)
    # for root, too, whom permissions do not stop
    (tmp_path / "unreadable" / LAUNCH_FILE).mkdir(parents=True)
    launches = ["node2-1-10", "node2-1-10\nnode3-1-30", "host-2-20", "node1-1-50", "node"]
    assert [find_launch(tmp_path, launch) for launch in launches] == [
        "one",
        "one",
        "two",
        None,
        None,
    ]
    assert find_launch(tmp_path / "none-yet", "host-2-20") is None


def test_rank_shares_no_keys_with_another_launch_whose_store_has_its_port(monkeypatch):
    """Another program may take the port before rank 0 opens its store there."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    names = set()
    for launch_of_rank in ("one", "another"):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", launch_of_rank)
        ranks = Ranks(RankInfo(1, 2, 1, 2), timedelta(seconds=5))
        names.add(ranks._attempt(HashStore()))
    assert len(names) == 2


def fail_to_agree(port: int | None) -> str:
    def decide():
        raise NodeError("no such thing")

    if port is not None:
        del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
        os.environ["MASTER_PORT"] = str(port)
    try:
        with Runtime("cpu", timeout=30) as runtime:
            runtime.gather_objects("here", "")
            time.sleep(0.3 * runtime.rank)
            runtime.broadcast_from_rank0("thing", decide)
    except ConfigError as error:
        return str(error)
    return "agreed"


@pytest.mark.parametrize("store", ["of torchrun's agent", "of rank 0"])
def test_agree_raises_the_error_of_the_deciding_rank_on_every_rank(store):
    """The store is on rank 0 with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, and closes with it."""
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    assert (
        run_world(2, fail_to_agree, port if store == "of rank 0" else None) == ["no such thing"] * 2
    )
