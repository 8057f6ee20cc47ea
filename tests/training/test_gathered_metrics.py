"""Metrics of torchmetrics: over the complete set, the same for any strategy and number of ranks."""

import importlib
import json
import re
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from case import config_of, reference_of
from checkpoints import start
from configs import config
from launches import ROOT, SMALL, launch, only_run, read_metrics, refusal_in_world
from omegaconf import OmegaConf
from sklearn.metrics import roc_auc_score
from slow_rows import slow_but
from training import ONE_PROCESS, Recorder
from worlds import once, run_world

from ddp_lab.commands import evaluate as evaluate_command
from ddp_lab.config.errors import ConfigError, TrainingError
from ddp_lab.config.types import Every
from ddp_lab.data.batch import Batch
from ddp_lab.launchers.sweep import lower_is_better
from ddp_lab.run.build import build
from ddp_lab.strategies.gathering import gather_on_rank0
from ddp_lab.strategies.single import Single
from ddp_lab.tasks import Classification, MultiLabel, Segmentation, Task
from ddp_lab.training.gathered_metrics import GatheredMetrics, make_metrics
from ddp_lab.training.hooks import Run
from ddp_lab.training.loop import fit
from ddp_lab.training.metrics import evaluate
from ddp_lab.training.metrics_trial import MetricsTrial
from ddp_lab.training.progress import Progress
from ddp_lab.training.sync import Sync
from ddp_lab.world.runtime import Runtime


def torchmetrics() -> ModuleType:
    """Return the package, whose import takes seconds in each process of pytest."""
    return importlib.import_module("torchmetrics")


AUROC = {"_target_": "torchmetrics.AUROC", "task": "multiclass", "num_classes": 10}
METRICS = [AUROC, "own_metrics.Ordered", "own_metrics.Seen"]
METRICS.append({**AUROC, "name": "weighted", "average": "weighted"})
# The test set has 31 samples in batches of 24 and 7; the validation set of "almost-empty" has 12.
LINES = {
    1: [
        "single",
        "split",
        "dp",
        "single accumulate=3 clipped",
        "single max_grad_norm=0.1",
        "single almost-empty",
    ],
    2: ["ddp accumulate=3 clipped", "fsdp almost-empty", "pipeline"],
    3: ["scratch almost-empty"],
}
FURTHER = {  # slow
    2: ["ddp", "fsdp", "tp tp=2", "mesh shard=null tp=2 short"],
    3: ["ddp", "fsdp", "pipeline"],
    4: ["ddp_pipeline", "mesh shard=2 tp=2 short"],
}
CASES = [(line, ranks) for ranks, lines in LINES.items() for line in lines]
SLOW = [(line, ranks) for ranks, lines in FURTHER.items() for line in lines]


def train(line: str, metrics: list[Any], runtime: Runtime) -> dict[str, Any]:
    """Train a case with metrics.

    Return the evaluations after each epoch, the losses, and on one device what metrics of the
    complete test set in one call return after the last epoch.
    """
    cfg = config_of(line)
    OmegaConf.update(cfg, "metrics", metrics)
    job = build(cfg, runtime)
    trainer = job.trainer()
    recorder = Recorder([], [])
    hooks = [recorder] if job.metrics is None else [recorder, MetricsTrial(job.metrics)]
    step = trainer.eager_step
    sync = Sync(job.strategy, step.running_sums, Every())
    run = Run(
        step,
        step,
        job.loaders,
        job.fit_settings,
        recorder,
        hooks,
        sync,
        Progress(),
        metrics=job.metrics,
    )
    fit(run)
    whole = {}
    if line.split()[0] in ONE_PROCESS:
        with trainer.ema.in_use() if trainer.ema else nullcontext():
            whole = metrics_of_whole_set(job)
    return {"evaluations": recorder.evaluations, "sums": recorder.sums, "whole": whole}


def metrics_of_whole_set(job) -> dict[str, float]:
    """Return metrics that get the outputs of the complete test set, in one call."""
    job.strategy.train(False)
    samples = [job.dataset.test.sample(0, index) for index in range(31)]
    batch = job.loaders["test"].first(31)
    assert len(batch.inputs) == len(samples) == 31
    logits = job.strategy.predict(batch.inputs)
    auroc = torchmetrics().AUROC(task="multiclass", num_classes=10)
    classes = sorted(set(batch.targets.tolist()))
    assert len(classes) > 5
    per_class = [
        roc_auc_score(batch.targets == each, logits.softmax(1)[:, each]) for each in classes
    ]
    return {
        "auroc": float(auroc(logits, batch.targets)),
        "by_sklearn": sum(per_class) / len(classes),
        "classes": len(classes),
    }


