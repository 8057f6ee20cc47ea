"""`ddp-lab verify` and `Lab.verify`: exit codes, messages, the JSON file, a script."""

import json
import subprocess
from functools import partial

import pytest
import torch
from launches import OWN, ROOT, call_in_process, finish, launch, start
from torch import nn
from torch.utils.data import TensorDataset

from ddp_lab import Lab
from ddp_lab.config.errors import ConfigError
from ddp_lab.proof import verify_lab as verify_lab_module

SMALL = ("--nproc", "2", "--only", "ddp", *OWN)
TINY = (*SMALL, "data.dataset.image_size=8")
NETWORK = "model._target_=proof_models.Images"


@pytest.mark.covers("verify --json")
def test_equal_run_exits_with_0_and_writes_json(tmp_path):
    file = tmp_path / "verify.json"
    code, output = launch("ddp-lab verify", *TINY, NETWORK, "accumulate=2", "--json", str(file))
    assert code == 0, output
    report = json.loads(file.read_text())
    assert report["ok"] is True
    assert [(row["name"], row["outcome"]) for row in report["rows"]] == [
        ("single without accumulation", "equal"),
        ("ddp on 2", "equal"),
    ]
    assert report["notes"][0].startswith("3 steps of 16, 16, 5 samples in float64 on the CPU")
    for line in (*report["notes"], "single without accumulation  equal\nddp on 2"):
        assert line in output
    assert [*tmp_path.iterdir()] == [file], "no run directory"


def test_first_samples_of_a_stream_are_compared(tmp_path):
    line = "data=own data.dataset._target_=own_streams.ending data.num_classes=10 max_steps=3"
    line += " data.mean=[0.5] data.std=[0.2] model=simple_cnn --nproc 2 --only ddp"
    code, output = launch("ddp-lab verify", *line.split())
    assert code == 0, output
    assert "ddp on 2  equal" in output


def test_wrong_strategy_of_the_run_exits_with_1(tmp_path):
    file = tmp_path / "verify.json"
    strategy = (
        "strategy=single",
        "strategy._target_=wrong_strategies.SumForMean",
    )
    code, output = launch("ddp-lab verify", *TINY, NETWORK, *strategy, "--json", str(file))
    assert code == 1, output
    assert "first.weight is x2 the expected tensor" in output
    own_row, ddp = json.loads(file.read_text())["rows"]
    assert own_row["name"] == "single _target_=wrong_strategies.SumForMean on 2"
    assert own_row["difference"]["factor"] == pytest.approx(2)
    assert ddp["outcome"] == "equal"


@pytest.mark.covers("verify --config-dir", "verify --nproc", "verify --only")
def test_options_choose_the_config_the_ranks_and_the_strategies(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("_target_: proof_models.Images")
    data = [override for override in TINY[4:] if not override.startswith("model=")]
    options = ["--config-dir", str(tmp_path), "--nproc", "2", "--only", "scratch,dp"]
    code, output = launch("ddp-lab verify", *options, *data, "model=mine")
    assert code == 0, output
    table = [line.split("  ")[0] for line in output.splitlines()[1:]]
    assert table == ["scratch on 2", "dp"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model=nope"], "model=nope: there is no such option; allowed: "),
        (["strategy.nope=1"], "strategy.nope"),
        (["--nproc", "9"], "--nproc 9: must be 2 or 4"),
        (["--only", "dpp"], "--only dpp: there is no such strategy to compare; allowed: ddp, "),
        (["--json", "/nowhere/x.json"], "--json /nowhere/x.json: cannot be written"),
        (
            ["data=synthetic", "data.dataset.train_size=20"],
            "data: the training set has 20 samples, but three steps with a partial last batch "
            "need 37",
        ),
        (["data=folder", "data.root=/nowhere"], "data.root=/nowhere: "),
        (["model=own", "model._target_=nope.Net"], "model._target_=nope.Net: "),
    ],
)
def test_wrong_overrides_are_one_message_with_exit_code_2(arguments, message):
    process = start("ddp-lab verify", *arguments, stderr=subprocess.STDOUT)
    code, output = finish(process)
    assert code == 2, output
    assert output.startswith("error: ")
    assert message in output
    assert len(output.splitlines()) == 1


def test_verify_is_refused_under_torchrun(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, output = launch("ddp-lab verify")
    assert code == 2
    assert "start it without torchrun" in output


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 3))


def data(samples: int = 60) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(samples, 8, generator=generator),
        torch.randint(3, (samples,), generator=generator),
    )


