"""`python -m ddp_lab advise`: what it prints and writes, and what it refuses."""

import json
import os
import re
import shlex
import sys
from dataclasses import replace
from functools import cache

import pytest
import torch
from launches import launch, refusal_in_world
from worlds import run_world

from ddp_lab.commands import advise as command
from ddp_lab.config.errors import ConfigError
from ddp_lab.estimate.advice import Advice
from ddp_lab.estimate.buckets import buckets_of
from ddp_lab.estimate.cards import CARDS, GiB
from ddp_lab.estimate.constants import ASSUMED
from ddp_lab.estimate.report import as_json, best_of, memory_plot, table
from ddp_lab.run.advise import advise
from ddp_lab.run.advisor import Advisor
from ddp_lab.run.candidates import Candidate, candidates, with_own
from ddp_lab.run.machine import Machine, find_machine
from ddp_lab.strategies.fsdp import FSDP
from ddp_lab.strategies.pipeline import Pipeline
from ddp_lab.strategies.tp import TP

SYNTHETIC = ["data=synthetic", "data.dataset.image_size=28"]
VIT = ["model=vit", *SYNTHETIC]


@cache
def advised(*overrides: str, gpus: str = "4xH100", nodes: int = 1) -> Advice:
    return advise(list(overrides), None, find_machine(gpus, nodes, None))


def names(advice: Advice) -> list[str]:
    return [prediction.name for prediction in advice.listed]


def test_command_prints_a_table_and_writes_json_and_a_picture(tmp_path):
    files = f"--json {tmp_path}/advice.json --picture {tmp_path}/memory.png"
    code, output = launch(f"python -m ddp_lab advise --gpus 2xH100 batch_size=256 {files}")
    assert code == 0, output
    lines = output.splitlines()
    assert lines[0].startswith("2 x H100 (79.1 GiB); 129,068 parameters, images 1x28x28, batch_size=256, float32")
    assert lines[-1].startswith("  ")
    assert lines[-2] == "speed=auto is predicted to switch on cuda_graph, channels_last, optimizer.fused"
    assert lines[-3].startswith("Recommended: ")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / "advice.json").read_text())
    assert found.keys() == {"head", "card_memory", "own", "predictions", "notes", "refused", "recommended", "conclusion"}
    first = found["predictions"][0]
    assert first.keys() == {
        "overrides",
        "devices",
        "fits",
        "memory",
        "held",
        "host",
        "time",
        "images_per_second",
        "gpu_hours",
        "launch",
        "chosen",
    }
    memory = dict(first["memory"])
    total, allocated = memory.pop("total"), memory.pop("allocated")
    assert total == pytest.approx(sum(memory.values()))
    assert total == pytest.approx(allocated + memory["nccl"] + memory["context"])
    assert first["held"]["parameters"] == 4 * 129_068
    time = dict(first["time"])
    assert time.pop("total") == pytest.approx(sum(time.values()))
    assert found["refused"][0].keys() == {"overrides", "reason"}
    assert (
        lines[-1].split()
        == next(each["launch"] for each in found["predictions"] if each["overrides"] == found["recommended"]).split()
    )


def test_every_strategy_and_mesh_is_predicted_or_refused_with_the_reason():
    advice = advised(*VIT)
    kinds = {prediction.overrides[0].removeprefix("strategy=") for prediction in advice.predictions}
    assert kinds == {"single", "scratch", "dp", "ddp", "split", "pipeline", "ddp_pipeline", "tp", "fsdp", "mesh"}
    assert {"mesh pp=2 tp=2 sequence_parallel=true", "mesh shard=2", "fsdp checkpoint_activations=block"} <= set(names(advice))
    assert [refused.overrides for refused in advice.refused] == [["strategy=tp", "strategy.tp=4"]]
    assert "10 units of head" in advice.refused[0].reason
    assert all(prediction.memory.total > 0 and prediction.time.total > 0 for prediction in advice.predictions)


