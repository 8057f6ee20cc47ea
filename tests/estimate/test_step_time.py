"""The formulas of the time of a step."""

from dataclasses import replace

import pytest
import torch

from ddp_lab.estimate.cards import CARDS
from ddp_lab.estimate.constants import ASSUMED
from ddp_lab.estimate.recorder import CAST, FEW_ROWS, Operation, Recorder
from ddp_lab.estimate.schedule import crosses_machines
from ddp_lab.estimate.step_time import KERNELS, REDUCTION, REST_KERNELS, ROW, Device, Links, StepTime, Work
from ddp_lab.run.advisor import Advisor
from ddp_lab.run.candidates import Candidate
from ddp_lab.run.machine import find_machine

CARD = CARDS["H100"]
RATES = (
    "float32 tf32 tf32_last bf16 convolution convolution_last attention bandwidth strided reduction pooling fused "
    "batch_norm batch_norm_last batch_norm_bf16 batch_norm_bf16_last"
)
IDEAL = replace(ASSUMED, **dict.fromkeys(RATES.split(), 1.0), launch=1e-5, step=0.0, replay=1e-6, start=0.0)
LINKS = Links(inside=100e9, between=10e9, per_node=4, latency=0.0)


def test_kernel_takes_the_longer_of_computation_and_traffic():
    device = Device(CARD, IDEAL)
    assert device.seconds(Operation("matmul", torch.float32, 67 * 10**12, 1)) == pytest.approx(1)
    assert device.seconds(Operation("convolution", torch.float32, 494 * 10**12, 1)) == pytest.approx(1)
    assert device.seconds(Operation("matmul", torch.bfloat16, 989 * 10**12, 1)) == pytest.approx(1)
    assert device.seconds(Operation("elementwise", torch.float32, 0, 3350 * 10**9)) == pytest.approx(1)


def test_launching_counts_only_where_the_device_waits():
    device = Device(CARD, IDEAL)
    assert device.launching(Work(2e-3, 100)) == 0
    assert device.launching(Work(2e-4, 100)) == pytest.approx(8e-4)
    assert Device(CARD, IDEAL, graph=True).launching(Work(2e-4, 100)) == pytest.approx(REST_KERNELS * 1e-6)


def test_kernels_of_a_graph_take_at_least_the_time_of_the_shortest_one():
    tiny, large = Operation("elementwise", torch.float32, 0, 1), Operation("elementwise", torch.float32, 0, 3350 * 10**9)
    assert Device(CARD, IDEAL, graph=True).work([tiny] * 10).seconds == pytest.approx(KERNELS * 1e-5)
    assert Device(CARD, IDEAL, graph=True).work([large]).seconds == pytest.approx(1)
    assert Device(CARD, IDEAL).work([tiny] * 10).seconds < 1e-7


@pytest.mark.parametrize(
    ("kind", "dtype", "last", "constant"),
    [
        ("matmul", torch.float32, False, "float32"),
        ("matmul", torch.bfloat16, True, "bf16"),
        ("convolution", torch.float32, False, "tf32"),
        ("convolution", torch.float32, True, "tf32_last"),
        ("convolution", torch.bfloat16, False, "convolution"),
        ("convolution", torch.bfloat16, True, "convolution_last"),
        ("attention", torch.bfloat16, False, "attention"),
        ("elementwise", torch.float32, False, "bandwidth"),
        ("strided", torch.float32, False, "strided"),
        ("reduction", torch.bfloat16, False, "reduction"),
        ("pooling", torch.float32, True, "pooling"),
        ("fused", torch.float32, False, "fused"),
        ("batch_norm", torch.float32, False, "batch_norm"),
        ("batch_norm", torch.float32, True, "batch_norm_last"),
        ("batch_norm", torch.bfloat16, False, "batch_norm_bf16"),
        ("batch_norm", torch.bfloat16, True, "batch_norm_bf16_last"),
    ],
)
def test_each_kind_of_kernel_has_a_constant_of_its_own(kind, dtype, last, constant):
    computed = kind in ("matmul", "convolution", "attention")
    operation = Operation(kind, dtype, 10**12 if computed else 0, 1 if computed else 10**9)
    ideal, half = (Device(CARD, each, channels_last=last) for each in (IDEAL, replace(IDEAL, **{constant: 0.5})))
    always = REDUCTION if kind == "reduction" else 0
    assert half.seconds(operation) - always == pytest.approx(2 * (ideal.seconds(operation) - always))


