"""The file of plain PyTorch that trains as a run does: which templates, and their settings."""

import ast
import inspect
import pkgutil
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ddp_lab.config.errors import ConfigError
from ddp_lab.data.dataset import VAL_FRACTION
from ddp_lab.eject.assemble import TEMPLATES, WIDTH, assemble, literal
from ddp_lab.eject.keys import DATASETS, MODELS, SCHEDULES, STRATEGIES, TASKS
from ddp_lab.run.build_model import OF_WEIGHTS
from ddp_lab.run.job import Job

MOST_LINES = 300  # of an ejected file
# what each template of the data, or of the model, imports besides torch
PACKAGES = {
    "digits": ["scikit-learn"],
    "torchvision_data": ["torchvision"],
    "text": ["numpy"],
    "resnet18": ["torchvision"],
}
TITLES = {
    "single": "on one device",
    "scratch": "with an all-reduce of the gradients by hand",
    "ddp": "with torch's DistributedDataParallel",
    "fsdp": "with torch's fully_shard",
}


class Written(NamedTuple):
    """How a file is written.

    Attributes:
        path: of the file.
        overrides: of the run, as on a command line.
        ranks: number of ranks in its launch line.
    """

    path: Path
    overrides: Sequence[str]
    ranks: int


def write_plain(config: Mapping[str, Any], job: Job, written: Written) -> str:
    """Return the text of the file.

    Args:
        config: of the run, as plain values, which `check_keys` has checked.
        job: the run, built in one process.
        written: how the file is written.

    Raises:
        ConfigError: the file cannot hold the model or the data.
    """
    check_model(job)
    strategy = STRATEGIES[str(config["strategy"]["_target_"])]
    model = MODELS.get(str(config["model"]["_target_"]), "own_model")
    data = DATASETS.get(str(config["data"]["dataset"]["_target_"]), "own_data")
    schedule = SCHEDULES[str(config["scheduler"]["_target_"])]
    settings = settings_of(config, job, strategy, written.path)
    replacements = {"torch.optim.SGD(": f"{config['optimizer']['_target_']}("}
    replacements[", lr=LR)"] = f", {optimizer_arguments(config['optimizer'])})"
    imports: list[str] = []
    if data == "torchvision_data":
        replacements["MNIST"] = str(config["data"]["dataset"]["name"])
    if data == "own_data":
        line, sets = own_sets(config["data"], job)
        imports.append(line)
        replacements["{}.items()"] = f"{sets}.items()"
    if model == "own_model":
        line, call = own_call(config["model"], job)
        imports.append(line)
        replacements["nn.Linear(1, 1)"] = call

    loop = ["one_device"] if strategy == "single" else ["ranks"]
    of_strategy = [] if strategy == "single" else [strategy]
    names = ["seeds", data, "hold_out", "augment", "by_block", model, *of_strategy, "inputs"]
    names += [*loop, schedule, "train"]
    docstring = docstring_of(config, written, (strategy, data, model))
    text = assemble(docstring, names, settings, replacements, imports)
    lines = text.count("\n")
    if lines > MOST_LINES:
        raise ConfigError(
            f"ddp-lab eject: the file would have {lines} lines, more than the {MOST_LINES} that a "
            "person reads. Leave out options, such as data.crop_padding, accumulate or "
            "data.val_fraction"
        )
    return text


def check_model(job: Job) -> None:
    """Check that the model and the data are ones that the file can hold.

    Raises:
        ConfigError: they are not.
    """
    samples = job.dataset.train
    first, _ = samples.first
    is_short = isinstance(first, torch.Tensor) and first.dtype in (torch.int16, torch.uint16)
    if samples.is_tree or is_short:
        raise ConfigError(
            "ddp-lab eject: there is no template for inputs or targets that are a tuple or dict, "
            "or 16-bit integers"
        )
    frozen = [name for name, each in job.model.named_parameters() if not each.requires_grad]
    if frozen or job.strategy.idle:
        name = [*frozen, *sorted(job.strategy.idle)][0]
        raise ConfigError(
            f"ddp-lab eject: there is no template for parameters that no step uses or that are "
            f"frozen, as {name}. Remove it from the model"
        )