def test_own_strategy_comes_first_with_its_options():
    advice = advised(*VIT, "strategy=fsdp", "strategy.reshard_after_forward=false", gpus="2xH100")
    assert names(advice)[0] == "fsdp reshard_after_forward=false"
    freed, kept = (each for each in advice.predictions if each.name in ("fsdp", "fsdp reshard_after_forward=false"))
    assert "fsdp reshard_after_forward=false" in [each.name for each in best_of(advice)]
    assert kept.memory.buckets > freed.memory.buckets


def test_own_strategy_that_cannot_be_laid_is_reported_with_the_reason():
    advice = advised("strategy=mesh", "strategy.tp=3", gpus="2xH100")
    shown = table(advice, everything=False)
    assert "\nmesh tp=3  is refused: " in shown
    assert "cannot lay 2 ranks on a mesh" in shown
    assert as_json(advice)["own"] == ["strategy=mesh", "strategy.tp=3"]


def test_options_of_the_strategy_that_an_experiment_chooses_apply_to_it():
    experiment = ["experiment=book_lenet", *SYNTHETIC]
    advice = advised(*experiment, "strategy.algorithm=ring", gpus="2xH100")
    assert names(advice)[0] == "scratch algorithm=ring"
    assert advice.listed[0].launch.endswith(f"ddp_lab {' '.join(experiment)} strategy.algorithm=ring")
    advice = advised(*experiment, gpus="2xH100")
    assert names(advice)[0] == "scratch"
    assert as_json(advice)["own"] == ["strategy=scratch"]
    assert as_json(advised(*SYNTHETIC, gpus="2xH100"))["own"] is None


@pytest.mark.parametrize("change", ["++strategy.num_microbatches=16", "~strategy.balance"])
def test_changes_of_the_strategy_are_not_applied_to_other_strategies(change):
    advice = advised("strategy=pipeline", change, gpus="2xH100")
    own = f"pipeline{' num_microbatches=16' if '16' in change else ''}"
    assert names(advice)[0] == own
    assert shlex.split(advice.listed[0].launch)[-2:] == ["strategy=pipeline", change]
    assert [each.name for each in advice.predictions if change in each.launch] == [own]


def test_own_mesh_is_listed_once_whatever_the_order_of_its_options():
    advice = advised(*VIT, "strategy=mesh", "strategy.tp=2", "strategy.pp=2")
    assert names(advice)[0] == "mesh tp=2 pp=2"
    assert "mesh pp=2 tp=2" not in names(advice)
    assert len(advice.predictions) == len(advised(*VIT).predictions)


def test_shards_and_checkpointing_take_less_memory():
    advice = advised(*VIT, "optimizer=adamw", "batch_size=1024", "model.depth=8", "speed=off", gpus="2xH100")
    memory = {prediction.name: prediction.memory.allocated for prediction in advice.predictions}
    assert memory["fsdp"] < memory["ddp"] < memory["single"]
    assert memory["fsdp checkpoint_activations=block"] < memory["fsdp checkpoint_activations=selective"] < memory["fsdp"]
    assert memory["mesh tp=2 sequence_parallel=true"] < memory["mesh tp=2"]


def test_warm_up_before_a_capture_copies_weights_and_momenta():
    """Before a compiled step, which warms up once, the optimizer has no state that would be copied."""
    one = {
        speed: advised(*VIT, "strategy=single", f"speed={speed.strip()}", *more, gpus="1xH100").predictions[0]
        for speed, more in {"off": [], "auto": ["compile=false"], "off ": ["compile=true"]}.items()
    }
    held = one["off"].held
    assert [one[speed].memory.copies for speed in one] == [
        0,
        held.parameters + held.optimizer + held.buffers,
        held.parameters + held.buffers,
    ]


def test_gradients_of_several_micro_batches_are_added_up():
    once, twice = (
        {
            each.name: each
            for each in advised(*VIT, "speed=off", "batch_size=64", f"accumulate={number}", gpus="2xH100").predictions
        }
        for number in (1, 2)
    )
    whole = once["single"].held.parameters
    assert once["fsdp"].memory.gradients < once["fsdp"].held.parameters
    assert twice["fsdp"].memory.gradients == whole, "gradients are not scattered before the last step"
    assert twice["single"].memory.gradients == whole > once["single"].memory.gradients