def test_small_convolutions_take_the_time_of_their_start_for_each_result():
    device = Device(CARD, replace(IDEAL, start=1e-5))
    one, two = (device.seconds(Operation("convolution", torch.float32, 1, 1, passes)) for passes in (1, 2))
    assert (one, two) == (pytest.approx(1e-5), pytest.approx(2e-5))


def test_convolutions_take_longer_than_as_many_flops_of_matrix_multiplications():
    device = Device(CARD, ASSUMED)
    product, convolution = (device.seconds(Operation(kind, torch.bfloat16, 10**12, 1)) for kind in ("matmul", "convolution"))
    assert convolution > 2 * product


def test_operations_count_by_the_launches_of_their_kind():
    layers, images = (
        torch.nn.Sequential(torch.nn.Conv2d(8, 8, 1), torch.nn.ReLU(), torch.nn.AvgPool2d(2)),
        torch.zeros(2, 8, 4, 4),
    )
    with torch.no_grad(), Recorder() as recorder:
        layers(images).to(torch.bfloat16)
    assert [operation.kind for operation in recorder.operations] == ["convolution", "elementwise", "pooling", "elementwise"]
    assert [operation.launches for operation in recorder.operations] == [1.5, 0.5, 0.5, CAST]
    work = Device(CARD, IDEAL).work(recorder.operations)
    assert Device(CARD, IDEAL).launching(work) == pytest.approx((2.5 + CAST) * 1e-5 - work.seconds)


@pytest.mark.parametrize("rows", [FEW_ROWS, FEW_ROWS + 1])
def test_gradient_of_a_norms_weight_is_slow_for_few_rows(rows):
    device, layer = Device(CARD, IDEAL), torch.nn.LayerNorm(4, dtype=torch.bfloat16)
    tokens = torch.zeros(rows, 4, dtype=torch.bfloat16, requires_grad=True)
    with Recorder() as recorder:
        layer(tokens).backward(tokens)
    forward, backward = (recorder.operations[0], next(each for each in recorder.operations if each.kind == "norm"))
    size = rows * 4 * 4  # as in float32
    assert forward.nbytes == 2 * size
    assert device.seconds(forward) == pytest.approx(REDUCTION + 2 * size / CARD.bandwidth)
    slow = rows * ROW if rows == FEW_ROWS else 0
    assert device.seconds(backward) == pytest.approx((3 if slow else 5) * size / CARD.bandwidth + slow)


def test_casts_to_wider_numbers_are_not_vectorized():
    values = torch.zeros(8)
    with Recorder() as recorder:
        values.to(torch.bfloat16).float()
    assert [operation.kind for operation in recorder.operations] == ["elementwise", "strided"]


@pytest.mark.parametrize(("inputs", "outputs", "times"), [(64, 64, 1), (1, 64, 32), (1, 6, 32 * 8 / 6), (48, 8, 64 / 48)])
def test_convolutions_of_few_channels_compute_padded_tiles(inputs, outputs, times):
    images = torch.zeros(2, inputs, 4, 4, requires_grad=True)
    layer = torch.nn.Conv2d(inputs, outputs, 1)
    with Recorder() as recorder:
        layer(images).sum().backward()
    forward, backward = (operation for operation in recorder.operations if operation.kind == "convolution")
    assert forward.flops == pytest.approx(times * 2 * 2 * 16 * inputs * outputs, abs=1)
    assert backward.flops == pytest.approx(2 * forward.flops, abs=2)


def test_collectives_take_the_time_of_the_bytes_that_a_rank_sends():
    assert LINKS.all_reduce(1e9, 4) == pytest.approx(2 * 3 / 4 * 1e9 / 100e9)
    assert LINKS.gather(1e9, 4) == pytest.approx(3 / 4 * 1e9 / 100e9)
    assert LINKS.all_reduce(1e9, 8) == pytest.approx(2 * 7 / 8 * 1e9 / 10e9), "the slowest link, between machines, decides"
    assert LINKS.gather(1e9, 2, neighbours=4) == pytest.approx(1 / 2 * 1e9 / 10e9)
    assert LINKS.all_reduce(1e9, 1) == 0


def time_of(gpus: str, strategy: str, *overrides: str, nodes: int = 1) -> StepTime:
    """Return the predicted time of one strategy, given as its overrides."""
    machine = find_machine(gpus, nodes, None)
    advisor = Advisor(["model=vit", "data=synthetic", *overrides], None, machine, ASSUMED)
    (wanted,) = (candidate for candidate in advisor.candidates() if " ".join(candidate.overrides) == strategy)
    return advisor.predict(wanted).time


