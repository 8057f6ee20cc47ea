"""A user's mistake in a model or a dataset is one line, from the rank that has the cause.

It has no traceback of torch.
"""

import functools
import json
import os
import re
import sys
import tempfile
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import launches
import numpy as np
import pytest
import torch
from launches import call_in_process, refusal_in_world
from slow_rows import slow_but
from torch import nn
from torch.utils.data import Subset, TensorDataset
from worlds import run_world

from ddp_lab import Lab, tasks
from ddp_lab.config.errors import ConfigError, SampleError
from ddp_lab.data.labels import LabelRange
from ddp_lab.lab.launch import RankError, launch

CLASSES = 3
BATCH = 8
SIZE = 40
Pair = namedtuple("Pair", "hidden scores")


@dataclass
class Output:
    loss: None
    scores: torch.Tensor


class Wrapped(nn.Module):
    """A model that returns its logits within something else."""

    def __init__(self, wrap):
        super().__init__()
        self.layer = nn.Linear(4, CLASSES)
        self.wrap = wrap

    def forward(self, inputs):
        return self.wrap(self.layer(inputs))


class Samples:
    """A dataset of which the sample `bad` is another one, which only one rank reads."""

    def __init__(self, sample, bad: int = 1):
        self.sample = sample
        self.bad = bad

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return self.sample if index == self.bad else (torch.zeros(4), 0)


def in_memory(label=0, at: int = SIZE - 1, dtype=torch.int64) -> TensorDataset:
    """Return samples of class 0, but for one, which is not in the first batch."""
    targets = torch.zeros(SIZE, dtype=dtype)
    targets[at] = label
    return TensorDataset(torch.zeros(SIZE, 4), targets)


def wrapped(wrap):
    return {"model": partial(Wrapped, wrap), "data": in_memory}


OUTPUTS = (
    "but Classification needs one tensor [b, ...] for b samples, or a part named logits. Wrap it "
    "in a module of a few lines, whose forward ends with"
)
RANGE = (
    "but the outputs of the model have 3 classes, so that labels must be 0 to 2. Correct the "
    "labels, or give"
)
CASES = {
    "dict": (
        wrapped(lambda logits: OrderedDict(out=logits, aux=logits)),
        f"ConfigError: the model returns OrderedDict with out, aux, {OUTPUTS} `return "
        'self.model(inputs)["out"]`',
    ),
    "object": (
        wrapped(lambda logits: Output(None, logits)),
        f"ConfigError: the model returns Output with loss, scores, {OUTPUTS} `return "
        "self.model(inputs).scores`",
    ),
    "namedtuple": (
        wrapped(lambda logits: Pair(0, logits)),
        f"ConfigError: the model returns Pair with hidden, scores, {OUTPUTS} `return "
        "self.model(inputs).scores`",
    ),
    "tuple": (
        wrapped(lambda logits: (None, logits)),
        f"ConfigError: the model returns a tuple of 2, {OUTPUTS} `return self.model(inputs)[1]`",
    ),
    "none": (
        wrapped(lambda logits: None),
        f"ConfigError: the model returns NoneType, {OUTPUTS} `return self.model(inputs)`",
    ),
    "label": (
        {"data": partial(in_memory, 7)},
        f"SampleError: the targets contain the label 7, {RANGE} the model's last",
    ),
    "negative_label": (
        {"data": partial(in_memory, -1)},
        "SampleError: the targets contain the label -1; labels must be 0 to 2. Correct them",
    ),
    "label_of_one_sample": (
        {"data": partial(Samples, (torch.zeros(4), 5))},
        f"SampleError: the targets contain the label 5, {RANGE}",
    ),
    "int32": (
        {"data": partial(in_memory, dtype=torch.int32)},
        "SampleError: the targets of a batch are int32, [B]; classification needs int64, [B], from "
        "0 to 2. Use",
    ),
    "column": (
        {
            "data": lambda: TensorDataset(
                torch.zeros(SIZE, 4), torch.zeros(SIZE, 1, dtype=torch.int64)
            )
        },
        "SampleError: the targets of a batch are int64, [B, 1]; classification needs int64, [B], "
        "from 0 to 2",
    ),
    "length": (
        {"data": partial(Samples, (torch.zeros(6), 0), 3)},
        "SampleError: samples A and 3 of the dataset are in one batch, but their inputs have the "
        "shapes [4] and [6]. Pad them",
    ),
    "targets": (
        {"data": partial(Samples, (torch.zeros(4), torch.zeros(2)), 3)},
        "SampleError: samples A and 3 of the dataset are in one batch, but their targets have the "
        "shapes [] and [2]. Pad them",
    ),
    "empty": (
        {"data": lambda: TensorDataset(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))},
        "ConfigError: the dataset: must be a map-style dataset, with __len__, __getitem__ and at "
        "least one sample",
    ),
    "empty_subset": (
        {"data": lambda: Subset(in_memory(), [])},
        "ConfigError: the dataset: must be a map-style dataset, with",
    ),
    "triple": (
        {"data": lambda: TensorDataset(*[torch.zeros(SIZE, 4)] * 3)},
        "ConfigError: the dataset: sample 0 must be (input, target), got tuple of 3",
    ),
    "no_pair": (
        {"data": partial(Samples, {"image": 0, "label": 0})},
        "SampleError: the dataset: sample 1 must be (input, target), got dict",
    ),
}