def test_weak_scaling_is_ranked_by_images_per_second():
    advice = advised("data=fashion_mnist", "model=resnet18", "batch_size=256", "scaling=weak", gpus="2xH100")
    single, ddp = (next(each for each in advice.predictions if each.name == name) for name in ("single", "ddp"))
    assert single.time.total < ddp.time.total
    assert single.images_per_second < ddp.images_per_second
    assert advice.conclusion.startswith("Recommended: ddp, ")


@pytest.mark.slow
def test_what_does_not_fit_is_not_recommended():
    card = CARDS["H100"]
    fitting = advised(*VIT, "batch_size=4096", gpus="2xH100")
    limit = sorted(prediction.memory.total for prediction in fitting.predictions)[3]
    advice = advise([*VIT, "batch_size=4096"], None, Machine(replace(card, memory=limit), 2, 1, 50e9))
    assert sum(prediction.fits for prediction in advice.predictions) == len(advice.ranked)
    assert 4 <= len(advice.ranked) < len(advice.predictions)
    assert advice.ranked[0].fits
    assert "would not fit" in advice.conclusion
    advice = advise([*VIT, "batch_size=4096"], None, Machine(replace(card, memory=GiB / 10), 2, 1, 50e9))
    assert advice.ranked == []
    assert advice.conclusion.startswith("Nothing fits: ")
    assert "does not fit" in table(advice, everything=False)


@pytest.mark.slow
def test_several_machines_have_their_launch_line():
    advice = advised(*VIT, gpus="2xH100", nodes=2)
    ddp = next(prediction for prediction in advice.predictions if prediction.name == "ddp")
    assert ddp.launch.startswith("torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 --nproc_per_node=2 -m")
    assert {"dp", "split"}.isdisjoint(names(advice)), "one process cannot use the GPUs of two machines"


@pytest.mark.parametrize("strategy", ["dp", "split"])
def test_one_process_is_predicted_with_the_gpus_of_one_machine(strategy):
    two, one = (
        next(each for each in advised(f"strategy={strategy}", gpus="2xH100", nodes=nodes).listed if each.name == strategy)
        for nodes in (2, 1)
    )
    assert two.devices == 2
    assert (two.time, two.memory, two.images_per_second) == (one.time, one.memory, one.images_per_second)


def test_table_names_each_part_of_the_memory_of_what_is_recommended_and_of_the_users_own():
    advice = advised(*VIT, "optimizer=adamw", "strategy=ddp", gpus="2xH100")
    short, long = table(advice, everything=False), table(advice, everything=True)
    for shown, listed in ((short, [advice.listed[0], advice.ranked[0]]), (long, advice.listed)):
        lines = shown[shown.index("\nGiB of the peak") :].split("\n\n")[0].splitlines()[1:]
        names = lines[0].removeprefix("GiB of the peak").replace("host memory", "host").lower().split()
        assert {"parameters", "gradients", "optimizer", "activations", "buckets", "nccl", "context"} <= set(names)
        for line, each in zip(lines[1:], dict.fromkeys(each.name for each in listed), strict=True):
            sizes = vars(next(prediction for prediction in listed if prediction.name == each).memory)
            assert line.startswith(f"{each} ")
            for name, cell in zip(names, line.removeprefix(each).split(), strict=True):
                if name != "host" and cell != "<0.0001":
                    assert float(cell) == pytest.approx(sizes[name] / GiB, abs=0.00501 if sizes[name] >= 0.005 * GiB else 5e-5)


def test_offload_is_predicted_with_what_each_host_must_hold():
    for nodes in (1, 2):
        advice = advised(*VIT, "optimizer=adamw", gpus="2xH100", nodes=nodes)
        found = {each.name: each for each in advice.predictions}
        offloaded = found["fsdp offload=true checkpoint_activations=block"]
        assert offloaded.host == 2 * (offloaded.held.parameters + offloaded.held.gradients + offloaded.held.optimizer)
        parameters = next(each for each in advice.predictions if each.name == "single").held.parameters
        assert offloaded.host == pytest.approx(4 * parameters / nodes, rel=0.05), "AdamW: four times the weights"
        assert all(each.host == 0 for each in advice.predictions if each is not offloaded)
        row, parts = (line for line in table(advice, everything=True).splitlines() if line.startswith(f"{offloaded.name}  "))
        assert row.endswith(f"+ {offloaded.host / GiB:.4f} in host memory")
        assert parts.endswith(f" {offloaded.host / GiB:.4f}")
    only = replace(advice, predictions=[offloaded])
    assert f"it keeps {offloaded.host / 2**20:,.2f} MiB in the host memory of each machine" in only.conclusion


