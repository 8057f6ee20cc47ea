"""The constants of a card: measured, written to its file, and read again."""

import json
import math
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from launches import launch
from worlds import run_world

from ddp_lab.config.errors import ConfigError
from ddp_lab.estimate.calibrate import CPU
from ddp_lab.estimate.cards import CARDS, card_called, parse_gpus
from ddp_lab.estimate.constants import ASSUMED, Constants
from ddp_lab.estimate.constants_file import load, path_of, save
from ddp_lab.estimate.rates import Convolutions
from ddp_lab.run.advise import advise
from ddp_lab.run.calibrate import calibrate, card_of, describe
from ddp_lab.run.launching import LEAST, fit, launches
from ddp_lab.run.machine import find_machine
from ddp_lab.world.runtime import Runtime

H100 = CARDS["H100"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def calibrate_here(cache: str) -> tuple[Constants, str]:
    import os

    os.environ["XDG_CACHE_HOME"] = cache
    with Runtime("cpu", timeout=30) as runtime:
        constants, path = calibrate(runtime, CPU)
    if runtime.rank == 0:
        assert json.loads(describe(constants, path).removeprefix(f"{path}: ")) == json.loads(path.read_text())
    return constants, str(path)


def test_ranks_measure_card_and_link_and_one_writes_the_file(tmp_path):
    (first, path), (_, other) = run_world(2, calibrate_here, str(tmp_path))
    assert path == other == str(tmp_path / "ddp_lab" / "constants-cpu.json")
    assert load(CPU) == first
    assert first.source.startswith("measured on a CPU")
    values = asdict(first)
    assert all(math.isfinite(value) and value > 0 for key, value in values.items() if key != "source")
    changed = {key for key, value in values.items() if value != getattr(ASSUMED, key)}
    assert {"launch", "step", "float32", "tf32", "bf16", "bandwidth", "link", "latency"} <= changed
    assert {
        "tf32_last",
        "convolution",
        "convolution_last",
        "attention",
        "reduction",
        "strided",
        "batch_norm",
        "start",
    } <= changed


def test_predictions_use_the_measured_constants_of_their_card():
    machine, run = find_machine("1xH100", 1, None), ["model=lenet", "batch_size=256", "speed=off"]
    before = advise(run, None, machine)
    save(replace(ASSUMED, source="measured there", launch=1e-3, context=2**30), H100)
    after = advise(run, None, machine)
    assert "measured there" in after.head[1]
    assert "assumed" in before.head[1]
    assert after.predictions[0].time.total > 5 * before.predictions[0].time.total
    assert after.predictions[0].memory.context == 2**30
    assert "assumed" in advise(run, None, find_machine("1xL4", 1, None)).head[1], "these are the constants of another card"


def test_launches_that_are_counted_predict_the_times_they_were_fitted_to():
    """Steps of small batches, which no kernel makes longer."""
    runs = [[f"model={model}", "batch_size=8", "strategy=single", "speed=off"] for model in ("lenet", "resnet18", "vit")]
    counts = [launches(run, H100) for run in runs]
    assert counts[0] < 40 < 100 < min(counts[1:])
    launch, step = fit(counts, [30e-6 * count + 1e-3 for count in counts])
    assert (launch, step) == pytest.approx((30e-6, 1e-3))
    save(replace(ASSUMED, launch=launch, step=step), H100)
    for run, count in zip(runs, counts, strict=True):
        assert advise(run, None, find_machine("1xH100", 1, None)).predictions[0].time.total == pytest.approx(
            30e-6 * count + 1e-3
        )


@pytest.mark.parametrize("times", [[1e-4, 1e-3, 8e-3], [4e-3, 3e-3, 2e-3]], ids=["no rest", "shorter with more launches"])
def test_times_without_two_parts_are_all_launches(times):
    launch, step = fit([10, 40, 80], times)
    assert launch > 0
    assert step == LEAST


@pytest.mark.parametrize(("each", "fixed"), [(2e-6, 1e-3), (2e-6, 0), (2e-6, -1e-4)], ids=["both", "no start", "cached"])
def test_convolutions_have_a_rate_and_a_start(monkeypatch, each, fixed):
    """With a time that is linear in the number of samples, both are found; the rate explains all where nothing is left."""
    monkeypatch.setattr(Convolutions, "_seconds", lambda self, dtype, last, device, samples: fixed + each * samples)
    found = Convolutions(torch.float32, False, torch.device("cpu"), 256)
    flops = 3 * 2 * 9 * 8 * 8 * 8 * 8  # of a sample of the one small convolution
    assert found.start == pytest.approx(max(fixed, 1e-9) / 3)
    assert flops * 1024 / found.rate + 3 * found.start == pytest.approx(fixed + 1024 * each)


def test_cpu_is_not_calibrated(tmp_path):
    code, output = launch("torchrun --standalone --nproc_per_node=2 -m ddp_lab advise --calibrate device=cpu")
    assert code != 0
    assert output.count("error: --calibrate: no GPU is available, and only GPUs are measured") == 1, output
    assert not list(tmp_path.iterdir())


def test_unknown_card_cannot_be_calibrated(monkeypatch):
    runtime = SimpleNamespace(device=torch.device("cuda"), world_size=1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(ConfigError, match=r"--calibrate: Tesla T4 is unknown; the cards are B200, H200"):
        card_of(cast(Runtime, runtime))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "must have the keys source, attention, bandwidth"),
        (json.dumps({"source": "x"}), "must have the keys source, attention, bandwidth"),
        (json.dumps(asdict(ASSUMED) | {"launch": -1}), "launch must be a number of at least 0"),
        (json.dumps(asdict(ASSUMED) | {"launch": "1"}), "launch must be a number of at least 0"),
    ],
)
def test_damaged_files_are_refused(text, message):
    save(ASSUMED, H100)
    assert load(H100) == ASSUMED
    path_of(H100).write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(H100)


def test_file_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "ddp_lab").write_text("a file")
    with pytest.raises(ConfigError, match="set XDG_CACHE_HOME to another directory"):
        save(ASSUMED, H100)


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA A10", "A10"),
        ("Tesla T4", None),
    ],
)
def test_card_is_found_by_the_name_that_torch_reports(name, card):
    found = card_called(name)
    assert (found.name if found else None) == card


def test_gpus_are_parsed_whatever_their_case():
    assert parse_gpus("8xa100-40") == (8, CARDS["A100-40"])