def run(case: str, strategy: str, how: str, num_workers: int) -> None:
    case_options, _ = CASES[case]
    with Lab(strategy, device="cpu") as lab:
        model = case_options.get("model", partial(nn.Linear, 4, CLASSES))()
        make = partial(torch.optim.SGD, lr=0.1)
        trainer = lab.trainer(
            model, tasks.Classification(), make, batch_size=BATCH, num_workers=num_workers
        )
        data = case_options["data"]()
        if how == "evaluate":
            trainer.evaluate(data)
        elif how == "fit":
            trainer.fit(data, data, epochs=1)
        else:
            for inputs, targets in trainer.batches(data, 0, shuffle=False):
                trainer.step(inputs, targets)


def pattern(message: str) -> str:
    """Return the pattern of a message in which A is a number, and B the size of a local batch."""
    return "^" + re.sub(r"\bA\b", r"\\d+", re.sub(r"\bB\b", r"(?:4|8)", re.escape(message)))


@pytest.mark.parametrize("how", ["loop", "evaluate", "fit"])
@pytest.mark.parametrize("case", CASES)
def test_mistake_is_one_line(case, how):
    _, message = CASES[case]
    if how == "fit":  # which has two datasets
        message = message.replace("the dataset: must be a map", "train: must be a map")
    with pytest.raises((ConfigError, SampleError)) as error:
        run(case, "single", how, num_workers=0)
    text = f"{type(error.value).__name__}: {error.value}"
    assert re.search(pattern(message), text), text
    assert "\n" not in text
    assert error.value.__suppress_context__ or error.value.__context__ is None


def print_outcomes() -> None:
    """Launch every case on two ranks, and print its error and the ranks' stderr, as JSON."""
    outcomes: dict[str, list[str]] = {}
    for case in CASES:
        with tempfile.TemporaryFile("w+") as errors:
            os.dup2(errors.fileno(), sys.stderr.fileno())
            try:
                launch(run, case, "ddp", "loop", 1)
            except RankError as error:
                errors.seek(0)
                outcomes[case] = [str(error), errors.read()]
    print(json.dumps(outcomes))


@functools.cache
def outcomes_on_two_ranks() -> dict[str, list[str]]:
    """Return what `print_outcomes` prints in a process of its own."""
    done = call_in_process(print_outcomes)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_mistake_on_two_ranks_is_one_line_of_the_rank_that_has_the_cause(case):
    _, message = CASES[case]
    error, printed = outcomes_on_two_ranks()[case]
    first, empty, *lines = error.splitlines()
    assert empty == ""
    assert len(lines) == 1, error
    assert re.search(pattern(message), lines[0]), lines[0]
    # samples 1 and 3 are those of rank 1
    if case in ("label_of_one_sample", "no_pair", "length", "targets"):
        assert first == "rank 1 raised:"
    assert printed == ""


def test_labels_out_of_range_are_found_before_the_batch_that_has_them():
    """On a GPU that batch would end the process.

    All labels of a dataset in memory are known when it is placed there.
    """
    with Lab(device="cpu") as lab:
        trainer = lab.trainer(
            nn.Linear(4, CLASSES), tasks.Classification(), partial(torch.optim.SGD, lr=0.1), BATCH
        )
        inputs, targets = next(trainer.batches(in_memory(7), 0, shuffle=False))
        assert targets.max() == 0
        with pytest.raises(SampleError, match="the label 7"):
            trainer.step(inputs, targets)
        assert trainer.progress.step == 0
        # the trainer can be used with other labels
        trainer.fit(in_memory(2), in_memory(1), epochs=1)


