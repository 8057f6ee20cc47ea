"""Which strategy is recommended, and that the reason is true."""

from ddp_lab.estimate.advice import Advice, Prediction, Refused
from ddp_lab.estimate.footprint import Footprint
from ddp_lab.estimate.memory import Memory
from ddp_lab.estimate.report import table
from ddp_lab.estimate.step_time import StepTime

MEMORY = Memory(**dict.fromkeys(Memory.__dataclass_fields__, 0))


def prediction(line: str, milliseconds: float, fits: bool = True, batch: int = 256) -> Prediction:
    time = StepTime(milliseconds / 1000, 0, 0, 0)
    rate = batch / time.total
    return Prediction(line.split(), 1, fits, MEMORY, Footprint(0, 0, 0, 0, 0), 0, time, rate, 1.0, "python -m ddp_lab")


def advice(*predictions: Prediction, own: str | None = None, refused: list[Refused] | None = None) -> Advice:
    return Advice([], 1.0, list(predictions), refused or [], own and own.split())


def test_a_simpler_strategy_is_recommended_before_a_slightly_faster_one():
    found = advice(
        prediction("strategy=single", 20), prediction("strategy=ddp", 10.4), prediction("strategy=fsdp", 10.3),
        prediction("strategy=tp", 10), own="strategy=tp",
    )  # fmt: skip
    assert found.conclusion.startswith(
        "Recommended: ddp, because it is the simplest of 3 that are predicted to be within 5 % of the images/s of the fastest, "
        "tp\n"
    )


def test_strategies_with_batches_of_different_sizes_are_ranked_by_images_per_second():
    found = advice(
        prediction("strategy=single", 7), prediction("strategy=fsdp", 12, batch=512), prediction("strategy=ddp", 7.1, batch=512)
    )  # fmt: skip
    assert [each.name for each in found.ranked] == ["ddp", "fsdp", "single"]
    assert found.conclusion.startswith("Recommended: ddp, because it is predicted to be the fastest of 3 that fit\n")


def test_ddp_is_recommended_before_the_historical_baseline_and_the_hand_written_strategy():
    found = advice(*(prediction(f"strategy={name}", time) for name, time in {"dp": 10.2, "scratch": 10, "ddp": 10.4}.items()))
    assert found.conclusion.startswith("Recommended: ddp, because it is the simplest of 3 ")


def test_the_users_own_strategy_is_listed_first_and_not_taken_for_the_simplest():
    found = advice(prediction("strategy=fsdp", 10), prediction("strategy=mesh", 10.1), own="strategy=mesh")
    assert [each.name for each in found.listed] == ["mesh", "fsdp"]
    assert found.conclusion.startswith("Recommended: fsdp, because it is predicted to be the fastest of 2 that fit")


def test_the_users_own_strategy_is_listed_first_if_it_is_refused():
    refused = [Refused(["strategy=tp"], "its reason"), Refused(["strategy=mesh", "strategy.tp=3"], "2 ranks")]
    found = advice(prediction("strategy=single", 10), own="strategy=mesh strategy.tp=3", refused=refused)
    for everything in (False, True):
        lines = table(found, everything).splitlines()
        row = next(place for place, line in enumerate(lines) if line.startswith("predicted"))
        assert lines[row + 1] == "mesh tp=3  is refused: 2 ranks"
        assert lines[row + 2].startswith("single ")
        assert sum("2 ranks" in line for line in lines) == 1


def test_where_nothing_fits_the_parts_of_the_least_memory_are_shown():
    found = advice(prediction("strategy=single", 10, fits=False), prediction("strategy=fsdp", 20, fits=False))
    titles = "parameters  gradients  optimizer  activations  buckets  data  NCCL  context"
    assert f"\nGiB of the peak  {titles}\nsingle " in table(found, everything=False)
