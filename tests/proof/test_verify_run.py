"""`ddp-lab verify`: planted errors are named, and what is right is equal."""

import json
import os
import time

import proof_models
import pytest
import wrong_strategies
from launches import call_in_process
from own_strategies import Mine
from worlds import once

from ddp_lab.config.check import check
from ddp_lab.config.compose import CONF
from ddp_lab.config.errors import ConfigError
from ddp_lab.lab.arguments import find_strategy
from ddp_lab.launchers.command_line import compose_config
from ddp_lab.proof import workers as proof_workers
from ddp_lab.proof.compare import compare
from ddp_lab.proof.plans import CHOICES, Plan, batch_size_for, make_plans, samples_for, single
from ddp_lab.proof.reference import RunFacts
from ddp_lab.proof.subject import ConfigRun
from ddp_lab.proof.verify_run import verify_run
from ddp_lab.proof.workers import Workers
from ddp_lab.run.build import prepare
from ddp_lab.world.runtime import Runtime

TINY = (
    "data=synthetic",
    "data.dataset.train_size=60",
    "data.dataset.channels=1",
    "data.dataset.image_size=8",
    "optimizer.lr=0.1",
)
OWN = (*TINY, "model=own")
# By name: the ranks, the first tensor that differs, its factor, and a part of the cause.
WRONG = {
    "SumForMean": (4, "first.weight", 4, "x4 is the number of ranks"),
    "MeanTwice": (2, "first.weight", 1 / 2, "x1/2"),
    "ForgetsSum": (2, "first.weight", None, "the sum over the ranks is missing"),
    "ForgetsOne": (2, "head.bias", None, "the sum over the ranks is missing"),
    "ClipsByLocalNorm": (2, "first.weight", 2, "clipped by another norm"),
    "DividesByFullBatch": (2, "first.weight", 9 / 24, "size of a full batch (9/24)"),
    "MeanOfMeans": (2, "first.weight", None, "Only the partial last batch differs, 9 samples"),
    "ForgetsFirstMicroBatch": (2, "first.weight", None, "With accumulate=1 it is equal"),
    "OtherStart": (2, "first.weight", None, "begin with other weights"),
    "Drifts": (2, "first.weight", None, "replica 1 has another one"),
}


def run_of(*overrides: str) -> ConfigRun:
    cfg = compose_config([*overrides], None)
    check(cfg)
    return ConfigRun.of(cfg)


def plan_of(strategy: type, ranks: int) -> Plan:
    target = {"_target_": f"{strategy.__module__}.{strategy.__name__}"}
    return Plan(strategy.__name__, ranks, target)


def plant() -> None:
    """Print the report of all wrong strategies, and of a right one after one that has died."""
    run = run_of(*OWN, "model._target_=proof_models.Images", "accumulate=3", "max_grad_norm=9")
    plans = [plan_of(getattr(wrong_strategies, name), ranks) for name, (ranks, *_) in WRONG.items()]
    sharded = find_strategy("fsdp", {})
    plans += [plan_of(wrong_strategies.Dies, 2), plan_of(Mine, 2)]
    plans += [Plan("sharded on 2", 2, sharded), Plan("sharded on 3", 3, sharded)]
    with Workers(run, 4) as workers:
        report = compare(workers, single(), plans, RunFacts(9.0, 3))
    print(json.dumps(report.as_json()))


@once
def planted() -> dict:
    process = call_in_process(plant)
    assert not process.returncode, process.stderr
    return json.loads(process.stdout)


def row_of(name: str) -> dict:
    return next(row for row in planted()["rows"] if row["name"] == name)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_planted_error_is_named_with_its_factor_and_cause(name):
    _, tensor, factor, cause = WRONG[name]
    row = row_of(name)
    assert row["outcome"] == "different"
    difference = row["difference"]
    assert difference["name"] == tensor
    assert difference["factor"] == (None if factor is None else pytest.approx(factor))
    assert cause in difference["cause"]


def test_error_of_the_partial_batch_is_equal_in_the_full_ones():
    for name in ("DividesByFullBatch", "MeanOfMeans"):
        where = row_of(name)["difference"]["where"]
        assert where.startswith("gradient of step 3, "), "the full batches were equal"


def test_right_strategy_is_equal_after_a_rank_has_died():
    assert row_of("Dies")["outcome"] == "failed"
    assert "rank 1 exited with 3" in row_of("Dies")["reason"]
    assert row_of("Mine") == {"name": "Mine", "outcome": "equal", "reason": "", "difference": None}
    assert not planted()["ok"]


def test_more_ranks_follow_fewer_with_another_history():
    """Ranks number the sharded models that they have made."""
    assert row_of("sharded on 2")["outcome"] == "equal"
    assert row_of("sharded on 3")["outcome"] == "equal"


def test_clipping_that_would_do_nothing_is_made_to_clip():
    (note,) = [note for note in planted()["notes"] if "max_grad_norm" in note]
    assert note.endswith("in place of the run's, which would clip nothing")
    assert float(note.split("=")[1].split()[0]) < 9


def compare_models() -> None:
    """Print the report of each model, or why there is none."""
    by_model = {}
    for model in ("WithDropout", "Float32Inside", "Float32Only", "Draws", "Normalized"):
        cfg = compose_config([*OWN, f"model._target_=proof_models.{model}", "strategy=ddp"], None)
        try:
            by_model[model] = verify_run(cfg, "ddp", 2, ("ddp",)).as_json()
        except ConfigError as error:
            by_model[model] = str(error)
    print(json.dumps(by_model))