@pytest.mark.parametrize(("task", "ignore"), [(tasks.Segmentation(), 255), (tasks.Tokens(), -100)])
def test_masks_and_tokens_have_a_range_without_what_they_ignore(task, ignore):
    outputs = torch.zeros(2, 3, 3)  # tokens: context 3, of masks [b, height, width] 3 classes
    outputs = outputs if isinstance(task, tasks.Tokens) else outputs[..., None].expand(2, 3, 3, 3)
    targets = torch.zeros(outputs[:, 0].shape if outputs.dim() == 4 else (2, 3), dtype=torch.int64)
    targets.view(-1)[:2] = torch.tensor([ignore, 2])
    task.loss_sum(outputs, targets)
    task.sums(outputs, targets)
    targets.view(-1)[2] = 3
    for use in (task.loss_sum, task.sums):
        with pytest.raises(
            SampleError,
            match=rf"the label 3, .* must be 0 to 2, or {ignore} where they do not count",
        ):
            use(outputs, targets)


def test_range_of_labels_reads_no_value_of_a_device(monkeypatch):
    labels = LabelRange(ignore=255)
    monkeypatch.setattr("ddp_lab.data.labels.PART", 2)  # the labels are looked at in parts
    assert labels.measure(torch.tensor([[4, 255], [1, 0], [6, 2]], dtype=torch.uint8)) == (0, 6)
    assert LabelRange(-100).measure(torch.tensor([-100, -3, 2])) == (-3, 2)
    assert (
        labels.measure(torch.rand(3)) == labels.measure(torch.zeros(0, dtype=torch.int64)) == (0, 0)
    )
    labels.require(torch.zeros(3, dtype=torch.int64, device="meta"), classes=2)
    labels.add(0, 2)
    with pytest.raises(SampleError, match="the label 2"):
        labels.require(torch.zeros(3, dtype=torch.int64, device="meta"), classes=2)


def tensors(label: int = 0, dtype: str = "int64") -> TensorDataset:
    """Return images in memory, as `data.dataset._target_` names a function of the user's."""
    targets = torch.zeros(SIZE, dtype=getattr(torch, dtype))
    targets[SIZE - 1] = label
    return TensorDataset(torch.zeros(SIZE, 1, 8, 8), targets)


class Labelled:
    def __init__(self, how: str):
        self.how = how

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        image = torch.zeros(1, 8, 8)
        if self.how == "int32":
            return image, np.int32(0)
        return (image, 0, 0) if self.how == "triple" else (image, 0)


class Masks(Labelled):
    """Images with masks, of which one has a pixel of a class that does not exist."""

    def __getitem__(self, index):
        mask = torch.zeros(8, 8, dtype=torch.int64)
        mask[0, 0] = 9 * (index == SIZE - 1)
        return torch.zeros(1, 8, 8), mask


class Lengths(Labelled):
    """Numbers, of which one sample has more."""

    def __getitem__(self, index):
        return torch.zeros(6 if index == SIZE - 1 else 4), 0


class Few(nn.Linear):
    def __init__(self):
        super().__init__(4, CLASSES)


class Pixels(nn.Conv2d):
    def __init__(self):
        super().__init__(1, CLASSES, 1)