def own_model(name: str) -> list[str]:
    return ["model=own", f"model._target_=own_models.{name}", "data=digits", "batch_size=256"]


def test_models_that_read_values_are_predicted_without_a_capture():
    plain, waiting = (
        advised(*own_model(name), *more, gpus="2xH100") for name, more in {"Plain": ["cuda_graph=false"], "Waiting": []}.items()
    )
    assert names(plain) == names(waiting)
    assert "fsdp offload=true" in names(plain)
    for one, other in zip(plain.predictions, waiting.predictions, strict=True):
        assert other.held == one.held
        assert "cuda_graph" not in other.chosen
        assert other.memory.activations > one.memory.activations
        assert other.memory.total == pytest.approx(one.memory.total, rel=0.01)


def test_chains_that_read_values_are_predicted_under_pipelines():
    assert {"single", "split", "pipeline", "mesh pp=2"} <= set(names(advised(*own_model("waiting_blocks"), gpus="2xH100")))


def test_frozen_parameters_have_no_gradients_under_any_strategy():
    for precision in ("float32", "bf16"):
        advice = advised(*own_model("Frozen"), "accumulate=2", "speed=off", f"precision={precision}", gpus="2xH100")
        found = {each.name: each for each in advice.predictions}
        head = 4 * 10 * (1024 + 1)
        assert found["ddp"].memory.gradients == found["fsdp"].memory.gradients == head, precision
        assert found["fsdp"].held.gradients == head / 2


def test_frozen_blocks_are_gathered_and_their_gradients_are_not_summed():
    advisor = Advisor(own_model("frozen_blocks"), None, find_machine("2xH100", 1, None), ASSUMED)
    job = advisor.job(Candidate("fsdp", {}, 2))
    job.partition()
    _, first, frozen, _ = (4 * sum(each.numel() for each in block.parameters()) for block in advisor.model.children())
    gathered = buckets_of(job.strategy, job.strategy.share(advisor.model, 0), advisor.model, bf16=False).gathered
    assert list(gathered.values())[1] == first
    assert list(gathered.values())[2] == first + frozen + 4 * 10 * (1024 + 1)


@pytest.mark.parametrize("compiled", ["false", "true"])
def test_chains_that_change_their_inputs_in_place_are_predicted(compiled):
    advice = advised(*own_model("in_place"), f"compile={compiled}", "strategy=pipeline", gpus="2xH100")
    assert {"single", "split", "ddp", "fsdp", "tp tp=2"} <= set(names(advice))
    assert advice.own_refusal is not None
    assert advice.own_refusal.reason.startswith(
        "stage 2 of the pipeline, which begins with block 2, changes its input in place;"
    )
    cut = advised(*own_model("in_place"), f"compile={compiled}", "strategy=pipeline", "strategy.cut=['3']", gpus="2xH100")
    assert cut.listed[0].name == "pipeline cut=['3']"


def test_compiled_models_that_are_predicted_as_in_eager_mode_are_named_with_the_reason():
    advice = advised(*own_model("Recurrent"), "compile=true", gpus="1xH100")
    line = "compiled, but predicted as in eager mode: Recurrent (KeyError: unbind)"
    assert f"\n{line}\n" in table(advice, everything=False)
    assert as_json(advice)["notes"] == [line]
    for other in (advised(*own_model("Recurrent"), gpus="1xH100"), advised(*own_model("Plain"), "compile=true", gpus="1xH100")):
        assert as_json(other)["notes"] == []