def train_all(lines: list[str], metrics: list[Any]) -> dict[str, dict[str, Any]]:
    with Runtime("cpu") as runtime:
        return {line: train(line, metrics, runtime) for line in lines}


@once
def world(ranks: int, are_further: bool = False) -> list[dict[str, dict[str, Any]]]:
    lines = (FURTHER if are_further else LINES)[ranks]
    return run_world(ranks, train_all, lines, METRICS, timeout=400)


@once
def references(are_further: bool) -> dict[str, dict[str, Any]]:
    lines = dict.fromkeys(reference_of(line) for line, _ in (SLOW if are_further else CASES))
    return run_world(1, train_all, list(lines), METRICS, timeout=400)[0]


@pytest.mark.parametrize(("line", "ranks"), slow_but(CASES, [*CASES, *SLOW]), ids=str)
def test_metrics_equal_those_of_one_device(line, ranks):
    are_further = (line, ranks) in SLOW
    expected = references(are_further)[reference_of(line)]["evaluations"]
    for rank in world(ranks, are_further):
        trained = rank[line]["evaluations"]
        assert len(trained) == len(expected) == (1 if "short" in line else 2)
        for row, other in zip(trained, expected, strict=True):
            assert row.keys() == other.keys()
            assert row["test_seen"] == 31
            if "almost-empty" in line:
                assert row["val_seen"] == 12
            for name in ("auroc", "weighted", "ordered"):
                assert row[f"test_{name}"] == pytest.approx(other[f"test_{name}"], rel=1e-5)


def test_metrics_equal_those_of_the_complete_set_in_one_call():
    (single,) = world(1)
    for line in ("single", "split", "dp", "single accumulate=3 clipped"):
        whole = single[line]["whole"]
        last = single[line]["evaluations"][-1]
        assert last["test_auroc"] == pytest.approx(whole["auroc"], abs=1e-6)
        assert last["test_auroc"] == pytest.approx(
            whole["by_sklearn"] * whole["classes"] / 10, abs=1e-6
        )


def test_averages_of_the_weights_are_evaluated():
    (single,) = world(1)
    averaged = single["single accumulate=3 clipped"]["evaluations"][-1]["test_ordered"]
    plain = single["single max_grad_norm=0.1"]["evaluations"][-1]["test_ordered"]
    assert averaged != plain


def test_metrics_change_no_loss():
    (single,) = world(1)
    without = run_world(1, train_all, ["single"], [])[0]["single"]
    assert single["single"]["sums"] == without["sums"]


@pytest.mark.slow
def test_metrics_change_no_loss_of_several_ranks():
    lines = ("ddp", "fsdp", "pipeline", "tp tp=2")
    without = run_world(2, train_all, list(lines), [])[0]
    trained = world(2)[0] | world(2, True)[0]
    for line in lines:
        assert trained[line]["sums"] == without[line]["sums"]


def gather_rows() -> tuple[list[Any], str]:
    """Gather rows of some dtypes, and rows of another shape on each rank."""
    with Runtime("cpu") as runtime:
        runtime.open_group()
        rank = runtime.rank
        # the global batch has rows 0 to 4, of which rank 0 has 0, 2 and 4
        strategy: Any = SimpleNamespace(runtime=runtime, dp_size=2, dp_group=None, global_size=5)
        gathered = []
        for dtype in DTYPES:
            rows = torch.arange(rank, 5, 2).view(-1, 1, 1).expand(-1, 2, 3).to(dtype)
            result = gather_on_rank0(strategy, rows, "rows")
            gathered.append(None if result is None else result.to(torch.complex64))
        gathered.append(gather_on_rank0(strategy, torch.arange(rank, 5, 2), "rows"))
        with pytest.raises(TrainingError) as raised:
            gather_on_rank0(strategy, torch.zeros(3 - rank, 4, 6 + rank), "metrics: the rows")
    return gathered, str(raised.value)


DTYPES = [torch.float32, torch.int16, torch.bfloat16, torch.complex64, torch.float64]


def test_rows_of_any_dtype_are_gathered_in_order_and_none_of_other_shapes():
    (gathered, first), (others, second) = run_world(2, gather_rows)
    assert others == [None] * (len(DTYPES) + 1)
    expected = torch.arange(5).view(-1, 1, 1).expand(-1, 2, 3).to(torch.complex64)
    assert all(torch.equal(rows, expected) for rows in gathered[:-1])
    assert torch.equal(gathered[-1], torch.arange(5))
    assert first == second
    assert first.startswith(
        "metrics: the rows of a batch have other shapes on other ranks, up to [4, 7] and down to "
        "[4, 6] for a sample, so they cannot be gathered. Pad the samples"
    )