def settings_of(config: Mapping[str, Any], job: Job, strategy: str, path: Path) -> dict[str, Any]:
    """Return the value of each constant and choice of the templates' settings.py."""
    data = config["data"]
    model = config["model"]
    shape = job.dataset.model_shape()
    sizes = job.sizes
    settings = defaults()
    is_own = str(model["_target_"]) not in MODELS
    max_steps = config.get("max_steps")
    epochs = config["epochs"]
    if max_steps is not None:
        epochs = min(epochs or max_steps, -(-max_steps // sizes.steps_per_epoch))
        max_steps = min(max_steps, epochs * sizes.steps_per_epoch)
    fraction = 0.0
    if job.dataset.held_out:
        fraction = data["val_fraction"]
        if fraction is None:
            fraction = VAL_FRACTION
    schedule = SCHEDULES[str(config["scheduler"]["_target_"])]
    units = unit_names(job) if strategy == "fsdp" else None
    inputs = "tensors"
    if job.dataset.train.is_image:
        inputs = "images"
    elif str(config["data"]["dataset"]["_target_"]) in DATASETS:
        inputs = "tokens"
    settings |= {
        "STRATEGY": strategy,
        "TASK": TASKS[str(config["task"]["_target_"])],
        "INPUTS": inputs,
        "DEVICE": config["device"],
        "SCHEDULE": schedule,
        "OPTIMIZER": "one group" if config["decay_norms_and_biases"] else "two groups",
        "EVALUATE_TEST": config["evaluate_test"],
        "MATMUL": config["float32_matmul"],
        "HAS_BUFFERS": any(True for _ in job.model.buffers()),
        "DRAWS_BY_BLOCK": model.get("init") == "by_block",
        "BLOCKS_RESET": MODELS.get(str(model["_target_"])) in ("vit", "gpt"),
        "MODEL_MAY_DRAW": is_own,
        "ENDS_WITHIN_EPOCH": max_steps is not None,
        "HAS_UNITS": units is not None,
        "SEED": config["seed"],
        "EPOCHS": epochs,
        "MAX_STEPS": max_steps,
        "BATCH_SIZE": sizes.global_batch_size,
        "ACCUMULATE": config["accumulate"],
        "LR": sizes.lr,
        "WARMUP_STEPS": job.horizon.warmup_steps,
        "MAX_GRAD_NORM": config["max_grad_norm"],
        "LABEL_SMOOTHING": config["loss"].get("label_smoothing", 0.0),
        "ROOT": data["root"],
        "VAL_FRACTION": fraction,
        "VAL_SEED": data["val_seed"],
        "CROP_PADDING": data["crop_padding"],
        "FLIP": data["flip"],
        "MEAN": list(data["mean"]),
        "STD": list(data["std"]),
        "CONTEXT": shape.get("context", 0),
        "VOCABULARY": shape.get("vocabulary", 0),
        "IN_CHANNELS": shape.get("in_channels", 0),
        "IMAGE_SIZE": shape.get("image_size", 0),
        "NUM_CLASSES": shape.get("num_classes", 0),
        "RESHARD": config["strategy"].get("reshard_after_forward", True),
        "BUCKET_MB": config["strategy"].get("bucket_cap_mb", 25),
        "UNITS": units,
        "WEIGHTS": path.with_suffix(".pt").name,
    }
    for group, keys in {
        "scheduler": ("milestones", "gamma", "decay"),
        "model": ("depth", "width", "heads", "patch_size", "pool", "tied", "init_std"),
    }.items():
        settings |= {key.upper(): config[group][key] for key in keys if key in config[group]}
    if "mlp_ratio" in model:
        settings["HIDDEN"] = round(model["width"] * model["mlp_ratio"])
    dataset = data["dataset"]
    settings["TRAIN_SIZE"] = dataset.get("train_size", 0)
    settings["TEST_SIZE"] = dataset.get("test_size", 0)
    return settings


def defaults() -> dict[str, Any]:
    """Return the values that the templates' settings.py has."""
    tree = ast.parse((TEMPLATES / "settings.py").read_text())
    values: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            values[node.targets[0].id] = ast.literal_eval(node.value)
    return values


def unit_names(job: Job) -> list[str] | None:
    """Return the modules that fsdp gathers alone; None: they are the children of the model."""
    units: list[nn.Module] = getattr(job.strategy, "units", [])
    children = list(job.model.children())
    if len(units) == len(children) and all(map(lambda a, b: a is b, units, children)):
        return None
    names = {module: name for name, module in job.model.named_modules()}
    return [names[unit] for unit in units]


def optimizer_arguments(node: Mapping[str, Any]) -> str:
    """Return the arguments of the optimizer, without those that have the class's defaults."""
    target = getattr(torch.optim, str(node["_target_"]).removeprefix("torch.optim."))
    parameters = inspect.signature(target).parameters
    left_out = ("lr", "fused", "groups", "layer_decay")
    options = {
        key: value
        for key, value in node.items()
        if not key.startswith("_") and key not in left_out and parameters[key].default != value
    }
    return ", ".join(["lr=LR", *(f"{key}={literal(value)}" for key, value in options.items())])


def own_call(node: Mapping[str, Any], job: Job) -> tuple[str, str]:
    """Return the line that imports the user's class or function, and the call that makes a model.

    Raises:
        ConfigError: an argument is none that a line of code can hold.
    """
    module, _, name = str(node["_target_"]).rpartition(".")
    options = {
        key: value
        for key, value in node.items()
        if not key.startswith("_") and key not in OF_WEIGHTS
    }
    for key, value in options.items():
        if "_target_" in repr(value):
            raise ConfigError(
                f"ddp-lab eject: there is no template for model.{key}={value}. Construct it in "
                "your model"
            )
    make = pkgutil.resolve_name(f"{module}:{name}")
    accepted = inspect.signature(make).parameters
    shape = job.dataset.model_shape()
    options |= {key: value for key, value in shape.items() if key in accepted}
    with torch.random.fork_rng(devices=[]):
        check_not_lazy(make(**options))
    arguments = [f"{key}={literal(value)}" for key, value in options.items()]
    call = f"{name}({', '.join(arguments)})"
    if len(call) > WIDTH - len("    model = "):
        call = f"{name}(\n" + "".join(f"        {each},\n" for each in arguments) + "    )"
    return f"from {module} import {name}", call


def own_sets(data: Mapping[str, Any], job: Job) -> tuple[str, str]:
    """Return the line that imports the user's dataset, and the dict of its sets.

    Raises:
        ConfigError: it is a stream, or its samples are no tensors, or not the same ones in every
            epoch.
    """
    node = data["dataset"]
    key = f"data.dataset._target_={node['_target_']}"
    if job.dataset.train.is_endless:
        raise ConfigError(
            f"ddp-lab eject: there is no template for {key}, which is a stream. Use a dataset "
            "with a length and an index"
        )
    for index in range(min(3, job.dataset.train.size)):
        first, second = (job.dataset.train.sample(epoch, index) for epoch in (1, 2))
        parts = zip(first, second, strict=True)
        are_equal = [
            isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b)
            for a, b in parts
        ]
        if not all(are_equal):
            raise ConfigError(
                f"ddp-lab eject: there is no template for {key}: sample {index} differs between "
                "epochs. A dataset must return the same tensors always"
            )
    module, _, name = str(node["_target_"]).rpartition(".")
    parameters = inspect.signature(pkgutil.resolve_name(f"{module}:{name}")).parameters
    options = {each: value for each, value in node.items() if not each.startswith("_")}
    splits: dict[str, dict[str, Any]] = {"train": {}}
    if "split" in parameters:
        names = {"train": "train", "val": data["val_split"], "test": data["test_split"]}
        splits = {each: {"split": split} for each, split in names.items() if split is not None}
    elif "train" in parameters:
        splits = {"train": {"train": True}, "test": {"train": False}}
    calls = [f"{literal(each)}: {call_of(name, options | more)}" for each, more in splits.items()]
    text = f"{{{', '.join(calls)}}}"
    if len(text) > WIDTH - len("    for name, dataset in .items():"):
        text = "{\n" + "".join(f"        {call},\n" for call in calls) + "    }"
    return f"from {module} import {name}", text


def call_of(name: str, options: Mapping[str, Any]) -> str:
    """Return a call with keyword arguments as code."""
    return f"{name}({', '.join(f'{key}={literal(value)}' for key, value in options.items())})"


def check_not_lazy(model: nn.Module) -> None:
    """Check that a model has all its parameters before its first forward pass.

    Raises:
        ConfigError: it has not.
    """
    lazy = [name for name, each in model.named_parameters() if is_lazy(each)]
    if lazy:
        raise ConfigError(
            "ddp-lab eject: there is no template for layers whose shapes follow from the first "
            f"batch, as {lazy[0]}. Use layers with sizes, such as nn.Linear for nn.LazyLinear"
        )


def docstring_of(config: Mapping[str, Any], written: Written, parts: tuple[str, str, str]) -> str:
    """Return the docstring: what the file does, how it is started, and what it needs."""
    strategy, data, model = parts
    name = written.path.name
    line = f"torchrun --standalone --nproc_per_node={written.ranks} {name}"
    if strategy == "single":
        line = f"python {name}"
    target = str(config["model"]["_target_"]).rpartition(".")[2]
    dataset = str(config["data"]["dataset"].get("name", data))
    packages = ["torch", *PACKAGES.get(data, []), *PACKAGES.get(model, [])]
    for node in (config["data"]["dataset"], config["model"]):
        path, _, own_name = str(node["_target_"]).rpartition(".")
        if not path.startswith("ddp_lab."):
            packages.append(f"the module {path}")
            dataset = own_name if node is config["data"]["dataset"] else dataset
    packages = [*dict.fromkeys(packages)]
    needs = " and ".join(filter(None, [", ".join(packages[:-1]), packages[-1]]))
    overrides = " ".join(["ddp-lab train", *written.overrides])
    text = f"The losses are those of `{overrides}`, on the CPU to the last digit. It needs {needs}."
    body = textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)
    return f"Train {target} on {dataset} {TITLES[strategy]}.\n\n    {line}\n\n{body}"