class Returns(nn.Module):
    """A model of images that returns a dict."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, CLASSES)

    def forward(self, images):
        return {"out": self.layer(images.flatten(1))}


DATA = [
    "data=own",
    "data.num_classes=3",
    "data.image_size=8",
    "data.num_workers=0",
    "data.mean=[0]",
    "data.std=[1]",
]
NAME = "data.dataset._target_=test_mistakes"
LINES = {
    "label": (
        [f"{NAME}.tensors", "+data.dataset.label=7"],
        f"{NAME}.tensors: the target of sample 39 is 7; with 3 classes it",
    ),
    "int32 in memory": (
        [f"{NAME}.tensors", "+data.dataset.dtype=int32"],
        "task=classification: the targets of the train set are int32 of shape []; expected a class "
        "for each sample, int64",
    ),
    "int32": (
        [f"{NAME}.Labelled", "+data.dataset.how=int32"],
        "task=classification: the targets of the train set are int32",
    ),
    "triple": (
        [f"{NAME}.Labelled", "+data.dataset.how=triple"],
        f"{NAME}.Labelled: sample 0 must be (input, target), got tuple of 3",
    ),
    "dict": (
        [
            f"{NAME}.Labelled",
            "+data.dataset.how=good",
            "model=own",
            "model._target_=test_mistakes.Returns",
        ],
        f"model._target_=test_mistakes.Returns: it returns dict with out, {OUTPUTS}",
    ),
}


def line_of(case: str, folder: Path, *more: str) -> str:
    return " ".join(
        [*DATA, "model=simple_cnn", "epochs=1", f"runs_dir={folder}", *LINES[case][0], *more]
    )


@pytest.mark.parametrize("case", LINES)
def test_mistake_that_shows_at_the_start_is_one_line_of_the_command(case, tmp_path):
    code, printed = refusal_in_world(line_of(case, tmp_path))
    assert code == 2, printed
    assert printed.startswith(f"error: {LINES[case][1]}"), printed
    assert len(printed.splitlines()) == 1, printed
    assert not list(tmp_path.iterdir())


def refusals(folder: Path) -> list[tuple[object, str]]:
    return [refusal_in_world(line_of(case, folder, "strategy=ddp")) for case in LINES]


def test_mistake_that_shows_at_the_start_is_reported_by_rank_0(tmp_path):
    first, second = run_world(2, refusals, tmp_path)
    for (_, message), (code, printed), (other, nothing) in zip(
        LINES.values(), first, second, strict=True
    ):
        assert printed.startswith(f"error: {message}"), printed
        assert len(printed.splitlines()) == 1, printed
        assert (code, other, nothing) == (2, 2, "")


READ = {
    "label": (
        ["Masks", "task=segmentation", "model._target_=test_mistakes.Pixels"],
        "the targets contain the label 9, but the",
    ),
    "length": (
        ["Lengths", "model._target_=test_mistakes.Few"],
        "39 of the dataset are in one batch, but their inputs have the",
    ),
}


@pytest.mark.parametrize("ranks", slow_but([2], [1, 2]))
@pytest.mark.parametrize("case", READ)
def test_sample_that_is_read_while_training_is_one_message_of_the_command(
    case, ranks, tmp_path, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    strategy = ["single", "ddp"][ranks - 1]
    (dataset, *more), message = READ[case]
    options = [
        *DATA,
        f"{NAME}.{dataset}",
        "+data.dataset.how=late",
        "model=own",
        f"runs_dir={tmp_path}",
        "batch_size=8",
    ]
    more += ["data.val_fraction=0.1", f"strategy={strategy}", "epochs=9"]
    code, printed = launches.launch(f"ddp-lab train --nproc {ranks}", *options, *more)
    assert code != 0
    assert printed.count(message) == 1, printed
    assert "Traceback" not in printed
    assert "Error: " not in printed


# Outputs that are not those of all samples, and their shapes for a batch of four samples.
WRAPS = [(torch.mean, r"\[\]"), (lambda logits: logits[:1], r"\[1, 3\]")]


def outputs_refused(index: int, strategy: str, how: str, **options) -> str:
    """Return the message about outputs that are not those of all samples, without a target."""
    wrap, _ = WRAPS[index]
    data = in_memory()
    make = partial(torch.optim.SGD, lr=0.1)
    with Lab(strategy, device="cpu", timeout=20, **options) as lab:
        model = nn.Sequential(nn.Linear(4, 4), Wrapped(wrap))
        example = data[0][0] if strategy == "pipeline" else None
        try:
            trainer = lab.trainer(model, tasks.Classification(), make, BATCH, example=example)
            inputs, targets = next(trainer.batches(data, 0))
            uses = {
                "step": partial(trainer.step, inputs, targets),
                "evaluate": partial(trainer.evaluate, data),
                "predict": partial(trainer.predict, inputs),
            }
            uses[how]()
        except ConfigError as error:  # within the Lab, which then closes the process group
            return str(error)
        return ""


@pytest.mark.parametrize("how", ["step", "evaluate", "predict"])
@pytest.mark.parametrize("index", range(len(WRAPS)))
def test_outputs_that_are_not_those_of_all_samples_are_one_message_without_an_example(index, how):
    _, shape = WRAPS[index]
    message = rf"^the model: it must return a tensor \[8, ...\] for 8 samples, got {shape}\. "
    assert re.match(message, outputs_refused(index, "single", how))


def outputs_refused_on_ranks(strategy: str, options: dict) -> list[str]:
    return [
        outputs_refused(index, strategy, how, **options)
        for index in range(len(WRAPS))
        for how in ("step", "predict")
    ]


@pytest.mark.parametrize(
    ("strategy", "options"), [("ddp", {}), ("pipeline", {"num_microbatches": 2})]
)
def test_outputs_that_are_not_those_of_all_samples_are_one_message_on_ranks(strategy, options):
    for messages in run_world(2, outputs_refused_on_ranks, strategy, options, timeout=60):
        for message, (_, shape) in zip(
            messages, [WRAPS[0], WRAPS[0], WRAPS[1], WRAPS[1]], strict=True
        ):
            assert re.match(
                rf"the model: it must return a tensor \[4, ...\] for 4 samples, got {shape}\. ",
                message,
            ), message
