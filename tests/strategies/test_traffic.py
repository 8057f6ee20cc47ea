"""The traffic that docs/strategies.md promises, counted: data parallelism and pipelines."""

import math

import pytest
import torch.distributed as dist
from traffic import SAMPLES, padded_size, second_step, set_up, traffic, world
from worlds import run_world

from ddp_lab.world.runtime import Runtime


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize(("algorithm", "calls"), [("flat", 1), ("per_tensor", 8), ("bucketed", 3)])
def test_scratch_sums_every_gradient_once_in_a_step(algorithm, calls, accumulate, monkeypatch):
    """On CPUs one more number is summed: whether a parameter was not used on some rank."""
    case = f"scratch algorithm={algorithm}"
    counted, _, size = traffic(monkeypatch, case, 4, accumulate=accumulate)
    assert counted.elements == {"all_reduce": size + 1}
    assert counted.calls == {"all_reduce": calls + 1}


@pytest.mark.parametrize("accumulate", [1, 4])
def test_ring_sends_a_part_of_the_gradients_in_each_of_2_w_minus_2_rounds(accumulate, monkeypatch):
    counted, _, size = traffic(monkeypatch, "scratch algorithm=ring", 8, accumulate=accumulate)
    part = -(-size // 8)
    assert counted.calls["send"] == counted.calls["receive"] == 2 * 7
    assert counted.elements["send"] == counted.elements["receive"] == 2 * 7 * part


def ddp_steps(accumulate: int) -> list[tuple[dict[str, int], dict[str, int]]]:
    """Return calls and elements of steps: with large and small buckets, and unused parameters.

    A fake group has no DDP.
    """
    steps = []
    for option in ("bucket_cap_mb=25", "bucket_cap_mb=0.01", "find_unused_parameters=true"):
        with Runtime("cpu", timeout=30) as runtime:
            runtime.open_group()
            strategy = set_up(f"ddp {option}", runtime, "lenet", accumulate)
            counted = second_step(strategy, accumulate)
            steps.append((dict(counted.calls), dict(counted.elements)))
            del strategy
    return steps


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_ddp_sums_every_gradient_once_in_a_step(accumulate):
    size = 129_068  # of LeNet, which has 8 parameters
    for steps in run_world(2, ddp_steps, accumulate):
        large, small, unused = steps
        assert large == ({"all_reduce": 1}, {"all_reduce": size})
        assert small[1] == {"all_reduce": size}
        assert small[0]["all_reduce"] > 1
        assert unused == ({"all_reduce": 2}, {"all_reduce": size + 8})


def calls_with_buffers() -> dict[str, int]:
    """Return the calls of a step of a model with BatchNorm's buffers."""
    with Runtime("cpu", timeout=30) as runtime:
        runtime.open_group()
        strategy = set_up("ddp", runtime, "narrow", 1)
        assert len(list(strategy.module.buffers())) > 0
        return dict(second_step(strategy, 1).calls)


def test_ddp_does_not_broadcast_buffers_in_a_step():
    """They are sent when training mode ends."""
    assert run_world(2, calls_with_buffers) == [{"all_reduce": 1}] * 2


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    ("case", "gathers"),
    [("fsdp", 2), ("fsdp reshard_after_forward=false", 1), ("mesh shard=null", 2)],
)
def test_fsdp_gathers_in_every_part_and_sums_the_gradients_once(
    case, gathers, accumulate, monkeypatch
):
    """Without accumulation 3 P, 1.5 times ddp's traffic, as each is half of an all_reduce."""
    counted, _, _ = traffic(monkeypatch, case, 8, accumulate=accumulate, name="vit")
    size = padded_size("vit", 8)
    assert counted.elements == {"all_gather": accumulate * gathers * size, "reduce_scatter": size}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_mesh_of_replicas_sums_every_gradient_once(accumulate, monkeypatch):
    counted, _, size = traffic(monkeypatch, "mesh shard=1", 8, accumulate=accumulate, name="vit")
    assert counted.elements == {"all_reduce": size}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_hsdp_gathers_within_shards_and_sums_shards_over_replicas(accumulate, monkeypatch):
    counted, _, _ = traffic(monkeypatch, "mesh shard=2", 8, accumulate=accumulate, name="vit")
    size = padded_size("vit", 2)
    expected = {
        "all_gather": 2 * accumulate * size,
        "reduce_scatter": size,
        "all_reduce": size // 2,
    }
    assert counted.elements == expected