def stacked(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return a batch whose inputs are the arguments of `network`, by another name than theirs."""
    return {
        "input": torch.stack([sample["inputs"] for sample in samples]),
        "label": torch.stack([sample["label"] for sample in samples]),
    }


def verify_in_lab() -> None:
    """Print the reports of a right and a wrong script."""
    from wrong_strategies import MeanTwice

    with Lab() as lab:
        model = network()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        report = lab.verify(
            model, loss, data(), accumulate=2, max_grad_norm=0.1, nproc=2, only=["fsdp", "dp"]
        )
        changed = [
            name for name, tensor in model.state_dict().items() if not tensor.equal(before[name])
        ]
        assert not changed
    samples = [{"inputs": inputs, "label": target} for inputs, target in data()]
    wrong = Lab(MeanTwice).verify(
        network(),
        loss,
        samples,
        partial(torch.optim.SGD, lr=0.5),
        targets="label",
        collate_fn=stacked,
        nproc=2,
        only=["dp"],
    )
    print(json.dumps([report.as_json(), wrong.as_json()]))


def test_lab_verifies_the_training_that_its_arguments_describe(monkeypatch):
    """With the batches and the optimizer of the arguments, and the seed of the Lab."""
    verified: list[tuple[verify_lab_module.LabRun, tuple[object, ...]]] = []
    monkeypatch.setattr(
        verify_lab_module,
        "verify_lab",
        lambda lab, run, *more: verified.append((run, more)),
    )
    model = network()
    adam = partial(torch.optim.AdamW, lr=0.5)
    for arguments in (
        {},
        {
            "optimizer": adam,
            "accumulate": 2,
            "max_grad_norm": 0.25,
            "targets": 0,
            "collate_fn": tuple,
            "nproc": 2,
            "only": ["ddp"],
        },
    ):
        Lab(seed=7).verify(model, loss, data(), **arguments)
    (first, by_default), (second, further) = verified
    assert (by_default, further) == ((None, 4, ()), (0.25, 2, ("ddp",)))
    assert (first.accumulate, first.targets, first.collate_fn, first.seed) == (1, 1, None, 7)
    assert isinstance(first.optimizer(model.parameters()), torch.optim.SGD)
    assert (second.accumulate, second.targets, second.collate_fn) == (2, 0, tuple)
    assert second.optimizer is adam
    assert (first.model, first.loss) == (second.model, second.loss) == (model, loss)


def test_lab_verifies_a_model_a_loss_and_a_dataset():
    process = call_in_process(verify_in_lab)
    assert not process.returncode, process.stderr
    right, wrong = json.loads(process.stdout)
    assert [row["outcome"] for row in right["rows"]] == ["equal", "equal", "equal"]
    assert [row["name"] for row in right["rows"]][1:] == ["fsdp on 2", "dp"]
    assert right["ok"]
    assert any("without dropout" in note for note in right["notes"])
    row = wrong["rows"][0]
    assert row["name"] == "MeanTwice of the Lab on 2"
    assert row["difference"]["factor"] == pytest.approx(1 / 2)
    assert not wrong["ok"]


def test_lab_refuses_to_verify_with_too_few_samples():
    with pytest.raises(ConfigError, match="dataset: has 20 samples, but three steps"):
        Lab().verify(network(), loss, data(20))


def test_lab_refuses_to_verify_with_wrong_arguments():
    for arguments, message in (
        ({"nproc": 8}, "nproc=8: must be 2 or 4"),
        ({"only": ["nope"]}, "only=nope: there is no such strategy"),
    ):
        with pytest.raises(ConfigError, match=message):
            Lab().verify(network(), loss, data(), **arguments)


def test_lab_refuses_to_verify_in_a_rank(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="this process is a rank already"):
        Lab().verify(network(), loss, data())


VIT = ("model=vit",)
LLAMA = (
    "model=transformers",
    "model.name=LlamaConfig",
    "+model.hidden_size=32",
    "+model.intermediate_size=64",
    "+model.num_hidden_layers=2",
    "+model.num_attention_heads=4",
    "+model.num_key_value_heads=2",
    "task=tokens",
    "loss=default",
    "data=text",
    f"data.root={ROOT / 'README.md'}",
    "data.context=16",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param((), id="lenet"),
        pytest.param(VIT, id="vit", marks=pytest.mark.extra),
        pytest.param(LLAMA, id="llama", marks=pytest.mark.extra),
    ],
)
def test_all_strategies_of_a_model_are_equal_or_refused(overrides, tmp_path):
    file = tmp_path / "verify.json"
    options = ("accumulate=2", "max_grad_norm=1", "--json", str(file))
    code, output = launch("ddp-lab verify", *overrides, *options)
    assert code == 0, output
    rows = json.loads(file.read_text())["rows"]
    equal = {row["name"].split()[0] for row in rows if row["outcome"] == "equal"}
    assert equal >= {"scratch", "ddp", "fsdp", "pipeline", "ddp_pipeline", "tp", "split", "dp"}
    assert all(row["reason"] for row in rows if row["outcome"] == "refused")