def test_batches_larger_than_the_dataset_are_predicted_with_a_note():
    line = "batches of 1,438 are predicted, but the dataset has 1,437 samples: real steps are smaller and faster"
    for overrides in (["batch_size=1438"], ["batch_size=719", "scaling=weak"]):
        advice = advised("data=digits", *overrides, gpus="2xH100")
        assert f"\n{line}\n" in table(advice, everything=False)
    assert advised("data=digits", "batch_size=1437", gpus="1xH100").notes == []


def test_batches_that_the_model_cannot_compute_are_refused_with_the_reason():
    advice = advised(*own_model("Normalizing"), "batch_size=2", gpus="2xH100")
    assert names(advice)[0] == "single"
    (reason,) = {each.reason for each in advice.refused if each.name == "ddp"}
    assert reason == (
        "the model failed with 1 samples at a time: ValueError: Expected more than 1 value per channel when training, got "
        "input size torch.Size([1, 16]) (own_models.py, line 29). Correct the model, or change batch_size"
    )
    with pytest.raises(ConfigError, match=r"^no strategy can be predicted on these GPUs. single is refused: the model failed"):
        advised(*own_model("Normalizing"), "batch_size=1", gpus="1xH100")


def test_stock_attention_is_predicted_under_tp_and_blocks_that_need_complete_layers_are_refused_with_the_reason(capfd):
    assert "tp tp=2" in names(advised(*own_model("attention"), gpus="2xH100"))
    advice = advised(*own_model("adding_blocks"), gpus="2xH100")
    (reason,) = (each.reason for each in advice.refused if each.name == "tp tp=2")
    assert reason.startswith("strategy=tp: cannot predict 2 with layers divided over 2 ranks, in contrast to complete ones: ")
    assert "(own_models.py, line " in reason
    assert reason.endswith(". Replicate it: ++strategy.plan.2=replicate")
    advice = advised(*own_model("adding_blocks"), "strategy=tp", "++strategy.plan.2=replicate", gpus="2xH100")
    assert names(advice)[0] == "tp plan.2=replicate"
    assert capfd.readouterr() == ("", "")


def test_models_that_fail_in_bf16_are_refused_where_inputs_are_cast():
    advice = advised(*own_model("Converting"), "precision=bf16", gpus="2xH100")
    assert {"single", "ddp"} <= set(names(advice))
    (reason,) = {each.reason for each in advice.refused if each.name == "fsdp"}
    assert reason.startswith("the model failed with samples of torch.bfloat16: TypeError: Got unsupported ScalarType BFloat16")
    assert "own_models.py, line" in reason


def test_models_that_fail_are_refused_with_the_message_of_train():
    code, text = run_world(1, refusal_in_world, " ".join([*own_model("Broken"), "device=cpu"]))[0]
    assert code == 2
    assert re.search(r"own_models\.Broken: failed for .* 1x28x28 .*: RuntimeError: .+ \(own_models\.py, line \d+\)\. Use", text)
    with pytest.raises(ConfigError) as error:
        advise(own_model("Broken"), None, find_machine("2xH100", 1, None))
    assert text.strip() == f"error: {error.value}"


def test_runs_that_mix_samples_are_predicted():
    mixed, plain = (advised(*VIT, *more, gpus="1xH100").predictions[0] for more in (["mixup=0.2", "cutmix=1"], []))
    assert mixed.memory == plain.memory


def test_tables_show_the_best_and_all_on_request():
    advice = advised(*VIT)
    short, long = table(advice, everything=False), table(advice, everything=True)
    assert len(best_of(advice)) < len(advice.predictions)
    assert f"and {len(advice.predictions) - len(best_of(advice))} more, which --all shows" in short
    assert all(f"\n{prediction.name} " in long for prediction in advice.predictions)
    assert "\nrefused: tp tp=4: the 10 units" in long
    assert "\n1 is refused, which --all lists; tp tp=4: the 10 units of head.linear are not divisible by 4\n" in short
    assert json.loads(json.dumps(as_json(advice)))["recommended"] == advice.ranked[0].overrides
    assert memory_plot(best_of(advice), advice.memory).title.startswith("Predicted")


