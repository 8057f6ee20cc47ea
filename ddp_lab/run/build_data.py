"""The data of a run, constructed from its config: the dataset, and the loaders of its sets."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from hydra.utils import get_object
from omegaconf import DictConfig

from ddp_lab.config.build import call_target, construct, plain
from ddp_lab.config.errors import ConfigError, count
from ddp_lab.data.batch import LoaderOptions, size_of_evaluated
from ddp_lab.data.dataset import Dataset, hold_out, require_same_data
from ddp_lab.data.loader import Loader, loader_class
from ddp_lab.observe.log import print_if_slow
from ddp_lab.run.job import Job
from ddp_lab.training.performance import AUTO
from ddp_lab.world.runtime import Runtime

if TYPE_CHECKING:
    from ddp_lab.data.images import ImageOptions
    from ddp_lab.data.sources import Source

PAIR = 1  # data.targets of samples that are (input, target)
# Batches that an evaluation computes at once with speed=auto: without gradients, in the memory of a
# step. Not where a sample may have many losses: the logits of tokens are most of a step's memory.
EVALUATED = 8


def load_dataset(cfg: DictConfig, runtime: Runtime) -> Dataset:
    """Return the dataset in host memory.

    Collective: the first rank of each machine loads it first, and may download it.
    """
    data = cfg.data
    loaded: list[Dataset] = []
    source = make_source(plain(data), cfg.seed)
    with print_if_slow("preparing the data: downloading or reading", runtime.is_main):
        runtime.broadcast_from_rank0("dataset", lambda: loaded.append(source.load()), per_node=True)
        dataset = loaded[0] if loaded else source.load()
        if dataset.train.is_endless:
            from ddp_lab.run.stream import check_sets

            check_sets(dataset, data.val_fraction)
        else:
            dataset = hold_out(dataset, data.val_fraction, data.val_seed)
    sizes = {name: samples.size for name, samples in dataset.sets.items()}
    decide = require_same_data
    if dataset.train.is_endless:
        from ddp_lab.data.stream import require_same_stream as decide
    runtime.gather_and_decide("same dataset", [dataset.digest, sizes], decide)
    return dataset


def make_source(data: Mapping[str, Any], seed: int) -> "Source":
    """Construct the source that the config group `data` describes.

    Args:
        data: the config group, as plain values.
        seed: the run's seed.

    Raises:
        ConfigError: the class is neither a source nor, under data=own, a map-style dataset.
    """
    node = data["dataset"]
    target = get_object(node["_target_"])
    images = image_options(data)
    if hasattr(target, "load") and not hasattr(target, "__getitem__"):
        if data.get("targets", PAIR) != PAIR or data.get("collate_fn", {}).get("_target_"):
            raise ConfigError(
                f"data.dataset._target_={node['_target_']}: has the method load, and so decides "
                "itself what a sample is; data.targets and data.collate_fn are for a map-style "
                "dataset, with __len__ and __getitem__. Leave them out"
            )
        # By position, because instantiate would turn a dataclass that is passed by name into a
        # DictConfig.
        arguments = [images] if "images" in inspect.signature(target).parameters else []
        return construct("data.dataset", node, *arguments)

    if images is None or "val_split" not in data:
        raise ConfigError(
            f"data.dataset._target_={node['_target_']}: must have the method load; a map-style "
            "dataset needs data=own"
        )
    from ddp_lab.data.sources import Own

    targets = data.get("targets", PAIR)
    collate_fn = build_collate_fn(data.get("collate_fn", {}))
    splits = {"train": "train", "val": data["val_split"], "test": data["test_split"]}
    # names alone, because a stream is pickled for its processes
    parameters = [*inspect.signature(target).parameters]
    make = partial(call_target, node)
    return Own(
        make=make,
        target=node["_target_"],
        parameters=parameters,
        splits=splits,
        images=images,
        num_classes=data["num_classes"],
        seed=seed,
        targets=targets,
        collate_fn=collate_fn,
        readers=data.get("readers", 1),
    )


def build_collate_fn(node: dict[str, Any]) -> Callable[[list[Any]], Any] | None:
    """Construct the function that makes a batch of samples: what `_target_` names, or an object of
    a class.

    Args:
        node: the config group `data.collate_fn`.

    Returns:
        None if the config names none.

    Raises:
        ConfigError: the constructor fails, or its object cannot be called.
    """
    if node.get("_target_") is None:
        return None
    is_class = inspect.isclass(get_object(node["_target_"]))
    built = construct("data.collate_fn", node, _partial_=not is_class)
    if not callable(built):
        raise ConfigError(
            f"data.collate_fn._target_={node['_target_']}: must be a function of a list of "
            "samples, or a class whose objects can be called with one, by __call__"
        )
    return built


def image_options(data: Mapping[str, Any]) -> "ImageOptions | None":
    """Return how images are transformed according to the config group `data`.

    Return None if it names a dataset in memory.
    """
    if "image_size" not in data:
        return None
    from ddp_lab.data.images import ImageOptions

    return ImageOptions(**{key: data[key] for key in ImageOptions.__dataclass_fields__})


def find_workers(job: Job) -> int:
    """Return the number of processes for data.num_workers=auto, and note why. Collective."""
    number = 0
    why = "batches are made on the device (data.loader=device)"
    if job.options.loader != "device" or job.dataset.train.is_endless:
        from ddp_lab.data.worker_count import find_number

        sizes = job.sizes
        local_batch = sizes.global_batch_size // job.strategy.dp_size
        number, why = find_number(job.runtime, job.dataset.sets, local_batch, sizes.steps_per_epoch)
    job.notes.append(f"data.num_workers=auto: {count(number, 'process')} for each rank: {why}")
    return number


def make_loaders(cfg: DictConfig, job: Job) -> Mapping[str, Loader]:
    """Return the loaders of the sets of the dataset, by name.

    That of the training set is shuffled and augmented.
    """
    data = cfg.data
    strategy = job.strategy
    make = loader_class(job.options.loader)
    num_workers = data.num_workers
    if num_workers == AUTO:
        num_workers = find_workers(job)
    training = LoaderOptions(
        batch_size=job.sizes.global_batch_size,
        dp_rank=strategy.dp_rank,
        dp_size=strategy.dp_size,
        device=strategy.device,
        mean=data.mean,
        std=data.std,
        shuffle=True,
        seed=cfg.seed,
        crop_padding=data.crop_padding,
        flip=data.flip,
        num_workers=num_workers,
        ignore=getattr(job.task, "ignore", 255),
        labels=None if job.options.compile else job.task.labels,  # a compiled loss reads no labels
    )

    evaluated = replace(
        training,
        batch_size=size_of_evaluated(training.batch_size, strategy.dp_size, cfg.accumulate),
        shuffle=False,
        crop_padding=0,
        flip=False,
    )
    chosen_graph = job.options.cuda_graph and "cuda_graph" in job.options.reasons
    if chosen_graph and not job.task.weighted:
        evaluated = replace(evaluated, batch_size=EVALUATED * evaluated.batch_size)
    loaders: dict[str, Loader] = {}
    for name, samples in job.dataset.sets.items():
        if samples.is_endless:
            from ddp_lab.data.stream_loader import StreamLoader as make_loader
        else:
            make_loader = make
        loaders[name] = make_loader(samples, training if name == "train" else evaluated)
    return loaders