def test_larger_batches_and_slower_cards_take_longer():
    small, slow = (time_of(gpus, "strategy=single", "batch_size=8192") for gpus in ("1xH100", "1xL4"))
    large = time_of("1xH100", "strategy=single", "batch_size=65536")
    assert large.compute > 6 * small.compute
    assert slow.compute > 5 * small.compute


def test_bubble_shrinks_with_micro_batches_and_launches_grow():
    few, many = (
        time_of(
            "2xH100",
            f"strategy=pipeline strategy.num_microbatches={m}",
            "batch_size=65536",
            "strategy=pipeline",
            f"strategy.num_microbatches={m}",
        )
        for m in (2, 16)
    )
    assert few.bubble / few.total == pytest.approx(1 / 3, abs=0.05)
    assert many.bubble / many.total < 0.08
    assert many.launching > few.launching


def test_fully_shard_copies_parameters_on_the_device_too():
    fsdp, ddp = (time_of("2xH100", f"strategy={each}", "speed=off", "batch_size=64").compute for each in ("fsdp", "ddp"))
    assert fsdp > 1.2 * ddp


def test_fully_shard_costs_launches_for_each_unit_parameter_and_micro_batch():
    names = (
        "strategy=ddp",
        "strategy=pipeline",
        "strategy=fsdp",
        "strategy=mesh strategy.shard=2",
        "strategy=mesh strategy.pp=2",
    )
    ddp, pipeline, fsdp, shard, pp = (
        time_of("2xH100", each, "speed=off", "batch_size=64", *each.split()).launching for each in names
    )
    assert fsdp == pytest.approx(shard)
    assert fsdp > 2 * ddp
    assert pp > 1.1 * pipeline > ddp


def test_links_between_machines_expose_communication():
    near = time_of("4xH100", "strategy=scratch", "batch_size=4096")
    far = time_of("2xH100", "strategy=scratch", "batch_size=4096", nodes=2)
    assert far.communication > near.communication > 0
    assert far.compute == pytest.approx(near.compute)


@pytest.mark.parametrize(
    ("nodes", "per_node", "strategy", "crosses"),
    [
        (1, 4, "mesh pp=2", False),
        (2, 2, "mesh pp=2", True),
        (2, 2, "mesh pp=4", True),
        (2, 2, "mesh pp=2 tp=2", True),
        (2, 2, "mesh pp=2 shard=2", True),
        (2, 2, "pipeline", True),
        (2, 2, "ddp_pipeline pp=2", False),
        (3, 2, "ddp_pipeline pp=3", True),
        (1, 4, "pipeline", False),
        (1, 4, "split", False),
    ],
)
def test_stages_on_different_machines_send_over_the_link_between_machines(nodes, per_node, strategy, crosses):
    name, *options = strategy.split()
    own = [f"strategy={name}", *(f"strategy.{option}" for option in options)]
    overrides = ["model=vit", "data=synthetic", "batch_size=192", *own]
    advisor = Advisor(overrides, None, find_machine(f"{per_node}xH100", nodes, None), ASSUMED)
    job = advisor.job(next(each for each in advisor.candidates() if each.overrides == own))
    job.partition()
    assert crosses_machines(job.strategy, per_node) == crosses


def test_mesh_sends_activations_to_the_next_machine_in_each_tick_of_the_schedule():
    overrides = ["model=vit", "data=synthetic", "data.dataset.image_size=28", "batch_size=256"]
    own = ["strategy=mesh", "strategy.pp=2"]
    exposed = []
    for link in (1, 100):
        advisor = Advisor([*overrides, *own], None, find_machine("2xH100", 2, link), ASSUMED)
        exposed.append(advisor.predict(Candidate("mesh", {"pp": 2}, 4)).time.communication)
    ticks, cut = 8 + 2 - 1, 16 * 16 * 64 * 4  # images of a micro-batch, tokens, width, bytes
    assert exposed[0] - exposed[1] == pytest.approx(2 * ticks * cut * (1e-9 - 1e-11) / ASSUMED.link)


def test_checkpointing_computes_the_forward_pass_again():
    none, selective, block = (
        time_of("4xH100", f"strategy=fsdp{mode}", "batch_size=65536").compute
        for mode in ("", " strategy.checkpoint_activations=selective", " strategy.checkpoint_activations=block")
    )
    assert none < selective < block < 1.5 * none
