"""`advise`: what it plans, prints and writes, and what it refuses."""

import json
import shlex
from dataclasses import replace
from functools import cache

import pytest
import torch
from launches import launch, refusal_in_world
from torch.utils.flop_counter import FlopCounterMode
from worlds import run_world

from ddp_lab.advise.advisor import Advice, Advisor, Row, places
from ddp_lab.advise.candidates import Candidate
from ddp_lab.advise.machine import GiB, find_machine
from ddp_lab.advise.report import as_json, table
from ddp_lab.commands import advise
from ddp_lab.config.errors import ConfigError
from ddp_lab.models.lenet import lenet

SYNTHETIC = ["data=synthetic", "data.dataset.image_size=28"]
VIT = ["model=vit", *SYNTHETIC, "speed=off"]


def advisor(*overrides: str, gpus: str = "2xH100", nodes: int = 1) -> Advisor:
    return Advisor(list(overrides), None, find_machine(gpus, nodes))


@cache
def advised(*overrides: str, gpus: str = "2xH100") -> Advice:
    return advisor(*overrides, gpus=gpus).advise()


def planned(strategy: str, *overrides: str, gpus: str = "2xH100", nodes: int = 1, **options) -> Row:
    found = advisor(*overrides, gpus=gpus, nodes=nodes)
    return found.plan(Candidate(strategy, options, found.machine.gpus))


def own_model(name: str) -> list[str]:
    return ["model=own", f"model._target_=own_models.{name}", "data=digits", "batch_size=256"]


def test_command_prints_a_table_and_writes_json_and_a_picture(tmp_path):
    files = f"--json {tmp_path}/advice.json --picture {tmp_path}/memory.png"
    code, output = launch(f"python -m ddp_lab advise --gpus 2xH100 batch_size=256 strategy=ddp {files}")
    assert code == 0, output
    lines = output.splitlines()
    assert lines[0].startswith("2 x H100 (79.1 GiB); 129,068 parameters, images 1x28x28, batch_size=256, float32")
    assert lines[-2] == "Recommended: ddp, the simplest that fits and uses all GPUs, in the order of the table"
    assert "images/s" not in output, "nobody has measured it"
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / "advice.json").read_text())
    names = [row["overrides"][0].removeprefix("strategy=") for row in found["rows"]]
    assert {"single", "ddp", "fsdp", "pipeline", "scratch", "split", "tp"} <= set(names)
    row = found["rows"][1]
    (rank,) = row["ranks"]
    assert rank["held"]["parameters"] == 4 * 129_068
    assert rank["allocated"] == pytest.approx(sum(rank["peak"].values()))
    assert rank["total"] == rank["allocated"] + rank["outside"]
    assert [each["bytes_sent"] for each in rank["collectives"]] == [4 * 129_068]
    assert shlex.split(lines[-1]) == shlex.split(row["launch"])
    assert found["recommended"] == ["strategy=ddp"]


def test_flops_are_those_of_torch():
    with FlopCounterMode(display=False) as counter:
        lenet(1, 28, 10, None)(torch.zeros(64, 1, 28, 28)).sum().backward()
    (plan,) = planned("ddp", "data=digits", "batch_size=128").plans
    assert plan.flops == counter.get_total_flops()


def test_fullest_rank_of_a_pipeline_is_planned_and_groups_that_cross_machines_are_known():
    row = planned("ddp_pipeline", *VIT, gpus="2xH100", nodes=2, pp=2)
    assert [plan.rank for plan in row.plans] == [0, 1]
    assert row.fullest.rank == 0
    crossing = {group["name"]: group["crosses_machines"] for group in json_of(row)["ranks"][0]["collectives"]}
    assert crossing == {"send": False, "recv": False, "allreduce": True}


def json_of(row: Row) -> dict:
    return as_json(replace(advised(*VIT), rows=[row], machine=find_machine("2xH100", 2)))["rows"][0]


def test_thousands_of_ranks_are_planned():
    row = planned("fsdp", *VIT, "batch_size=8192", gpus="8xH100", nodes=512)
    assert row.devices == 4096
    assert {len(group.ranks) for group in row.fullest.calls} == {4096}
    assert row.bound == pytest.approx(sum(row.fullest.sent.values()) / 50e9), "all of it crosses machines"


