"""`advise`: what it plans, prints, draws and writes, and what it refuses."""

import json
import re
import shlex
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch
from browser import open_page
from launches import refusal_in_world
from torch.utils.flop_counter import FlopCounterMode
from worlds import run_world

from ddp_lab.advise.advisor import Advisor, Row
from ddp_lab.advise.devices import GiB, find_devices
from ddp_lab.advise.plan import time_slots
from ddp_lab.advise.report import as_json, page, table
from ddp_lab.commands import advise
from ddp_lab.config.errors import ConfigError
from ddp_lab.models.lenet import lenet

SYNTHETIC = ["data=synthetic", "data.dataset.image_size=28"]
VIT = ["model=vit", "model.depth=2", *SYNTHETIC, "speed=off"]


def advisor(*overrides: str, gpus: str = "2xH100", nodes: int = 1) -> Advisor:
    return Advisor.of(overrides, None, find_devices(gpus, nodes))


def words_of(strategy: str) -> list[str]:
    name, *options = strategy.split()
    return [f"strategy={name}", *(f"strategy.{each}" for each in options)]


@cache
def advised(strategies: tuple[str, ...], *overrides: str, gpus: str = "2xH100") -> Advisor:
    """Return the advice on some strategies only."""
    limited = advisor(*overrides, gpus=gpus)
    limited.candidates = lambda: [words_of(strategy) for strategy in strategies]
    return limited.advise()


def planned(strategy: str, *overrides: str, gpus: str = "2xH100", nodes: int = 1) -> Row:
    return advisor(*overrides, gpus=gpus, nodes=nodes).plan(words_of(strategy))


def own_model(name: str) -> list[str]:
    return ["model=own", f"model._target_=own_models.{name}", "data=digits", "batch_size=256"]


@pytest.mark.covers("advise --picture", "advise --html")
def test_command_prints_a_table_and_writes_json_and_a_picture(tmp_path, command):
    files = (
        f"--json {tmp_path}/advice.json --picture {tmp_path}/memory.png --html "
        f"{tmp_path}/advice.html"
    )
    code, output, errors = command(
        advise.main, *f"--gpus 2xH100 batch_size=256 strategy=ddp {files}".split()
    )
    assert code == 0, errors
    lines = output.splitlines()
    assert (
        lines[0]
        == "2 x H100 (79.1 GiB); 129,068 parameters, images 1x28x28, batch_size=256, float32"
    )
    assert (
        lines[-2]
        == "Recommended: ddp, the simplest that fits and uses all GPUs, in the order of the table"
    )
    assert "images/s" not in output, "nobody has measured it"
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    advice = json.loads((tmp_path / "advice.json").read_text())
    assert {"single", "ddp", "fsdp", "pipeline", "scratch", "split", "tp tp=2"} <= {
        row["name"] for row in advice["rows"]
    }
    row = advice["rows"][1]
    (rank,) = row["plans"]
    assert rank["held"]["parameters"] == 4 * 129_068
    assert rank["allocated"] == pytest.approx(sum(rank["peak"].values()))
    assert rank["total"] == rank["allocated"] + rank["outside"]
    assert [each["bytes_sent"] for each in rank["collectives"]] == [4 * 129_068]
    assert (
        lines[-1].strip()
        == row["launch"]
        == "torchrun --standalone --nproc_per_node=2 -m ddp_lab batch_size=256 strategy=ddp"
    )
    assert advice["recommended"] == ["strategy=ddp"]
    assert row["launch"] in (tmp_path / "advice.html").read_text()


@pytest.mark.slow
def test_page_shows_memory_and_pipelines_in_a_browser_and_loads_nothing(tmp_path):
    advice = replace(
        advised(("single", "pipeline"), *VIT, gpus="4xH100"),
        notes=["<script>document.title='injected'</script>"],
    )
    (tmp_path / "advice.html").write_text(page(advice))
    shown = open_page((tmp_path / "advice.html").as_uri(), tmp_path, "--dump-dom")
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", shown))
    for row in advice.rows:
        assert row.name in text
    assert "pipeline, by rank" in text
    assert all(f"rank {rank}" in text for rank in range(4))
    boxes = re.findall(r"fill: #ffffff[^>]*>(\d)</text>", shown)
    assert Counter(boxes) == {str(number): 8 for number in range(8)}, (
        "forward and backward of 8 micro-batches on 4 ranks"
    )
    assert "<title>What a run needs</title>" in shown, "notes are escaped"
    assert not re.search(r"""(src|href)=["'](?!#)|url\((?!#)|@import""", shown), "nothing is loaded"
    options = f"--screenshot={tmp_path}/shot.png", "--window-size=1400,2400"
    open_page((tmp_path / "advice.html").as_uri(), tmp_path, *options)
    from PIL import Image

    colours = Image.open(tmp_path / "shot.png").convert("RGB").getcolors(1_000_000)
    assert sum(count for count, colour in colours if max(colour) - min(colour) > 40) > 20_000, (
        "coloured bars are drawn"
    )


