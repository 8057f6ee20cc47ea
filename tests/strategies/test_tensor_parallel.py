"""Tensor parallelism by the plan of a block.

What strategy=tp divides, what it sends, and the sums over two GPUs.
"""

import gc
import weakref
from collections import Counter
from typing import ClassVar
from unittest.mock import MagicMock, patch

import pytest
import torch
import torch.distributed as dist
from case import reference_of
from cases import assert_equal
from slow_rows import extra, slow_but
from small_networks import make_model
from torch import nn
from training import run_cases
from worlds import run_world

from ddp_lab.advise.advisor import Advisor, Row
from ddp_lab.advise.devices import find_devices
from ddp_lab.advise.tp_prediction import Prediction, predict_here
from ddp_lab.config.errors import ConfigError
from ddp_lab.launchers.command_line import compose_config
from ddp_lab.models.lenet import lenet
from ddp_lab.models.vit import Block
from ddp_lab.run.build import build
from ddp_lab.strategies import peer_sums
from ddp_lab.strategies.block_plans import plans_for
from ddp_lab.strategies.linear_pairs import ColumnLinear, RowLinear
from ddp_lab.strategies.tp import TP
from ddp_lab.world.planned import PlannedRuntime
from ddp_lab.world.runtime import Runtime

TINY = ["model=vit", "model.depth=2", "data=synthetic", "data.dataset.image_size=28", "speed=off"]
LARGE = [
    "model=vit_l16",
    "data=synthetic",
    "data.dataset.image_size=224",
    "precision=bf16",
    "speed=off",
]


def advice(strategy: str, *overrides: str) -> tuple[Advisor, Row]:
    """Return the advice on a strategy for two H100s, and its plan."""
    name, *options = strategy.split()
    advisor = Advisor.of(overrides, None, find_devices("2xH100"))
    return advisor, advisor.plan(
        [f"strategy={name}", *(f"strategy.{option}" for option in options)]
    )


@pytest.mark.parametrize("strategy", [pytest.param("tp tp=2", marks=pytest.mark.slow), "mesh tp=2"])
def test_pair_of_layers_needs_one_sum_in_each_direction(strategy):
    """Query, key and value are one layer of a pair.

    Their gradients of the tokens are summed before they are sent.
    """
    (plan,) = advice(strategy, *TINY, "batch_size=8")[1].plans
    blocks = 2
    pairs = 2
    directions = 2
    sums = {group.name: number for group, number in plan.calls.items() if group.ranks == (0, 1)}
    assert sums == {"allreduce": blocks * pairs * directions}


@pytest.mark.slow
def test_sequence_parallelism_scatters_and_gathers_once_for_a_pair():
    (plan,) = advice("mesh tp=2 sequence_parallel=true", *TINY, "batch_size=8")[1].plans
    calls = {group.name: number for group, number in plan.calls.items() if group.ranks == (0, 1)}
    # Of two pairs in each of two blocks, in both directions; and for the head, and for the gradient
    # of the embedding.
    assert (calls["reduce_scatter"], calls["allgather"]) == (8, 10)


class Shared(Block):
    def __init__(self):
        super().__init__(16, 4, 32, 0.0, "block1")
        self.fc2.weight = nn.Parameter(self.fc2.weight.detach().clone())
        self.attn.k.weight = self.attn.q.weight


def with_block(block: nn.Module):
    model = make_model("vit", 0)
    model.block1 = block
    return model


@pytest.mark.parametrize(
    ("model", "tp", "why"),
    [
        (make_model("vit", 0), 2, ""),
        (make_model("vit", 0), 8, "strategy.tp=8 does not divide the 4 heads of block0.attn.q"),
        (lenet(1, 28, 10, None), 2, "the model has no plan"),
        (with_block(Shared()), 2, "block1.attn.q shares its weight with another layer"),
    ],
)
def test_tp_follows_plans_that_fit_all_blocks(model, tp, why, monkeypatch):
    blocks, reason = plans_for(model, tp)
    assert (bool(blocks), reason) == (not why, why)
    monkeypatch.setenv("WORLD_SIZE", str(tp))
    strategy = TP(Runtime("cpu"), tp=None, batch_norm="local")
    strategy.partition(model, 8)
    assert ("embed" in strategy.replicated) == (not why), (
        "blocks without a plan are computed by every rank"
    )