@pytest.mark.parametrize(
    ("case", "ranks"), [("pipeline", 2), ("pipeline schedule=gpipe", 2), ("ddp_pipeline", 8)]
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_pipeline_sends_the_activations_of_a_batch_at_the_cut(case, ranks, accumulate, monkeypatch):
    """LeNet is cut after its first block, where a sample has 20 x 13 x 13 numbers."""
    replicated = case == "ddp_pipeline"
    in_stages = 0
    for rank in (0, ranks - 1):
        counted, strategy, size = traffic(monkeypatch, case, ranks, rank, accumulate)
        activations = SAMPLES * 20 * 13 * 13
        assert counted.elements["send"] == counted.elements["receive"] == activations
        assert counted.calls["send"] == accumulate * strategy.num_microbatches
        in_stage = sum(parameter.numel() for parameter in strategy.module.parameters())
        assert counted.elements["all_reduce"] == replicated * (in_stage + 1)
        in_stages += in_stage
    assert in_stages == size, "the stages do not make up the model"


@pytest.mark.parametrize(("precision", "size"), [("float32", 4), ("bf16", 2)])
def test_pipeline_sends_activations_and_their_gradients_in_the_precision(
    precision, size, monkeypatch
):
    for rank in (0, 1):
        with world(monkeypatch, rank, 2, precision) as runtime:
            counted = second_step(set_up("pipeline", runtime, "lenet", 1), 1)
        activations = SAMPLES * 20 * 13 * 13
        assert counted.bytes["send"] == counted.bytes["receive"] == size * activations


@pytest.mark.parametrize(
    ("schedule", "cuts"), [("1f1b", 1), ("interleaved1f1b", 3), ("interleavedzerobubble", 3)]
)
def test_several_stages_of_a_rank_send_a_message_for_each_cut(schedule, cuts, monkeypatch):
    """Two ranks with v stages each have 2 v - 1 cuts, at each of which one sends, and one back."""
    for rank in (0, 1):
        case = f"pipeline schedule={schedule} num_microbatches=4"
        counted, _, _ = traffic(monkeypatch, case, 2, rank, name="vit")
        assert counted.calls["send"] == counted.calls["receive"] == 4 * cuts


@pytest.mark.parametrize("accumulate", [1, 2])
def test_pipelines_of_mesh_gather_once_and_sum_after_every_part(accumulate, monkeypatch):
    """A block's activations are 16 tokens of 16 numbers."""
    counted, strategy, _ = traffic(monkeypatch, "mesh pp=2 shard=2", 8, 7, accumulate, "vit")
    names = dict(strategy.module.named_parameters())
    gathered = sum(
        -(-each.shape[0] // 2) * 2 * math.prod(each.shape[1:]) for each in names.values()
    )
    assert counted.elements == {
        "all_gather": accumulate * gathered,
        "reduce_scatter": accumulate * gathered,
        "all_reduce": accumulate * gathered // 2,
        "send": SAMPLES * 16 * 16,
        "receive": SAMPLES * 16 * 16,
    }


@pytest.mark.parametrize(
    ("axes", "ranks", "groups"),
    [
        ("pp=2 shard=2", 8, {0: [0, 1, 2, 3], 7: [4, 5, 6, 7]}),
        pytest.param(
            "pp=2 shard=2 tp=2", 16, {0: [0, 2, 4, 6], 11: [9, 11, 13, 15]}, marks=pytest.mark.slow
        ),
        pytest.param("pp=2 shard=1", 4, {1: [0, 1], 2: [2, 3]}, marks=pytest.mark.slow),
        ("shard=2 tp=2", 8, {3: [1, 3, 5, 7]}),
    ],
)
def test_dp_group_has_the_replicas_and_shards_of_the_same_stage(axes, ranks, groups, monkeypatch):
    """Ranks are counted pp first and tp last.

    Buffers are sent and BatchNorm is computed in this group.
    """
    for rank, members in groups.items():
        with world(monkeypatch, rank, ranks) as runtime:
            strategy = set_up(f"mesh {axes}", runtime, "vit", 1)
            assert dist.get_process_group_ranks(strategy.dp_group) == members


@pytest.mark.parametrize("accumulate", [1, 4])
def test_star_gathers_and_broadcasts_each_gradient_once_in_a_step(accumulate, monkeypatch):
    """Rank 0 receives the gradients of the other ranks, (W-1) n, and sends them as much."""
    counted, _, size = traffic(monkeypatch, "scratch algorithm=star", 4, accumulate=accumulate)
    assert counted.elements == {"gather": size, "broadcast": size, "all_reduce": 1}
    assert counted.calls == {"gather": 8, "broadcast": 8, "all_reduce": 1}


@pytest.mark.parametrize("accumulate", [1, 4])
def test_scratch_with_unused_parameters_sends_one_number_for_each_in_addition(
    accumulate, monkeypatch
):
    """LeNet has 8 parameters."""
    case = "scratch algorithm=flat find_unused_parameters=true"
    counted, _, size = traffic(monkeypatch, case, 4, accumulate=accumulate)
    assert counted.elements == {"all_reduce": size + 8}
    assert counted.calls == {"all_reduce": 2}
