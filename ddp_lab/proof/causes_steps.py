"""Causes that show in what changes from step to step."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from ddp_lab.proof.causes_factor import Cause, close
from ddp_lab.proof.evidence import Case, Tensors, before, map_results
from ddp_lab.proof.report import factor_text


def by_repetition(case: Case) -> Cause | None:
    """Explain a step that repeats the one before, where that of one rank does not."""
    names = [name for name in case.of_step(case.expected) if before(name) in case.expected]
    previous = {name: before(name) or "" for name in names}
    if not names or case.all_equal(
        case.expected, {name: case.expected[previous[name]] for name in names}, names
    ):
        return None
    for tensors in case.evidence.ranks:
        complete = all(name in tensors and previous[name] in tensors for name in names)
        if not complete:
            return None
        if not case.all_equal(tensors, {n: tensors[previous[n]] for n in names}, names):
            return None
    return Cause(
        None,
        f"Step {case.step} repeats step {(case.step or 1) - 1}, which it does not on one rank: the "
        "same samples in the same order. The sampler does not know the epoch: call "
        "sampler.set_epoch(epoch) before each.",
    )


def by_average(case: Case) -> Cause | None:
    """Explain a moving average (EMA) of weights that are right."""
    if not case.agree:
        return None
    ratios = list[float]()
    decays = list[float]()
    for name in case.wrong_of_step:
        partner = partner_of(case, name)
        if partner is None:
            return None
        weights = case.expected[partner]
        ratio = case.factor(case.expected[name] - weights, case.values(name)[0] - weights)
        if ratio is None:
            return None
        ratios.append(ratio)
        decays += decays_of(case, name, partner)
    ratio = ratios[0]
    if any(not close(each, ratio) for each in ratios) or not 0 < ratio < 100:
        return None
    text = (
        "The weights are right, and their average is "
        f"{factor_text(ratio)} as far away from them as expected"
    )
    if any(abs(decay - ratio) <= 1e-3 * ratio for decay in decays):
        why = f"the decay, {ratio:.4g}, is applied twice in a step"
        which = "all averages" if case.is_everywhere else "these averages"
        return Cause(None, f"{text}: {why}. Update {which} once.")
    if ratio < 1:
        return Cause(None, f"{text}: it is updated more than once in a step (EMA).")
    return Cause(None, f"{text}: it is not updated in every step, or its decay is larger (EMA).")


def partner_of(case: Case, name: str) -> str | None:
    """Return the weight that a tensor is the average of: a right one of the same step and name."""
    last = name.rpartition("/")[2]
    candidates = [
        other
        for other in case.of_step(case.expected)
        if other not in case.wrong and case.expected[other].shape == case.expected[name].shape
    ]
    return next(
        (other for other in candidates if is_name_of(other.rpartition("/")[2], last)),
        None,
    )


def is_name_of(weight: str, average: str) -> bool:
    """Whether the name of an average contains that of a weight: ema.weight and weight."""
    return average.endswith(weight) or weight.endswith(average) or average.startswith(weight)


def decays_of(case: Case, name: str, partner: str) -> Sequence[float]:
    """Return the decay of an average, computed from the steps of one rank that are known."""
    decays = list[float]()
    for average, weight in same_in_other_steps(case, name, partner):
        earlier = before(average)
        if earlier is not None and earlier in case.expected:
            weights = case.expected[weight]
            decay = case.factor(case.expected[earlier] - weights, case.expected[average] - weights)
            decays += [] if decay is None else [decay]
    return decays


def same_in_other_steps(case: Case, name: str, partner: str) -> list[tuple[str, str]]:
    """Return the pairs of an average and its weight in all steps."""
    suffix = name.partition("/")[2]
    weight = partner.partition("/")[2]
    prefixes = [each.partition("/")[0] for each in case.expected if each.endswith(f"/{suffix}")]
    pairs = [(f"{prefix}/{suffix}", f"{prefix}/{weight}") for prefix in prefixes]
    return [pair for pair in pairs if pair[0] in case.expected and pair[1] in case.expected]


def updates(case: Case) -> Case | None:
    """Return the case with each step's tensors replaced by their change in that step.

    Returns:
        None if the step before is not known.
    """
    earlier = before(case.name)
    if earlier is None or earlier not in case.expected:
        return None

    def changes(tensors: Tensors) -> Tensors:
        changed = dict[str, Tensor]()
        for name, tensor in tensors.items():
            previous = tensors.get(before(name) or "")
            if previous is not None and previous.shape == tensor.shape:
                changed[name] = tensor - previous
            else:
                changed[name] = tensor
        return changed

    evidence = map_results(case.evidence, changes)
    return replace(case, expected=changes(case.expected), evidence=evidence, is_update=True)