def test_pipelines_wait_for_their_input_and_idle_as_the_bubble_says():
    order = {
        0: ["0F0", "0F1", "0B0", "0B1"],
        1: ["1F0", "1B0", "1F1", "1B9", "1REDUCE_GRAD"],
    }  # torch numbers some passes wrongly
    slots = time_slots(order)
    assert slots[0] == [(0, 1, "F", 0), (1, 1, "F", 1), (4, 2, "B", 0), (7, 2, "B", 1)]
    assert slots[1] == [(1, 1, "F", 0), (2, 2, "B", 0), (4, 1, "F", 1), (5, 2, "B", 1)]
    halves = {0: ["0F0", "0I0", "0W0"], 1: ["1F0", "1I0", "1W0"]}
    assert time_slots(halves)[0] == [(0, 1, "F", 0), (3, 1, "I", 0), (4, 1, "W", 0)]


@pytest.mark.parametrize(
    "strategy",
    [
        "ddp",
        pytest.param("scratch", marks=pytest.mark.slow),
        "fsdp",
        pytest.param("tp tp=2", marks=pytest.mark.slow),
        pytest.param("mesh shard=null", marks=pytest.mark.slow),
    ],
)
def test_module_of_the_user_is_planned_under_every_strategy_that_takes_it(strategy):
    row = planned(strategy, *own_model("Plain"))
    assert row.ranks == 2
    assert row.plans


def test_flops_are_those_of_torch():
    with FlopCounterMode(display=False) as counter:
        lenet(1, 28, 10, None)(torch.zeros(64, 1, 28, 28)).sum().backward()
    (plan,) = planned("ddp", "data=digits", "batch_size=128").plans
    assert plan.flops == counter.get_total_flops()


@pytest.mark.slow
def test_every_stage_of_a_pipeline_is_planned_and_groups_that_cross_machines_are_known():
    planner = advisor(*VIT, nodes=2)
    planner.rows = [planner.plan(["strategy=ddp_pipeline", "strategy.pp=2"])]
    assert [plan.rank for plan in planner.rows[0].plans] == [0, 1]
    crossing = {
        each["name"]: each["crosses_machines"]
        for each in as_json(planner)["rows"][0]["plans"][0]["collectives"]
    }
    assert crossing == {"send": False, "recv": False, "allreduce": True}


@pytest.mark.slow
def test_thousands_of_ranks_are_planned():
    row = planned("fsdp", *VIT, "batch_size=8192", gpus="8xH100", nodes=512)
    assert row.devices == 4096
    assert {len(group.ranks) for group in row.fullest.calls} == {4096}
    assert row.bound == pytest.approx(sum(row.fullest.sent.values()) / 50e9), (
        "all of it crosses machines"
    )


@pytest.mark.slow
def test_warm_up_before_a_capture_copies_weights_and_momenta():
    """A compiled step warms up once: the optimizer has no state yet that would be copied."""
    state = planned("ddp", *VIT).fullest.state_bytes
    for keys, expected in {
        "cuda_graph=true": state["parameters"] + state["optimizer"] + state["buffers"],
        "compile=true": state["parameters"] + state["buffers"],
        "speed=off": 0,
    }.items():
        assert planned("ddp", *VIT, keys).fullest.peak["copies"] == expected, keys


@pytest.mark.slow
def test_unsharded_gradients_of_accumulation_are_counted():
    once, twice = (planned("fsdp", *VIT, f"accumulate={number}").fullest for number in (1, 2))
    assert (
        twice.peak["gradients"] + twice.peak["in flight"]
        > once.peak["gradients"] + once.peak["in flight"]
    )


def test_own_strategy_is_planned_with_its_options_as_they_were_given():
    planner = advisor("strategy=fsdp", "strategy.reshard_after_forward=false", *SYNTHETIC)
    assert planner.chosen in planner.candidates()
    row = planner.plan(planner.chosen)
    assert row.name == "fsdp reshard_after_forward=false"
    assert shlex.split(row.launch)[-2:] == ["strategy=fsdp", "strategy.reshard_after_forward=false"]