def test_long_pipelines_plan_some_of_their_ranks():
    class Strategy:
        axes, one_process = {"pp": 64, "replicate": 1, "shard": 2, "tp": 4}, False

    assert [rank // 8 for rank in places(Strategy())] == [0, 1, 2, 3, 32, 61, 62, 63]


def test_shards_and_checkpointing_take_less_memory():
    memory = {row.name: row.fullest.allocated for row in advised(*VIT, "optimizer=adamw", "batch_size=1024").rows}
    assert memory["fsdp"] < memory["ddp"] < memory["single"]
    assert memory["fsdp checkpoint_activations=block"] < memory["fsdp"]


def test_warm_up_before_a_capture_copies_weights_and_momenta():
    """Before a compiled step, which warms up once, the optimizer has no state that would be copied."""
    held = planned("ddp", *VIT).fullest.held
    for keys, expected in {
        "cuda_graph=true": held["parameters"] + held["optimizer"] + held["buffers"],
        "compile=true": held["parameters"] + held["buffers"],
    }.items():
        assert planned("ddp", *VIT, keys).fullest.peak["copies"] == expected, keys
    assert planned("ddp", *VIT).fullest.peak["copies"] == 0


def test_offloaded_state_is_in_host_memory():
    plan = planned("fsdp", *VIT, "optimizer=adamw", offload=True).fullest
    assert plan.host == sum(plan.held[kind] for kind in ("parameters", "gradients", "optimizer"))
    assert plan.peak["parameters"] == plan.peak["optimizer"] == 0
    table_line = next(line for line in table(advised(*VIT, "optimizer=adamw")).splitlines() if line.startswith("fsdp offload"))
    assert table_line.endswith("GiB a rank in host memory")


def test_unsharded_gradients_of_accumulation_are_counted():
    once, twice = (planned("fsdp", *VIT, f"accumulate={number}").fullest for number in (1, 2))
    assert twice.peak["gradients"] + twice.peak["in flight"] > once.peak["gradients"] + once.peak["in flight"]


def test_own_strategy_is_listed_with_its_options_as_they_were_given():
    advice = advised("strategy=fsdp", "strategy.reshard_after_forward=false", *SYNTHETIC)
    row = next(row for row in advice.rows if row.overrides == advice.own)
    assert row.name == "fsdp reshard_after_forward=false"
    assert shlex.split(row.launch)[-2:] == ["strategy=fsdp", "strategy.reshard_after_forward=false"]
    assert "your strategy: fsdp reshard_after_forward=false" in table(advice)


def test_own_strategy_of_the_user_is_planned_without_a_method_for_it(tmp_path):
    (tmp_path / "strategy").mkdir()
    (tmp_path / "strategy" / "mine.yaml").write_text("_target_: own_strategies.Mine\n")
    found = Advisor(["strategy=mine", *VIT], str(tmp_path), find_machine("4xH100"))
    row = found.plan(found.own)
    assert sum(row.fullest.calls.values()) == len(list(found.model.parameters())), "an all-reduce for each parameter"


def test_what_cannot_be_laid_out_or_planned_is_listed_with_the_reason():
    shown = table(advised(*VIT, "strategy=mesh", "strategy.tp=3"))
    assert "\nmesh tp=3: strategy.tp=3: cannot lay 2 ranks on a mesh" in shown
    with pytest.raises(ConfigError, match=r"single: cannot be planned: a step on tensors without values failed: DataDep"):
        advised(*own_model("Waiting"), gpus="1xH100")


def test_model_that_fails_is_refused_with_the_message_of_train():
    code, text = run_world(1, refusal_in_world, " ".join([*own_model("Broken"), "device=cpu"]))[0]
    assert code == 2
    with pytest.raises(ConfigError) as error:
        advisor(*own_model("Broken"))
    assert text.strip() == f"error: {error.value}"


def test_nothing_that_does_not_fit_is_recommended():
    advice = advised(*VIT)
    small = replace(advice, rows=[replace(row, memory=GiB / 10) for row in advice.rows])
    assert small.ranked == []
    assert small.conclusion.startswith("Nothing fits: ")
    assert "does not fit" in table(small)


def test_batches_larger_than_the_dataset_are_planned_with_a_note():
    line = "batches of 1,438 are planned, but the dataset has 1,437 samples: real steps are smaller"
    assert advisor("data=digits", "batch_size=719", "scaling=weak").notes() == [line]


CARD = "must be here, or a number and a card such as 2xH100."
REFUSED = {
    "--gpus 2xH900": f"--gpus 2xH900: {CARD} Did you mean 2xH200 or 2xH100? Cards: B200, H200",
    "--gpus 0xH100": "--gpus 0xH100: must be here, or a number and a card",
    "--gpus 100000xH100": "--gpus 100000xH100: at most 9,999 GPUs of one machine are supported; see --nodes",
    "--gpus 2xA100": f"--gpus 2xA100: {CARD} Did you mean 2xA100-80 or 2xA100-40? Cards:",
    "--gpus 2xH100 --nodes 0": "--nodes 0: must be an integer of at least 1",
    "--gpus 2xH100 --link nan": "--link nan: must be a number above 0, in GB/s",
    "--gpus 2xH100 --picture a.xyz": "--picture a.xyz: must be the name of a .png file",
    "--gpus 2xH100 device=cpu": "device=cpu: plans are made for all devices that --gpus names; leave it out",
    "--gpus 2xH100 strategy=split strategy.devices=[cuda:0]": "strategy.devices=[cuda:0]: all GPUs that",
    "--gpus 2xH100 model.weights=/nope/x.pt": "model.weights=/nope/x.pt: cannot be read on ",
    "--gpus 2xH100 --config-dir /nope": "--config-dir /nope: there is no such directory. Use the directory of your own yaml",
    "--gpus 2xH100 --measure": "--measure: measures the devices here; use --gpus here, or --gpus 2xcpu, in place of 2xH100",
    "--gpus 2xcpu --measure --minutes 0": "--minutes 0: must be a number above 0",
    "--gpus 2xH100 --json /no/such/file.json": "--json /no/such/file.json: cannot be written: /no/such does not exist",
}


@pytest.mark.parametrize("line", REFUSED)
def test_wrong_arguments_are_refused_with_the_remedy(line, command):
    code, _, errors = command(advise.main, *shlex.split(line))
    assert code == 2
    assert f"error: {REFUSED[line]}" in errors


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_gpus_here_without_a_gpu_is_refused():
    with pytest.raises(ConfigError, match=r"^--gpus here: there is no GPU here. Use --gpus with a number and a card"):
        find_machine("here")