def test_most_frequent_reason_of_refusals_is_given_without_all():
    advice = advised(*SYNTHETIC, "batch_size=64", gpus="3xH100")
    (line,) = (line for line in table(advice, everything=False).splitlines() if "refused" in line)
    number = len(advice.refused)
    same = sum("batch_size=64" in each.reason for each in advice.refused)
    assert line == (
        f"{number} are refused, which --all lists; dp, scratch, ddp and {same - 3} more: batch_size=64: is the global batch "
        "and must be divisible by the 3 replicas that share it; use 63 or 66, or scaling=weak to give every replica 64"
    )


def test_each_reason_of_refusals_is_given_once():
    advice = advised(*own_model("Plain"), gpus="2xH100")
    lines = [line for line in table(advice, everything=True).splitlines() if "refused" in line]
    assert lines[0].startswith("refused: split, pipeline, tp tp=2, mesh pp=2, ")
    assert ": needs a model made of blocks, but model._target_=own_models.Plain is a Plain. Use" in lines[0]
    assert sum("made of blocks" in line for line in lines) == 1


def test_launch_line_has_the_directory_of_own_configs(tmp_path):
    folder = tmp_path / "my configs"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "mine.yaml").write_text("_target_: own_models.Plain\nhidden: 24\n")
    advice = advise(["model=mine", "data=digits"], str(folder), find_machine("1xH100", 1, None))
    assert advice.predictions[0].launch == f"python -m ddp_lab --config-dir '{folder}' model=mine data=digits strategy=single"


CARD = "must be here, or a number and a card such as 2xH100."
REFUSED = {
    "--gpus 2xH900": f"--gpus 2xH900: {CARD} Did you mean 2xH200 or 2xH100? Cards: B200, H200",
    "--gpus 0xH100": "--gpus 0xH100: must be here, or a number and a card",
    "--gpus H100": "--gpus H100: must be here, or a number and a card",
    "--gpus 100000xH100": "--gpus 100000xH100: at most 9,999 GPUs of one machine are supported; see --nodes",
    "--gpus 2xA100": f"--gpus 2xA100: {CARD} Did you mean 2xA100-80 or 2xA100-40? Cards:",
    "--gpus 2xh100-80": f"--gpus 2xh100-80: {CARD} Did you mean 2xH100? Cards: B200, H200",
    "--gpus 2xRTX4080": f"--gpus 2xRTX4080: {CARD} Did you mean 2xRTX4090 or 2xRTX3090? Cards",
    "--gpus 2xH100 --nodes 0": "--nodes 0: must be an integer of at least 1",
    "--gpus 2xH100 --link -1": "--link -1: must be a number above 0, in GB/s",
    "--gpus 2xH100 --link inf": "--link inf: must be a number above 0, in GB/s",
    "--gpus 2xH100 --link nan": "--link nan: must be a number above 0, in GB/s",
    "--gpus 2xH100 --picture a.xyz": "--picture a.xyz: must be the name of a .png file",
    "--gpus 2xH100 device=cpu": "device=cpu: predictions are made for GPUs, and for all that --gpus names; leave it out",
    "--gpus 2xH100 device=cuda:0": "device=cuda:0: predictions are made for GPUs, and for all that --gpus names; leave it out",
    "--gpus 2xH100 strategy=dp strategy.devices=[cuda:0]": "strategy.devices=[cuda:0]: predictions are made for all GPUs that",
    "--gpus 2xH100 model.weights=/nope/x.pt": "model.weights=/nope/x.pt: cannot be read on ",
    "--gpus 2xH100 --config-dir /nope": "--config-dir /nope: there is no such directory. Use the directory of your own yaml",
    "--gpus 2xH100 strategy=ddp,fsdp": "strategy=ddp,fsdp: has several values. Use one of them, key=[value1,value2] for",
    "--gpus 2xH100 --json /no/such/file.json": "--json /no/such/file.json: cannot be written: /no/such does not exist",
    "--gpus 2xH100 --picture /no/such/file.png": "--picture /no/such/file.png: cannot be written",
    "--gpus 2xH100 epochs=0": "epochs=0: must be an integer of at least 1",
    "--gpus 2xH100 strategy=fsdp strategy.reshard_after_forward=3": "strategy.reshard_after_forward=3: must be",
}