def test_strategy_of_the_user_is_planned_without_a_method_for_it(tmp_path):
    (tmp_path / "strategy").mkdir()
    (tmp_path / "strategy" / "mine.yaml").write_text("_target_: own_strategies.Mine\n")
    planner = Advisor.of(["strategy=mine", *VIT], str(tmp_path), find_devices("4xH100"))
    row = planner.plan(planner.chosen)
    assert sum(row.fullest.calls.values()) == len(list(planner.model.parameters())), (
        "an all-reduce for each parameter"
    )


def test_what_cannot_be_laid_out_is_listed_with_the_reason_and_others_briefly():
    shown = table(advised(("single", "mesh tp=3"), *VIT, "strategy=mesh", "strategy.tp=3"))
    assert "\nnot in the table: mesh tp=3: strategy.tp=3: cannot lay 2 ranks on a mesh" in shown
    brief = table(
        advised(
            ("single", "pipeline"),
            "model=torchvision",
            "model.name=resnet18",
            "data=cifar10",
            "speed=off",
        )
    )
    assert (
        "\nnot in the table: pipeline: the stages of a model that is no Chain are traces, which "
        "are not planned\n" in brief
    )
    assert "Use single" not in brief, "nobody has chosen them"
    with pytest.raises(
        ConfigError, match=r"single: a step on tensors without values failed: DataDep"
    ):
        advised(("single", "ddp"), *own_model("waiting_blocks"), gpus="1xH100")


def test_model_that_fails_is_refused_with_the_message_of_train():
    overrides = [*own_model("Wrong"), "+model.how=head"]
    code, text = run_world(1, refusal_in_world, " ".join([*overrides, "device=cpu"]))[0]
    assert code == 2
    with pytest.raises(ConfigError) as error:
        advisor(*overrides)
    assert text.strip() == f"error: {error.value}"


def test_recomputed_activations_are_those_of_the_candidate():
    planner = advisor(*VIT)
    kept, recomputed = (
        planner.plan(["strategy=fsdp", *options]).fullest.peak["activations"]
        for options in ([], ["checkpoint_activations=block"])
    )
    assert ["strategy=fsdp", "checkpoint_activations=block"] in planner.candidates()
    assert recomputed < 0.8 * kept


def test_nothing_that_does_not_fit_is_recommended():
    advice = advised(("single",), *VIT)
    small = replace(
        advice,
        rows=[replace(row, fits=False) for row in advice.rows],
        devices=replace(advice.devices, memory=GiB / 10),
    )
    assert small.ranked == []
    assert small.conclusion.startswith("Nothing fits: ")
    assert "does not fit" in table(small)


def test_card_is_found_by_the_name_that_torch_reports(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 2**34))
    names = {
        **{
            "NVIDIA A100-SXM4-40GB": "A100-80",
            "NVIDIA L40S": "L40S",
            "NVIDIA L4": "L4",
            "NVIDIA GeForce RTX 4090": "RTX4090",
        },
        "NVIDIA T4": None,
    }
    for name, card in names.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
        assert find_devices("here").card == card


CARD = "must be here, or a number up to 9999 and a card such as 2xH100. Cards: B200, H200"
REFUSED = {
    "--gpus 2xH900": f"--gpus 2xH900: {CARD}",
    "--gpus 10000xH100": f"--gpus 10000xH100: {CARD}",
    "--gpus 2xH100 --nodes 0": "--nodes 0: must be a number above 0",
    "--gpus 2xH100 --picture a.xyz": "--picture a.xyz: must be the name of a .png file",
    "--gpus 2xH100 --html a.png": "--html a.png: must be the name of a .html file",
    "--gpus 2xH100 device=cpu": "device and strategy.devices: plans are made for all devices that "
    "--gpus names; leave them out",
    "--gpus 2xH100 batch_size=auto": "batch_size=auto: is chosen when training starts; use a "
    "number for plans",
    "--gpus 2xH100 --config-dir /nope": "--config-dir /nope: there is no such directory. Use the "
    "directory of your own yaml",
    "--gpus 2xH100 --measure": "--measure: measures the devices here; use --gpus here, or --gpus "
    "2xcpu, in place of 2xH100",
    "--gpus 2xH100 --json /no/such/file.json": "--json /no/such/file.json: cannot be written: "
    "/no/such does not exist",
    **(
        {}
        if torch.cuda.is_available()
        else {"--gpus here": "--gpus here: there is no GPU here. Use 2xcpu, or a number and a card"}
    ),
}


@pytest.mark.parametrize("line", REFUSED)
def test_wrong_arguments_are_refused_with_the_remedy(line, command):
    code, _, errors = command(advise.main, *shlex.split(line))
    assert code == 2
    assert f"error: {REFUSED[line]}" in errors
