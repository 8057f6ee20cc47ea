"""Which keys of the config an ejected file can follow, and which are refused."""

from collections.abc import Mapping, Sequence
from typing import Any

from ddp_lab.config.build import leaves
from ddp_lab.config.errors import ConfigError

# Choices of the groups, by the name of what they construct, and the template of each.
STRATEGIES = {
    "ddp_lab.strategies.single.Single": "single",
    "ddp_lab.strategies.scratch.Scratch": "scratch",
    "ddp_lab.strategies.ddp.DDP": "ddp",
    "ddp_lab.strategies.fsdp.FSDP": "fsdp",
}
TASKS = {
    "ddp_lab.tasks.classification.Classification": "classification",
    "ddp_lab.tasks.tokens.Tokens": "tokens",
}
LOSSES = {
    "ddp_lab.tasks.classification.CrossEntropy": "cross_entropy",
    "ddp_lab.tasks.build.default": "default",
}
SCHEDULES = {
    "ddp_lab.training.schedule.constant": "constant",
    "ddp_lab.training.schedule.cosine": "cosine",
    "ddp_lab.training.schedule.multi_step": "multi_step",
    "ddp_lab.training.schedule.trapezoid": "trapezoid",
}
DATASETS = {
    "ddp_lab.data.datasets.Digits": "digits",
    "ddp_lab.data.datasets.Torchvision": "torchvision_data",
    "ddp_lab.data.datasets.Synthetic": "synthetic",
    "ddp_lab.data.datasets.Text": "text",
}
MODELS = {
    "ddp_lab.models.lenet.lenet": "lenet",
    "ddp_lab.models.simple_cnn.simple_cnn": "simple_cnn",
    "ddp_lab.models.resnet.resnet18": "resnet18",
    "ddp_lab.models.book_resnet.book_resnet18": "book_resnet18",
    "ddp_lab.models.vit.vit": "vit",
    "ddp_lab.models.gpt.gpt": "gpt",
}
GROUPS: dict[str, Mapping[str, str]] = {
    "strategy": STRATEGIES,
    "task": TASKS,
    "loss": LOSSES,
    "scheduler": SCHEDULES,
    "data": DATASETS,
    "model": MODELS,
}
OWN_MODELS = "and a model of your own"
OWN_DATA = "and data=own"
OPTIMIZERS = "torch.optim."

# Keys without a template, and the values with which they change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "scaling": ("strong",),
    "max_tokens": (None,),
    "max_minutes": (None,),
    "loss_over_batch": (False,),
    "checkpoint_activations": ("none",),
    "ema": (None,),
    "mixup": (0,),
    "cutmix": (0,),
    "device": ("auto", "cpu", "cuda"),
    "precision": ("float32",),
    "cuda_graph": ("auto", False),
    "compile": ("auto", False),
    "channels_last": ("auto", False),
    "resume": ("auto", "never"),
    "on_nan": ("stop",),
    "patience": (None,),
    "evaluate_every": (None,),
    "metrics": ([],),
    "callbacks": ([],),
    "inject": (None,),
    "data.crop_scale": (None,),
    "data.randaugment": (None,),
    "data.erasing": (0,),
    "data.targets": (1,),
    "data.readers": (1,),
    "model.weights": (None,),
    "model.weights_except": ([],),
    "model.drop_path": (0,),
    "strategy.batch_norm": ("local",),
    "strategy.find_unused_parameters": (False,),
    "strategy.algorithm": ("flat",),
    "strategy.keep_whole": ([],),
    "task.head_chunks": (1,),
    "optimizer.fused": (None, False),
    "optimizer.groups": ([],),
    "optimizer.layer_decay": (None,),
}
# Keys that a template follows, whatever their value is.
FOLLOWED = {
    "seed",
    "epochs",
    "max_steps",
    "batch_size",
    "lr_scaling",
    "lr_base_batch_size",
    "warmup_epochs",
    "warmup_steps",
    "accumulate",
    "max_grad_norm",
    "decay_norms_and_biases",
    "float32_matmul",
    "evaluate_test",
    "loss.label_smoothing",
    "strategy.bucket_cap_mb",
    "strategy.reshard_after_forward",
    "scheduler.milestones",
    "scheduler.gamma",
    "scheduler.decay",
    "data.root",
    "data.context",
    "data.crop_padding",
    "data.flip",
    "data.val_fraction",
    "data.val_seed",
    "data.mean",
    "data.std",
    "data.num_classes",
    "data.val_split",
    "data.test_split",
}
# Keys that change no loss, and are left out.
LEFT_OUT = {
    "memory_limit",
    "ema_warmup",
    "speed",
    "timeout",
    "name",
    "runs_dir",
    "optimize",
    "check_replicas",
    "log_every",
    "profile",
    "tracker",
    "strategy.bucket_mb",
    "data.loader",
    "data.num_workers",
    # of images of Pillow, of which there is no template
    "data.channels",
    "data.image_size",
    "data.resize",
}
LEFT_OUT_GROUPS = ("tracker_options.", "checkpoint.", "straggler.")
# Groups of which the constructor gets every key.
CONSTRUCTED = ("data.dataset.", "data.collate_fn.", "model.", "optimizer.")


