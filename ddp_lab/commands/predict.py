"""Predict with a trained run, in one process: classes of image files, or text after a prompt.

ddp-lab predict runs/mine cat.jpg photos 'more/*.png' --output predictions.csv
ddp-lab predict runs/mine photos --top 1 --device cpu --checkpoint best
ddp-lab predict runs/gpt --prompt "To be" --tokens 200 --temperature 0.8

Folders are searched with their subfolders. A row has the file, then the most probable class and its
probability, then the second one, and so on. Without --output the rows are printed. The weights are
the best ones if a validation set chose them, else those of the newest checkpoint. Images are
transformed as those of the run's test set. Images that cannot be decoded are left out and named,
and the exit code is 2.
"""

import argparse
import sys
from typing import TYPE_CHECKING

from ddp_lab.config.errors import ConfigError, count
from ddp_lab.launchers.arguments import Parser, check_output, refuse_ranks, replacing

if TYPE_CHECKING:
    from ddp_lab.run.trained import TrainedRun
    from ddp_lab.tasks.base import Task
    from ddp_lab.world.runtime import Runtime


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("ddp-lab predict", __doc__)
    parser.add_run()
    parser.add_argument("images", nargs="*", default=[], help="files, folders or quoted globs")
    parser.add_output("CSV file to write; without it, the rows are printed", required=False)
    parser.add_argument(
        "--top", type=int, metavar="N", help="number of classes in a row (default: 5)"
    )
    parser.add_argument(
        "--batch-size", type=int, metavar="N", help="images at a time (default: 64)"
    )
    parser.add_argument(
        "--prompt", metavar="TEXT", help="the beginning of a text, for a run with task=tokens"
    )
    parser.add_argument(
        "--tokens", type=int, metavar="N", help="bytes to draw after the prompt (default: 100)"
    )
    parser.add_argument(
        "--temperature", type=float, metavar="T", help="0: the most probable byte (default: 1)"
    )
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda or cuda:N")

    namespace = parser.parse_intermixed_args(arguments)
    if bool(namespace.images) == bool(namespace.prompt):
        raise ConfigError(
            "ddp-lab predict: needs images, or --prompt TEXT for a run with task=tokens; see "
            "ddp-lab predict --help"
        )

    of_images = {"output": None, "top": 5, "batch_size": 64}
    of_text = {"tokens": 100, "temperature": 1.0}
    for option in of_images if namespace.prompt else of_text:
        if (value := getattr(namespace, option)) is not None:
            text = f"--{option.replace('_', '-')} {value}"
            other = "for images" if namespace.prompt else "for a text, with --prompt"
            printed = "; the text is printed" if option == "output" else ""
            raise ConfigError(f"{text}: is {other}; leave it out{printed}")

    for option, default in {**of_images, **of_text}.items():
        if getattr(namespace, option) is None:
            setattr(namespace, option, default)
    for option in ("top", "batch_size", "tokens"):
        if getattr(namespace, option) < 1:
            text = f"--{option.replace('_', '-')} {getattr(namespace, option)}"
            raise ConfigError(f"{text}: must be an integer of at least 1")

    if namespace.temperature < 0:
        raise ConfigError(f"--temperature {namespace.temperature:g}: must be at least 0")
    return namespace


def main(arguments: list[str]) -> None:
    namespace = parse(arguments)
    refuse_ranks("ddp-lab predict")
    if namespace.output:
        check_output(namespace.output, namespace.force)
    from ddp_lab.run.build_trained import open_run
    from ddp_lab.world.runtime import Runtime

    run = open_run(namespace.run, namespace.checkpoint)
    runtime = Runtime(namespace.device, run.precision)
    if namespace.prompt:
        require_bytes(namespace, run)
        print_text(namespace, run, runtime)
    else:
        require_images(namespace, run)
        write_classes(namespace, run, runtime)


def require_bytes(namespace: argparse.Namespace, run: "TrainedRun") -> None:
    """Check that a run continues a prompt of bytes.

    Raises:
        ConfigError: it has another task, or tokens that are no bytes.
    """
    from ddp_lab.data.datasets import BYTES
    from ddp_lab.tasks.tokens import Tokens

    require_task(namespace, run, Tokens)
    vocabulary = run.data.shape.get("vocabulary", BYTES)
    if vocabulary != BYTES:
        raise ConfigError(
            f"{namespace.run}: its vocabulary has {vocabulary:,} tokens, but the prompt "
            f"of predict is bytes, of which there are {BYTES}. Write the weights with ddp-lab "
            "export, and generate with the tokenizer of its data"
        )


def require_images(namespace: argparse.Namespace, run: "TrainedRun") -> None:
    """Check that a run classifies images.

    Raises:
        ConfigError: it has another task, or other inputs.
    """
    from ddp_lab.tasks.classification import Classification

    require_task(namespace, run, Classification)
    if "image_size" not in run.data.shape:
        raise ConfigError(
            f"{namespace.run}: its inputs are no images, so predict cannot read them from files; "
            "use ddp-lab evaluate, or the weights that ddp-lab export writes"
        )


def require_task(namespace: argparse.Namespace, run: "TrainedRun", expected: "type[Task]") -> None:
    """Check that the task of a run is the expected one.

    Raises:
        ConfigError: it is another one; the message says what predict needs for it.
    """
    from ddp_lab.tasks.classification import Classification
    from ddp_lab.tasks.tokens import Tokens

    kind = run.task
    if issubclass(kind, expected):
        return
    if issubclass(kind, Tokens):
        needs = "needs --prompt TEXT"
    elif issubclass(kind, Classification):
        needs = "needs images"
    else:
        needs = "is not made"
    raise ConfigError(
        f"{namespace.run}: its task is {kind.__name__}, for which predict {needs}; see ddp-lab "
        "predict --help"
    )


def print_text(namespace: argparse.Namespace, run: "TrainedRun", runtime: "Runtime") -> None:
    """Print the prompt and the text that the model draws after it."""
    from ddp_lab.run.predict import generate

    print(f"weights: {run.checkpoint}", file=sys.stderr)
    text = generate(
        run.model,
        namespace.prompt.encode(),
        namespace.tokens,
        namespace.temperature,
        runtime,
        run.data.shape["context"],
    )
    print(namespace.prompt + text.decode(errors="replace"))


def write_classes(namespace: argparse.Namespace, run: "TrainedRun", runtime: "Runtime") -> None:
    """Write the most probable classes of the images to the output file, or print them.

    Raises:
        ConfigError: images cannot be found, or some of them cannot be decoded.
    """
    from ddp_lab.run.predict import Predictor, find_images, write_table
    from ddp_lab.world.device import float32_matmul

    images = find_images(namespace.images)
    print(f"weights: {run.checkpoint}", file=sys.stderr)
    predictor = Predictor(run, runtime, namespace.top)
    with float32_matmul(run.float32_matmul):
        rows, corrupt = predictor.run(images, namespace.batch_size)
    if rows and namespace.output:
        with replacing(namespace.output) as temporary, temporary.open("w", newline="") as file:
            write_table(file, rows)
    elif rows:
        write_table(sys.stdout, rows)

    if corrupt:
        raise ConfigError(
            f"{len(corrupt)} of {count(len(images), 'image')} left out: {'; '.join(corrupt)}"
        )