def test_plan_that_does_not_fit_its_block_is_refused_by_tp():
    wrong = type("Wrong", (Block,), {"tensor_parallel": Block.tensor_parallel | {"fc3": "row"}})
    with pytest.raises(ConfigError, match=r"Wrong\.tensor_parallel: block1 has no module fc3"):
        plans_for(with_block(wrong(16, 4, 32, 0.0, "block1")), 2)


@pytest.mark.parametrize(("model", "refused"), [("vit", False), ("lenet", True)])
def test_tp_is_compiled_unless_a_convolution_is_sharded(model, refused, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    strategy = TP(Runtime("cpu"), tp=2, batch_norm="local")
    strategy.partition(make_model("vit", 0) if model == "vit" else lenet(1, 28, 10, None), 8)
    assert ("compile" in strategy.unsupported) == refused


class GlooSums:
    """What `PeerSums` does, by gloo on CPUs; the sum is unknown before `finish`."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank = dist.get_rank(group)
        self.pending = {}
        peer_sums.SUMS_OF_GROUPS[group.group_name] = self

    def begin(self) -> None:
        assert not self.pending, "a sum was not finished"

    def start(self, sent: torch.Tensor) -> None:
        assert sent.is_contiguous()
        received = torch.empty_like(sent)
        peer = 1 - self.rank
        works = [
            dist.isend(sent, group=self.group, group_dst=peer),
            dist.irecv(received, group=self.group, group_src=peer),
        ]
        self.pending[sent.data_ptr()] = (received, works)

    def add(self, sent: torch.Tensor, addend: torch.Tensor, out: torch.Tensor) -> None:
        self.receive(sent, out)
        out.add_(addend)

    def receive(self, sent: torch.Tensor, out: torch.Tensor) -> None:
        received, works = self.pending.pop(sent.data_ptr())
        for work in works:
            work.wait()
        out.copy_(received)


def run_with_peers(cases: list[str]) -> dict:
    with patch.object(peer_sums, "find", lambda group, device: GlooSums(group)):
        return run_cases(cases)


def sums_alive_after_a_strategy(strategy: str, options: list[str]) -> list[bool]:
    """Set a strategy up and drop it; return whether peer sums live before and after the close."""
    made: list[weakref.ref] = []

    def find(group: dist.ProcessGroup, device: torch.device) -> GlooSums:
        sums = GlooSums(group)
        made.append(weakref.ref(sums))
        return sums

    with patch.object(peer_sums, "find", find):
        with Runtime("cpu", timeout=20) as runtime:
            runtime.open_group()
            job = build(compose_config([*TINY, "batch_size=8", strategy, *options], None), runtime)
            job.trainer()
            del job
            gc.collect()
            before = made[0]() is not None
            peer_sums.SUMS_OF_GROUPS.clear()
        gc.collect()
        return [before, made[0]() is not None]


@pytest.mark.parametrize(
    "strategy", ["strategy=tp", pytest.param("strategy=mesh strategy.tp=2", marks=pytest.mark.slow)]
)
def test_peer_sums_live_until_the_group_closes_whenever_garbage_is_collected(strategy):
    """A rank that finds them again would not make others, for which the other rank waits."""
    first, *options = strategy.split()
    assert (
        run_world(2, sums_alive_after_a_strategy, first, options, timeout=60) == [[True, False]] * 2
    )


@pytest.mark.slow
def test_peer_sums_in_chunks_equal_single():
    """The last batch has an odd number of samples, so its chunks differ in size."""
    cases = ["tp tp=2 vit clipped", "mesh tp=2 short", "tp tp=2 vit samples=49 epochs=1"]
    cases.append("mesh tp=2 sequence_parallel=true short clipped")
    outcomes = run_world(2, run_with_peers, cases)[0]
    references = run_world(1, run_cases, list(dict.fromkeys(map(reference_of, cases))))[0]
    for case in cases:
        assert_equal(outcomes[case], references[reference_of(case)])


def compiled(backend: str, share_tokens: bool) -> dict:
    """Compile a pair of layers whose sums are custom operations, and compare it with eager mode."""
    from ddp_lab.strategies.activation_sums import make_group
    from ddp_lab.strategies.divided_blocks import divide

    with (
        Runtime("cpu") as runtime,
        patch.object(peer_sums, "find", lambda group, device: GlooSums(group)),
    ):
        runtime.open_group()
        mesh = runtime.mesh({"tp": 2})
        group, kept = make_group(mesh.get_group(), share_tokens, runtime.device)
        assert group.peers
        torch.manual_seed(0)
        block = Block(16, 4, 32, 0.0, "block").double()
        divide(block, mesh, group, replicate=False)
        kinds = {type(layer) for layer in block.modules()}
        assert {ColumnLinear, RowLinear} <= kinds
        by_compiler = torch.compile(block, backend=backend, dynamic=False, fullgraph=True)
        results = []
        for call in (block, by_compiler):
            block.zero_grad()
            tokens = (
                torch.linspace(-1, 1, 5 * 6 * 16, dtype=torch.float64)
                .reshape(5, 6, 16)
                .requires_grad_()
            )
            call(tokens).square().sum().backward()
            gradients = [parameter.grad for parameter in block.parameters()]
            local = [getattr(gradient, "_local_tensor", gradient) for gradient in gradients]
            results.append([tokens.grad, *(gradient.clone() for gradient in local)])
        kept.begin()
        del kept
        return {
            "difference": max(float((a - b).abs().max()) for a, b in zip(*results, strict=True))
        }


@pytest.mark.slow
@pytest.mark.parametrize("share_tokens", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", *extra(["inductor"])])
def test_peer_sums_are_parts_of_one_compiled_graph(backend, share_tokens):
    for rank in run_world(2, compiled, backend, share_tokens):
        assert rank["difference"] < 1e-9


class FakeSlot:
    """A slot that notes the barriers on it and the copies to it."""

    noted: ClassVar[list[tuple[str, "FakeSlot"]]] = []

    def __init__(self, size: int, group: str, device: torch.device):
        self.memory = torch.empty(size, dtype=torch.uint8)
        self.handle = self
        self.arrived = None

    def barrier(self, channel: int) -> None:
        assert channel == 0, "the ranks of a pair wait on one channel, of which torch has few"
        self.noted.append(("barrier", self))

    def there(self, like: torch.Tensor) -> torch.Tensor:
        self.noted.append(("copy", self))
        return torch.empty_like(like)

    def here(self, like: torch.Tensor) -> torch.Tensor:
        self.noted.append(("read", self))
        return torch.zeros_like(like)


@pytest.mark.parametrize("chunks", [1, 2])
def test_slot_is_written_after_a_barrier_that_follows_its_last_use(chunks):
    """After the first sum of a step (or CUDA graph), one barrier per sum is enough."""
    FakeSlot.noted.clear()
    fakes = {name: MagicMock() for name in ("Stream", "stream", "current_stream", "Event")}
    fakes["is_current_stream_capturing"] = lambda: False
    with patch.object(peer_sums, "Slot", FakeSlot), patch.multiple(torch.cuda, **fakes):
        sums = peer_sums.PeerSums(MagicMock(), torch.device("cpu"))
        for _ in range(8):
            before = len(FakeSlot.noted)
            sums.begin()
            for size in (30_000, 30_000, 60_000, 30_000, 60_000, 60_000):
                addends = [torch.ones(size) for _ in range(chunks)]
                for each in addends:
                    sums.start(each)
                for each in addends:
                    sums.add(each, each, torch.empty_like(each))
        barriers = [kind for kind, _ in FakeSlot.noted[before:]].count("barrier")
        assert barriers == 6 * chunks + 1, "the first sum of a step needs two"
    used: set[FakeSlot] = set()  # since the last barrier
    for kind, slot in FakeSlot.noted:
        if kind == "barrier":
            used.clear()
        assert kind != "copy" or slot not in used
        if kind == "read":
            used.add(slot)


def test_prediction_is_at_most_what_flops_and_bytes_allow():
    """Half of the FLOPs is divided by two ranks.

    Half of the sums is hidden by a third of the divided FLOPs.
    """
    made = Prediction(tp=2, flops=8.0, divided=4.0, sums=1.0, gradients=3.0, rate=1.0, link=1.0)
    assert made.alone == 8.0
    assert made.seconds == pytest.approx(4 + 2 + 1 + (1 - 2 / 3))
    assert made.replicated == pytest.approx(4 + (3 - 4 * 2 / 3))
    assert "tp=2 is at most 1.09x as fast as one GPU" in str(made)


def test_prediction_names_the_times_of_the_faster_strategies():
    """The sums take longer than what they save: 0.002 of 0.004 s are saved, and 0.01 s are sent."""
    made = Prediction(tp=2, flops=4e9, divided=4e9, sums=1e9, gradients=1e8, rate=1e12, link=1e11)
    assert made.alone == pytest.approx(0.004)
    assert made.replicated == pytest.approx(0.002)
    text = str(made)
    assert "tp=2 is not faster than one GPU, " in text
    assert (
        " ms for 4 ms on one GPU, with 2 GB to send at 100 GB/s; strategy=ddp would be faster, "
        "with 2 ms" in text
    )


@pytest.mark.parametrize(
    ("strategy", "is_predicted"), [("tp", True), ("mesh strategy.tp=2", True), ("ddp", False)]
)
def test_log_of_a_run_on_gpus_predicts_what_tensor_parallelism_gains(
    strategy, is_predicted, monkeypatch
):
    cfg = compose_config([*TINY, "batch_size=8", *f"strategy={strategy}".split()], None)
    job = build(cfg, PlannedRuntime(2, 2, "bf16", kind="cpu"))
    assert predict_here(job) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    assert (predict_here(job) is not None) == is_predicted


@pytest.mark.slow
def test_advise_predicts_what_tensor_parallelism_gains():
    (line,) = advice("tp tp=2", *LARGE, "model.depth=4", "batch_size=64")[0].notes
    assert line.startswith("tp tp=2: prediction from FLOPs and bytes: tp=2 is at most 1.7")


@pytest.mark.parametrize(
    ("batch_size", "faster"), slow_but([(8192, "ddp")], [(8, "single"), (8192, "ddp")])
)
def test_advise_names_what_is_faster_where_tensor_parallelism_gains_nothing(batch_size, faster):
    """The sums of narrow tokens take longer than what they save; ddp sends 0.1 MB for any batch."""
    narrow = [*TINY, "model.width=32", "model.heads=4", "precision=bf16"]
    (line,) = advice("tp tp=2", *narrow, f"batch_size={batch_size}")[0].notes
    assert "tp=2 is not faster than one GPU" in line
    assert f"strategy={faster} would be faster" in line


def test_slots_are_no_more_than_two_consecutive_sums_in_two_chunks_need():
    """They take memory of the GPUs. The first one of the smallest size is made with the object."""
    made: Counter[int] = Counter()

    class CountedSlot(FakeSlot):
        def __init__(self, size: int, group: str, device: torch.device):
            super().__init__(size, group, device)
            made[size] += 1

    fakes = {name: MagicMock() for name in ("Stream", "stream", "current_stream", "Event")}
    fakes["is_current_stream_capturing"] = lambda: False
    with patch.object(peer_sums, "Slot", CountedSlot), patch.multiple(torch.cuda, **fakes):
        sums = peer_sums.PeerSums(MagicMock(), torch.device("cpu"))
        for _ in range(20):
            sums.begin()
            addends = torch.ones(30_000)  # 120 kB
            sums.start(addends)
            sums.add(addends, addends, torch.empty_like(addends))
    assert made == {2**16: 1, 2**17: 4}


@pytest.mark.parametrize(("ranks", "is_found"), [([0], False), ([0, 1], True), ([0, 1, 2], False)])
def test_sums_of_peers_are_those_of_a_pair_which_keeps_them(ranks, is_found):
    group = MagicMock(group_name="group of the test")
    kept = MagicMock(group=group)
    numbers = patch.object(dist, "get_process_group_ranks", lambda group: ranks)
    with patch.dict(peer_sums.SUMS_OF_GROUPS, {group.group_name: kept}), numbers:
        assert peer_sums.find(group, torch.device("cuda")) is (kept if is_found else None)
        assert peer_sums.find(group, torch.device("cpu")) is None