@once
def of_models() -> dict:
    process = call_in_process(compare_models)
    assert not process.returncode, process.stderr
    return json.loads(process.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "note"),
    [
        ("WithDropout", "without dropout, which ranks draw by themselves: drop.p"),
        ("Float32Inside", "compared in float32, in which some layers of the model compute"),
        ("Float32Only", "computed in float32, because float64 is not possible: "),
        ("Normalized", "BatchNorm: with strategy.batch_norm=sync"),
    ],
)
def test_model_is_equal_with_a_note_about_what_is_compared(model, note):
    report = of_models()[model]
    assert [(row["name"], row["outcome"]) for row in report["rows"]] == [("ddp on 2", "equal")]
    assert report["ok"]
    (line,) = [line for line in report["notes"] if line.startswith(note)]
    assert len(line) < 400


def test_plain_model_has_no_note_about_its_layers():
    assert [note for note in planted()["notes"] if "dropout" in note or "BatchNorm" in note] == []


@pytest.mark.slow
def test_model_that_draws_at_random_is_refused():
    assert "The model or the loss draws random numbers" in of_models()["Draws"]


def test_dropout_of_the_model_in_a_run_is_not_changed():
    with Runtime("cpu") as runtime:
        cfg = compose_config([*OWN, "model._target_=proof_models.WithDropout"], None)
        job = prepare(cfg, runtime)
    assert isinstance(job.model, proof_models.WithDropout)
    assert job.model.drop.p == 0.5


def refuse() -> None:
    """Print the report of a strategy that is refused and of one that is not, and the refusal."""
    run = run_of(*TINY, "model=simple_cnn")
    too_many = find_strategy("split", {"devices": ["cpu"] * 30})
    plans = [Plan("split", 1, too_many), Plan("dp", 1, find_strategy("dp", {}))]
    with Workers(run, 2) as workers:
        report = compare(workers, single(), plans, RunFacts())
    cfg = run.cfg.copy()
    cfg.strategy = plans[0].strategy
    with Runtime("cpu") as runtime, pytest.raises(ConfigError) as refused:
        prepare(cfg, runtime)
    print(json.dumps([report.as_json(), str(refused.value)]))


def test_refused_strategy_has_the_message_of_the_run():
    process = call_in_process(refuse)
    assert not process.returncode, process.stderr
    report, message = json.loads(process.stdout)
    assert report["rows"][0]["outcome"] == "refused"
    assert report["rows"][0]["reason"] == message
    assert "strategy.devices" in message
    assert report["ok"], "a refusal is no difference"


def sleep(context: str, seconds: float) -> int:
    time.sleep(seconds)
    return int(os.environ["RANK"]) + len(context)


def wait_for_ranks() -> None:
    proof_workers.SLOW = 0.2
    lines: list[str] = []
    with Workers("context", 2, limit=1.0, announce=lines.append) as workers:
        answers = [
            workers.run(2, sleep, 0.4, activity="a nap"),
            workers.run(2, sleep, 5.0, activity="a long one"),
            workers.run(2, sleep, 0.0, activity="none"),
        ]
    print(json.dumps([answers, lines]))


def test_wait_is_announced_and_limited():
    process = call_in_process(wait_for_ranks)
    assert not process.returncode, process.stderr
    answers, lines = json.loads(process.stdout)
    assert answers[0] == ["returned", 7, False]
    assert answers[1] == ["failed", "rank 0, 1 did not end within 1 s", False]
    assert answers[2] == ["returned", 7, False], "the ranks were started anew"
    assert lines == ["a nap: waiting, 0 s so far", "a long one: waiting, 0 s so far"]


def test_batch_is_divided_by_every_plan_and_its_last_one_is_uneven():
    for accumulate in (1, 2, 3, 5, 8):
        batch_size = batch_size_for(accumulate)
        assert batch_size % (4 * accumulate) == 0
        last = samples_for(batch_size) - 2 * batch_size
        assert 0 < last < batch_size
        assert last % 2


def test_batch_has_a_sample_for_each_micro_batch_of_the_run():
    run = run_of(*TINY, "strategy=ddp_pipeline", "strategy.num_microbatches=8", "accumulate=1")
    assert run.cfg.batch_size == 2 * 8
    larger = run_of(*TINY, "strategy=ddp_pipeline", "strategy.num_microbatches=12")
    assert larger.cfg.batch_size == 2 * 12


def test_plans_have_all_strategies_and_the_options_of_the_run():
    plans = make_plans(None, {"find_unused_parameters": True}, 4, 1, False)
    names = {plan.name.split()[0] for plan in plans}
    assert names == {path.stem for path in (CONF / "strategy").glob("*.yaml")} - {"single"}
    ddp = [plan for plan in plans if plan.name == "ddp on 2"]
    assert ddp[0].strategy["find_unused_parameters"] is True
    ranks = [plan.ranks for plan in plans]
    assert ranks == sorted(ranks, reverse=True), "ranks go on as fewer, and not as more"
    assert len(plans) == sum(map(len, CHOICES.values()))


def test_strategy_of_the_run_is_compared_once_and_first():
    run = Plan("ddp on 4", 4, find_strategy("ddp", {"bucket_cap_mb": 1}))
    plans = make_plans(run, {}, 4, 1, False)
    assert [plan.name for plan in plans].count("ddp on 4") == 1
    assert plans[0].strategy["bucket_cap_mb"] == 1


def test_plans_of_two_ranks_start_no_more():
    assert max(plan.ranks for plan in make_plans(None, {}, 2, 1, False)) == 2


def test_accumulation_is_compared_with_none():
    assert make_plans(None, {}, 2, 3, False)[0].accumulate == 1