@pytest.mark.parametrize("line", REFUSED)
def test_mistakes_on_the_command_line_are_refused(line, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["ddp-lab advise", *line.split()])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 2
    assert f"error: {REFUSED[line]}" in capfd.readouterr().err


def test_ranks_of_torchrun_are_refused(monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["ddp-lab advise"])
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        command.main()
    assert "ddp-lab advise: runs in one process; start it without torchrun" in capfd.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_gpus_here_without_a_gpu_are_refused():
    with pytest.raises(ConfigError, match="--gpus here: there is no GPU here"):
        find_machine("here", 1, None)


def test_own_candidate_comes_after_simpler_ones_of_its_strategy():
    found = [Candidate("single", {}, 1), Candidate("fsdp", {}, 2), Candidate("fsdp", {"a": 1, "b": 2}, 2)]
    for own, place in (("fsdp", 1), ("tp", 3)):
        assert with_own(found, Candidate(own, {}, 2)).index(Candidate(own, {}, 2)) == place
    assert with_own(found, Candidate("fsdp", {"c": 1}, 2)).index(Candidate("fsdp", {"c": 1}, 2)) == 2


def test_candidates_use_all_gpus_and_differ():
    for gpus, per_node in ((1, 1), (2, 2), (6, 6), (8, 4)):
        found = list(candidates(gpus, per_node, checkpointing=True))
        lines = [" ".join(candidate.overrides) for candidate in found]
        assert len(set(lines)) == len(lines)
        for candidate in found:
            options = candidate.options
            assert gpus % (options.get("pp", 1) * options.get("tp", 1) * options.get("shard", 1)) == 0


def test_choices_of_speed_auto_are_predicted_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", None)
    run = ["model=lenet", "data=fashion_mnist", "batch_size=256", "epochs=1"]
    plain, automatic = (advised(*run, f"speed={speed}", gpus="2xH200") for speed in ("off", "auto"))
    found = {each.name: each for each in automatic.predictions}
    assert found["ddp"].chosen == ("cuda_graph", "channels_last", "optimizer.fused")
    for each, strategy in {"fsdp": FSDP, "tp tp=2": TP, "pipeline": Pipeline}.items():  # the strategy says what it supports
        assert {key.removeprefix("optimizer.") for key in found[each].chosen} <= strategy.performance_options
        assert ("cuda_graph" in found[each].chosen) == ("cuda_graph" in strategy.performance_options)
    for before, after in zip(plain.predictions, automatic.predictions, strict=True):
        assert before.chosen == ()
        captured = "cuda_graph" in after.chosen
        assert after.time.total < before.time.total if captured else after.time.total <= before.time.total, after.name
    assert "speed=auto is predicted to switch on cuda_graph, channels_last" in automatic.conclusion
    assert "speed=auto" not in plain.conclusion.replace("speed=auto strategy", "")


def test_long_runs_are_predicted_as_compiled(monkeypatch):
    run = ["model=vit", "data=fashion_mnist", "batch_size=256", "precision=bf16"]
    short, long = (advised(*run, f"epochs={epochs}", gpus="1xH200").predictions[0] for epochs in (1, 10000))
    assert "compile" not in short.chosen
    assert "compile" in long.chosen
    assert long.memory.activations < short.memory.activations
    never = advised(*run, "epochs=10000", "compile=false", gpus="1xH200").predictions[0]
    assert "compile" not in never.chosen
    assert never.memory == short.memory


def test_dataset_too_large_for_the_gpu_stays_on_the_host():
    here, there = (advised("data=fashion_mnist", f"data.loader={loader}", gpus="1xH100") for loader in ("auto", "workers"))
    assert here.predictions[0].memory.data > there.predictions[0].memory.data
    large = advised("data=synthetic", "data.dataset.train_size=300000000", gpus="1xH100").predictions[0]
    assert large.memory.data < 2**30
    assert "cuda_graph" not in large.chosen, "it needs data.loader=device"