LINE = ["data.val_fraction=0.2", "batch_size=8", "epochs=3", "tracker=none"]
OF_AUROC = "metrics=[{_target_: torchmetrics.AUROC, task: multiclass, num_classes: 10}]"


def run(folder, *overrides: str, ranks: int = 1):
    """Train; return the run directory."""
    start(folder, ranks, (*LINE, *overrides))
    return folder


def rows_of(folder) -> list[dict[str, Any]]:
    return [
        {key: row[key] for key in row if key.startswith(("val", "test"))}
        for row in read_metrics(folder)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_resumed_run_reports_the_same(ranks, tmp_path):
    metrics = [OF_AUROC[:-1] + ", own_metrics.Ordered, own_metrics.Seen]", "batch_size=24"]
    if ranks > 1:
        metrics.append("strategy=ddp")
    whole = rows_of(run(tmp_path / "whole", *metrics, ranks=ranks))
    run(tmp_path / "run", *metrics, "max_steps=5", ranks=ranks)
    resumed = rows_of(run(tmp_path / "run", *metrics, ranks=ranks))
    assert [row["val_seen"] for row in whole] == [20] * 3
    assert resumed[-2:] == whole[-2:]


def test_best_checkpoint_is_chosen_by_a_metric(tmp_path):
    ordered = "metrics=[{{_target_: own_metrics.Ordered, scale: {}, higher_is_better: {}}}]"
    best = {}
    for name, scale, higher in (("high", 1, "true"), ("low", 1, "false"), ("turned", -1, "true")):
        folder = run(
            tmp_path / name,
            ordered.format(f"{scale:.1f}", higher),
            "checkpoint.best=val_ordered",
        )
        values = [row["val_ordered"] for row in rows_of(folder)]
        position = torch.load(folder / "checkpoints/best.pt", weights_only=True)["progress"]
        assert position["best"]["val_ordered"] == (max if higher == "true" else min)(values)
        best[name] = position["step"]
    assert best["high"] != best["low"] == best["turned"]


def test_evaluate_reports_the_metrics_of_a_run(tmp_path, capsys):
    folder = run(tmp_path / "run", OF_AUROC)
    evaluate_command.main([str(folder), "--json", str(tmp_path / "value.json")])
    again = json.loads((tmp_path / "value.json").read_text())
    assert again["test_auroc"] == rows_of(folder)[-1]["test_auroc"]
    assert f"auroc {again['test_auroc']:.4f}" in capsys.readouterr().out


def test_evaluate_refuses_a_metric_that_fails_in_one_message(tmp_path):
    folder = run(tmp_path / "run")
    line = f"python -m ddp_lab evaluate {folder}"
    code, output = launch(line, "metrics=[own_metrics.Failing]")
    assert code == 2
    assert output.startswith("error: metrics: failing (own_metrics.Failing) fails in update")
    assert output.count("\n") == 1
    code, output = launch(line, "metrics=[{_target_: own_metrics.Seen, name: counted}]")
    assert code == 0, output
    assert "counted 50.0000" in output


@pytest.mark.parametrize(
    ("metric", "name", "lower"),
    [
        ("torchmetrics.MeanSquaredError", "mean_squared_error", True),
        (AUROC, "auroc", False),
        ({**AUROC, "name": "other"}, "other", False),
        (AUROC, "loss", True),
    ],
)
def test_sweep_knows_the_direction_of_a_metric(metric, name, lower):
    cfg = config().copy()
    OmegaConf.update(cfg, "metrics", [metric])
    OmegaConf.update(cfg, "optimize", f"val_{name}")
    assert lower_is_better(cfg) is lower


REFUSED = {
    "metrics=[torchmetrics.AUROC]": "metrics._target_=torchmetrics.AUROC: cannot be constructed: "
    "TypeError",
    "metrics=[torchmetrics.Nothing]": "metrics._target_=torchmetrics.Nothing: must be the name",
    "metrics=[own_metrics.NoMetric]": "metrics: own_metrics.NoMetric is no metric: it must be a "
    "subclass of torchmetrics.Metric",
    "metrics=[{_target_:own_metrics.Ordered,scal:2.0}]": "metrics.scal=2.0: there is no such key; "
    "did you mean metrics.scale? allowed: metrics.scale",
    "metrics=[own_metrics.Seen,own_metrics.Seen]": "metrics: two metrics have the name seen",
    "metrics=[{_target_:own_metrics.Seen,name:a-b}]": "metrics: name=a-b: must be letters",
    "metrics=[{_target_:own_metrics.Seen,higher_is_better:1}]": "metrics: higher_is_better=1 of "
    "own_metrics.Seen: must be true or false",
    "metrics=own_metrics.Seen": "metrics=own_metrics.Seen: must be a list, each the import path",
    "metrics=[{name:seen}]": "must be a list, each the import path",
    "metrics=[own_metrics.Seen] checkpoint.best=val_seen": "checkpoint.best=val_seen: "
    "own_metrics.Seen does not say whether higher values are better (higher_is_better). Say it in "
    "the config: metrics=[{_target_: own_metrics.Seen, higher_is_better: true}], or false",
    "metrics=[own_metrics.Seen] checkpoint.best=val_other": "checkpoint.best=val_other: "
    "Classification has no such metric for these data; allowed: val_loss, val_accuracy, "
    "val_top5_accuracy, val_seen",
}


def refusals(lines: list[str]) -> list[tuple[object, str]]:
    words = " ".join([*SMALL, "data.val_fraction=0.2"])
    return [refusal_in_world(f"{words} {line}") for line in lines]


def test_wrong_metrics_are_refused_in_one_message():
    outcomes = run_world(1, refusals, list(REFUSED))[0]
    for (code, printed), expected in zip(outcomes, REFUSED.values(), strict=True):
        assert code == 2
        assert expected in printed
        assert printed.count("\n") == 1, printed


def test_missing_package_is_one_message(monkeypatch):
    monkeypatch.setattr("ddp_lab.config.check.find_spec", lambda name: None)
    code, printed = refusals([f"metrics=[{'torchmetrics.R2Score'}]"])[0]
    assert code == 2
    assert printed == (
        "error: metrics: needs the package torchmetrics. Use pip install 'ddp_lab[metrics]', or "
        "metrics=[]\n"
    )


FAILS = {
    "own_metrics.Failing": "error: metrics: failing (own_metrics.Failing) fails in update for "
    "predictions float32 [8, 10] and targets int64 [8]: ValueError: cannot count "
    "(own_metrics.py, line",
    "own_metrics.Rows": "error: metrics: rows (own_metrics.Rows) returns float32 [10], but a row "
    "of metrics.jsonl has one number",
    "own_metrics.Accuracy": "error: metrics: accuracy is already the name of a metric of the task. "
    "Give yours another one: {_target_: own_metrics.Accuracy, name: my_accuracy}",
}


TWO_RANKS = f"torchrun --standalone --nproc_per_node=2 {ROOT}/train.py strategy=ddp"


def failure(command: str, folder: Path, metrics: str, *more: str) -> str:
    """Train with metrics that fail; return the one message, without the rest of the log."""
    words = [*LINE, f"metrics={metrics}", f"runs_dir={folder}", *more]
    code, output = launch(command, *SMALL, *words)
    assert code == 1, output
    if command.startswith("python"):
        assert "Traceback" not in output
    (message,) = dict.fromkeys(re.findall(r"error: .*", output))
    return message


@pytest.mark.parametrize("name", FAILS)
def test_metric_that_fails_ends_the_run_before_its_first_step(name, tmp_path):
    # A batch of an evaluation has 16 samples, and the trial has 8, as the message says.
    message = failure("python train.py", tmp_path, f"[{name}]", "batch_size=16")
    assert message.startswith(FAILS[name])
    path = only_run(tmp_path)
    assert not read_metrics(path)
    assert not list((path / "checkpoints").glob("step*"))


def test_metric_that_fails_on_two_ranks_is_one_message(tmp_path):
    name = "own_metrics.Failing"
    message = failure(TWO_RANKS, tmp_path, f"[{name}]")
    assert message.startswith(FAILS[name])


@pytest.mark.parametrize(
    ("option", "expected"),
    # of a few samples it may be that a metric cannot be computed
    [
        ("after: 4", "fails in update"),
        ("method: compute", "fails in compute: ValueError: cannot d"),
    ],
)
def test_metric_that_fails_later_ends_the_run(option, expected, tmp_path):
    message = failure("python train.py", tmp_path, f"[{{_target_: own_metrics.Failing, {option}}}]")
    assert expected in message


def over(
    metrics: GatheredMetrics,
    outputs: torch.Tensor,
    targets: torch.Tensor,
    task: Task,
    size: int,
    model: torch.nn.Module | None = None,
) -> dict[str, float]:
    """Evaluate a model that returns its inputs, in batches of `size`, the last one padded."""
    strategy = Single(Runtime("cpu"))
    strategy.task = task
    strategy.setup(model or torch.nn.Identity())
    batches = []
    for rows, expected in zip(outputs.split(size), targets.split(size), strict=True):
        missing = torch.zeros(size - len(rows), dtype=torch.int64)
        padded = torch.cat([rows, outputs[missing]]), torch.cat([expected, targets[missing]])
        batches.append(Batch(*padded, len(rows)))
    return evaluate(strategy, batches, metrics=metrics).values


def test_state_is_reset_between_evaluations():
    metrics = make_metrics(["own_metrics.Seen"])
    outputs = torch.eye(10)
    targets = torch.arange(10)
    for _ in range(2):
        assert over(metrics, outputs, targets, Classification(), 4)["seen"] == 10


def test_logits_within_0_and_1_are_not_taken_for_probabilities():
    generator = torch.Generator().manual_seed(0)
    logits = torch.rand(40, 4, generator=generator)  # in a batch all of them are from 0 to 1
    logits[0, 0] = 5.0
    targets = torch.randint(4, (40,), generator=generator)
    node = {"_target_": "torchmetrics.AUROC", "task": "multiclass", "num_classes": 4}
    value = over(make_metrics([node]), logits, targets, Classification(), 8)["auroc"]
    of_all = torchmetrics().AUROC(task="multiclass", num_classes=4)
    expected = of_all(logits.softmax(1), targets)
    assert value == pytest.approx(float(expected), abs=1e-7)


@pytest.mark.parametrize("size", [3, 40])
def test_metrics_of_several_labels_and_of_pixels(size):
    generator = torch.Generator().manual_seed(0)
    logits = torch.rand(40, 3, generator=generator)
    labels = torch.randint(2, (40, 3), generator=generator).float()
    node = {"_target_": "torchmetrics.AUROC", "task": "multilabel", "num_labels": 3}
    value = over(make_metrics([node]), logits, labels, MultiLabel(), size)["auroc"]
    assert value == pytest.approx(roc_auc_score(labels, logits), abs=1e-6)

    pixels = torch.rand(40, 2, 5, 5, generator=generator)
    masks = torch.randint(2, (40, 5, 5), generator=generator)
    node = {"_target_": "torchmetrics.JaccardIndex", "task": "multiclass", "num_classes": 2}
    values = over(make_metrics([node]), pixels, masks, Segmentation(), size)
    assert values["jaccard_index"] == pytest.approx(values["mean_iou"], abs=1e-6)


NAMES = {
    "auroc": lambda: torchmetrics().AUROC(task="binary"),
    "f1_score": lambda: torchmetrics().F1Score(task="multiclass", num_classes=3),
    "r2_score": lambda: torchmetrics().R2Score,
    "mean_squared_error": lambda: torchmetrics().MeanSquaredError,
    "cohen_kappa": lambda: {"_target_": "torchmetrics.CohenKappa", "task": "binary"},
    "fit": lambda: {"_target_": "torchmetrics.R2Score", "name": "fit"},
}


@pytest.mark.parametrize("name", NAMES)
def test_metric_is_named_by_its_class(name):
    assert list(make_metrics([NAMES[name]()]).metrics) == [name]


def test_metrics_in_a_dict_have_its_names():
    score = torchmetrics().R2Score
    metrics = make_metrics({"first": score(), "second": score})
    assert list(metrics.metrics) == ["first", "second"]
    assert metrics.higher_is_better == {"first": True, "second": True}


def test_predictions_that_are_no_tensor_are_refused():
    class Pair(Classification):
        def metric_inputs(self, outputs, targets):
            return {"logits": outputs}, targets

    metrics = make_metrics(["own_metrics.Seen"])
    with pytest.raises(TrainingError, match="but the predictions of Pair are a dict"):
        over(metrics, torch.eye(10), torch.arange(10), Pair(), 4)


class Wrapped(torch.nn.Module):
    """A model whose outputs are an object with logits, as those of transformers."""

    def forward(self, inputs):
        return {"logits": inputs}


def test_outputs_that_are_no_tensor_have_their_logits_measured():
    metrics = make_metrics(["own_metrics.Seen", {**AUROC, "average": "weighted"}])
    outputs = torch.eye(10) + torch.rand(10, 10, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(10).roll(1)
    plain = over(metrics, outputs, targets, Classification(), 4)
    wrapped = over(metrics, outputs, targets, Classification(), 4, Wrapped())
    assert wrapped == plain
    assert wrapped["seen"] == 10


def test_class_that_needs_arguments_is_refused():
    with pytest.raises(ConfigError, match="Pass an instance"):
        make_metrics([torchmetrics().AUROC])
