"""What differs of all that two runs have recorded but their losses, and what it can change.

A run directory has the config, the data, and the code, model, versions and devices. A rule for each
key of the config says from which step on, and how much, the key changes losses.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, NamedTuple

from yaml import YAMLError

from ddp_lab.config.errors import ConfigError
from ddp_lab.launchers.config_changes import shown, values_of
from ddp_lab.launchers.recorded_config import CONFIG, RANKS
from ddp_lab.resilience.run_directory import read_json

NOT_SET = "not set"
Effect = Literal["loss", "rounding", "evaluation", "none"]


class Rule(NamedTuple):
    """What a difference of some keys changes.

    Attributes:
        keys: of the config; those that end with a star are beginnings of keys.
        effect: on the losses; rounding: in the last digits at first.
        first: number of the first step whose loss it can change.
        text: what it is.
    """

    keys: str
    effect: Effect
    first: int
    text: str

    def includes(self, key: str) -> bool:
        """Return whether the rule is about a key."""
        return any(fnmatchcase(key, pattern) for pattern in self.keys.split())


# the first rule that includes a key counts
RULES = (
    Rule(
        "name runs_dir inject timeout log_every profile optimize check_replicas memory_limit "
        "tracker* checkpoint.* straggler.* data.loader data.num_workers data.root "
        "data.dataset.root evaluate_* patience metrics* speed loss_over_batch",
        "none",
        1,
        "",
    ),
    Rule("ema ema_warmup", "evaluation", 1, "the averaged weights, which are evaluated"),
    Rule("seed", "loss", 1, "the initial weights, the order of the samples, the augmentation"),
    Rule("resume", "loss", 1, "the weights and the position at which the run began"),
    Rule(
        "data.val_* data.dataset.* data.context data.collate_fn.* data.targets",
        "loss",
        1,
        "the samples that are trained on",
    ),
    Rule("data.*", "loss", 1, "how samples are augmented and normalised"),
    Rule("batch_size scaling", "loss", 1, "the samples of a step"),
    Rule("model._target_", "loss", 1, "another model"),
    Rule("model.*", "loss", 1, "the model and its initial weights"),
    Rule("task.* loss.*", "loss", 1, "the loss itself"),
    Rule("mixup cutmix", "loss", 1, "the training images"),
    Rule("precision", "loss", 1, "the data type of the computation"),
    Rule("optimizer.momentum", "loss", 3, "the update; the first one has no momentum yet"),
    Rule(
        "optimizer.* scheduler.* warmup_* lr_scaling lr_base_batch_size decay_norms_and_biases "
        "max_grad_norm on_nan callbacks*",
        "loss",
        2,
        "the update of the weights",
    ),
    Rule(
        "epochs max_steps max_tokens max_minutes",
        "loss",
        3,
        "the learning rate after the first step, which follows from the length of the run",
    ),
    Rule("strategy.batch_norm", "loss", 1, "BatchNorm's statistics"),
    Rule(
        f"{RANKS.replace(' ', '?')} strategy.*",
        "rounding",
        1,
        "the order in which gradients are added, and the local batches of BatchNorm",
    ),
    Rule(
        "accumulate checkpoint_activations device cuda_graph compile channels_last float32_matmul",
        "rounding",
        1,
        "the order of additions",
    ),
)
OTHER = Rule("*", "loss", 1, "a key that this version does not know")


@dataclass(frozen=True)
class Difference:
    """What differs between two runs.

    Attributes:
        name: of a key of the config, or of what else is recorded.
        values: of both runs, for the message.
        effect, first, text: as in `Rule`.
    """

    name: str
    values: tuple[str, str]
    effect: Effect
    first: int
    text: str

    def __str__(self) -> str:
        before, after = self.values
        changes = f": {self.text}" if self.text else ""
        return f"{self.name}: {before} -> {after}{changes}"


def recorded_differences(one: Path, other: Path) -> list[Difference]:
    """Return what differs between two run directories, without what follows from another one.

    Raises:
        ConfigError: a directory has no config.yaml that can be read.
    """
    differences = [
        *config_differences(one, other),
        *data_differences(one, other),
        *environment_differences(one, other),
    ]
    return without_consequences(differences)


def config_differences(one: Path, other: Path) -> list[Difference]:
    """Return the keys whose recorded values differ, in the order of RULES."""
    before = config_of(one)
    after = config_of(other)
    places = {rule: place for place, rule in enumerate((*RULES, OTHER))}
    placed: list[tuple[int, Difference]] = []
    for key in before | after:
        values = (before.get(key, NOT_SET), after.get(key, NOT_SET))
        if values[0] != values[1]:
            rule = rule_of(key)
            if key == "optimizer.momentum" and True in (
                config.get("optimizer.nesterov") for config in (before, after)
            ):
                rule = rule_of("optimizer.nesterov")  # whose first update has momentum
            texts = (shown(values[0]), shown(values[1]))
            difference = Difference(key, texts, rule.effect, rule.first, rule.text)
            placed.append((places[rule], difference))
    placed.sort(key=lambda pair: pair[0])
    return [difference for _, difference in placed]


def rule_of(key: str) -> Rule:
    """Return the rule of a key of the config."""
    return next((rule for rule in RULES if rule.includes(key)), OTHER)


def config_of(folder: Path) -> dict[str, Any]:
    """Return the recorded config by key, with the number of ranks.

    Raises:
        ConfigError: it is missing or damaged.
    """
    path = folder / CONFIG
    try:
        text = path.read_text(errors="replace")
        values = values_of(text)
    except (OSError, ValueError, YAMLError) as error:
        raise ConfigError(f"{path}: is missing or damaged ({error})") from None
    resume = re.search(r"^resume: (.*)$", text, re.MULTILINE)
    if resume and resume[1] not in ("auto", "never"):
        values["resume"] = resume[1]
    return values


def data_differences(one: Path, other: Path) -> list[Difference]:
    """Return what differs of the recorded data and of the order of the samples."""
    before = read_json(one / "data.json") or {}
    after = read_json(other / "data.json") or {}
    text = "the samples, with the same config"
    differences: list[Difference] = []
    for field in ("samples", "files"):
        pairs = changed(before.get(field), after.get(field))
        differences += [
            Difference(f"data, {field} of {name}", values, "loss", 1, text)
            if name != "test"
            else Difference("data, samples of test", values, "evaluation", 1, "what is evaluated")
            for name, values in pairs
        ]
    for field, of_field in {
        "digest": text,
        "held_out": "which samples are held out",
        "classes": "the numbers of the classes",
        "order": "the order of the samples, with the same seed and number of samples",
    }.items():
        values = (before.get(field), after.get(field))
        if None not in values and values[0] != values[1]:
            texts = (shown(values[0]), shown(values[1]))
            differences.append(Difference(f"data, {field}", texts, "loss", 1, of_field))
    return differences


def environment_differences(one: Path, other: Path) -> list[Difference]:
    """Return what differs of the recorded code, model, versions and devices."""
    before = read_json(one / "environment.json") or {}
    after = read_json(other / "environment.json") or {}
    differences = [
        Difference(f"code of {name}", values, "loss", 1, "a module that the config names")
        for name, values in changed(before.get("code"), after.get("code"))
    ]
    if None not in (before.get("model"), after.get("model")) and before["model"] != after["model"]:
        values = (before["model"], after["model"])
        text = "names and shapes of the model's tensors"
        differences.append(Difference("model", values, "loss", 1, text))
    differences += [
        Difference(f"version of {name}", values, "rounding", 1, "kernels and random generators")
        for name, values in changed(before.get("versions"), after.get("versions"))
    ]
    for field in ("devices", "cpu", "threads"):
        values = (before.get(field), after.get(field))
        if None not in values and values[0] != values[1]:
            texts = (shown(values[0]), shown(values[1]))
            text = "the order of additions in a kernel"
            differences.append(Difference(field, texts, "rounding", 1, text))
    return differences


def changed(
    before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
) -> list[tuple[str, tuple[str, str]]]:
    """Return the names whose values differ, with both; none if one was not recorded."""
    if before is None or after is None:
        return []
    return [
        (name, (shown(before.get(name, NOT_SET)), shown(after.get(name, NOT_SET))))
        for name in {**before, **after}
        if before.get(name, NOT_SET) != after.get(name, NOT_SET)
    ]


def without_consequences(differences: list[Difference]) -> list[Difference]:
    """Return the differences without those that follow from another one.

    The order of the samples follows from the seed and their number, the samples from the keys of
    `data`, the model's shapes from those of `model` and of `data`, devices from the ranks, and
    options that only one run has from another model or strategy.
    """
    names = {each.name for each in differences if each.effect != "none"}
    of_data = any(name.startswith("data.") for name in names)
    of_samples = any(name.startswith("data, ") and name != "data, order" for name in names)
    explained: set[str] = set()
    if of_data:
        explained |= {name for name in names if name.startswith("data, ")}
    if "seed" in names or of_data or of_samples:
        explained.add("data, order")
    if of_data or of_samples or any(name.startswith(("model.", "code of ")) for name in names):
        explained.add("model")
    if names & {RANKS, "device"}:
        explained |= {"devices", "threads"}
    for group in ("model", "strategy"):
        if f"{group}._target_" in names:
            explained |= {each.name for each in differences if is_option_of_one(each, group)}
    return [each for each in differences if each.name not in explained]


def is_option_of_one(difference: Difference, group: str) -> bool:
    """Return whether a difference is an option of a group that one of the runs does not have."""
    is_option = difference.name.startswith(f"{group}.") and NOT_SET in difference.values
    # BatchNorm's statistics change losses by more than the order of additions does
    return is_option and difference.name != "strategy.batch_norm"