def check_keys(config: Mapping[str, Any], choices: Mapping[str, str]) -> None:
    """Check that there is a template for what each key of a config asks for.

    Args:
        config: the config, as plain values.
        choices: the chosen option of each group, by the name of the group.

    Raises:
        ConfigError: there is none for some keys, all of which the message names.
    """
    groups = refused_groups(config, choices)
    values = refused_values(config)
    # of a choice without a template, its options say nothing more
    options = tuple(f"{group}." for group in groups)
    refused = [*groups.values(), *(text for text in values if not text.startswith(options))]
    if refused:
        raise ConfigError(
            f"ddp-lab eject: there is no template for {', '.join(refused)}. Leave out what is "
            "named here, or train with ddp_lab"
        )


def refused_groups(config: Mapping[str, Any], choices: Mapping[str, str]) -> dict[str, str]:
    """Return the groups whose choice has no template, each with a text about those that have."""
    refused: dict[str, str] = {}
    for group, templates in GROUPS.items():
        node = config["data"]["dataset"] if group == "data" else config[group]
        target = str(node["_target_"])
        allowed = ", ".join(templates.values()).replace("torchvision_data", "mnist, cifar10")
        if group == "model":
            allowed = f"{allowed} {OWN_MODELS}"
            if not target.startswith("ddp_lab."):
                continue
        if group == "data":
            allowed = f"{allowed} {OWN_DATA}"
            if choices.get(group) == "own":
                continue
        if target not in templates:
            refused[group] = f"{group}={choices.get(group, target)} (use {allowed})"
    target = str(config["optimizer"]["_target_"])
    if not target.startswith(OPTIMIZERS):
        refused["optimizer"] = f"optimizer._target_={target} (use one of torch.optim)"
    return refused


def refused_values(config: Mapping[str, Any]) -> list[str]:
    """Return the keys, as KEY=VALUE, whose values have no template."""
    refused: list[str] = []
    for key, value in leaves(dict(config)):
        name = key.rpartition(".")[2]
        if key in NEUTRAL:
            is_refused = value not in NEUTRAL[key]
        elif key in ("batch_size", "accumulate"):
            is_refused = value == "auto"
        elif key.endswith("_target_") or name == "_partial_":
            is_refused = key.startswith("data.collate_fn.") and value is not None
        else:
            is_left_out = key in LEFT_OUT or key.startswith(LEFT_OUT_GROUPS)
            is_refused = not (is_left_out or key in FOLLOWED or key.startswith(CONSTRUCTED))
        if is_refused:
            refused.append(f"{key}={shown(value)}")
    model = config["model"]
    draws_itself = str(model["_target_"]) in (
        "ddp_lab.models.resnet.resnet18",
        "ddp_lab.models.book_resnet.book_resnet18",
    )
    is_by_block = model.get("init") == "by_block"
    if is_by_block and (draws_itself or model.get("init_std") is not None):
        refused.append("model.init=by_block with this model")
    return refused


def shown(value: Any) -> str:
    """Return a value as on a command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{','.join(map(shown, value))}]"
    return str(value)
