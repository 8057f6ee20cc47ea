"""What a trained model predicts: the classes of image files, or the text that follows a prompt."""

import csv
import glob
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TextIO

import torch
from PIL import Image
from torch import nn

from ddp_lab.config.errors import ConfigError
from ddp_lab.data.images import SUFFIXES, ImageError, ImageOptions, decode, find_files
from ddp_lab.data.loader import scale_and_offset
from ddp_lab.run.trained import TrainedRun
from ddp_lab.world.runtime import Runtime


class Prediction(NamedTuple):
    """The most probable classes of an image, with their probabilities, in descending order."""

    path: str
    classes: list[str]
    probabilities: list[float]


def find_images(names: Sequence[str]) -> list[str]:
    """Return the image files that files, folders and globs stand for, without duplicates.

    Raises:
        ConfigError: a name stands for no image.
    """
    files: list[str] = []
    for name in names:
        if Path(name).is_dir():
            paths = sorted(find_files(name, name.rstrip("/"), set()))
        else:
            paths = [name] if Path(name).is_file() else sorted(glob.glob(name, recursive=True))
        if not paths:
            raise ConfigError(
                f"{name}: no such image; expected a file, a glob, or a folder with "
                f"{', '.join(SUFFIXES)} files"
            )
        files += paths
    return list(dict.fromkeys(files))


class Predictor:
    """A trained model with the transform of its test set.

    Args:
        run: the run.
        runtime: the device and the precision.
        top: number of classes of each prediction.
    """

    def __init__(self, run: TrainedRun, runtime: Runtime, top: int):
        shape = run.data.shape
        inputs = run.inputs
        self.classes = run.data.classes
        self.model = run.model.to(runtime.device)
        self.runtime = runtime
        self.top = min(top, len(self.classes))
        self.transform = transform(inputs.images, shape["in_channels"], shape["image_size"])
        self.scale, self.offset = scale_and_offset(inputs.mean, inputs.std, runtime.device)

    def run(self, paths: list[str], batch_size: int) -> tuple[list[Prediction], list[str]]:
        """Return the predictions of all files that can be decoded, and why the others cannot."""
        predictions: list[Prediction] = []
        corrupt: list[str] = []
        with ThreadPoolExecutor() as pool:  # Pillow and torchvision release the interpreter's lock
            for first in range(0, len(paths), batch_size):
                names = paths[first : first + batch_size]
                views = dict(zip(names, pool.map(self._view, names), strict=True))
                corrupt += [str(error) for error in views.values() if isinstance(error, ImageError)]
                good = {
                    name: view for name, view in views.items() if isinstance(view, torch.Tensor)
                }
                if good:
                    predictions += self._predict(good)
        return predictions, corrupt

    def _view(self, path: str) -> torch.Tensor | ImageError:
        try:
            return self.transform(decode(path))
        except ImageError as error:
            return error

    @torch.no_grad()
    def _predict(self, views: dict[str, torch.Tensor]) -> list[Prediction]:
        images = torch.stack(list(views.values())).to(self.runtime.device)
        with self.runtime.autocast():
            logits = self.model(images * self.scale - self.offset)
        most_probable = logits.float().softmax(1).topk(self.top)
        rows = zip(
            views, most_probable.indices.tolist(), most_probable.values.tolist(), strict=True
        )
        return [
            Prediction(path, [self.classes[i] for i in numbers], values)
            for path, numbers, values in rows
        ]


def transform(
    images: ImageOptions | None, channels: int, image_size: int
) -> Callable[[Image.Image], torch.Tensor]:
    """Return the transform of images to samples of the size that the model was trained with.

    Where a dataset consists of tensors, which have that size already, the shorter side of other
    images is resized to it.
    """
    if images is None or (images.channels, images.image_size) != (channels, image_size):
        images = ImageOptions(channels, image_size, resize=image_size)
    return images.view(augment=False)


def write_table(file: TextIO, predictions: list[Prediction]) -> None:
    """Write predictions as CSV: the file, then pairs of a class and its probability."""
    writer = csv.writer(file, lineterminator="\n")
    top = len(predictions[0].classes) if predictions else 0
    writer.writerow(
        [
            "file",
            *(f"{column}_{i}" for i in range(1, top + 1) for column in ("class", "probability")),
        ]
    )
    for path, classes, probabilities in predictions:
        pairs = zip(classes, probabilities, strict=True)
        writer.writerow([path, *(text for name, p in pairs for text in (name, f"{p:.6f}"))])


@torch.no_grad()
def generate(
    model: nn.Module, prompt: bytes, tokens: int, temperature: float, runtime: Runtime, context: int
) -> bytes:
    """Return the bytes that follow a prompt, according to a model whose tokens are bytes.

    Nothing is cached: each token costs a forward pass of at most `context` tokens.

    Args:
        model: in evaluation mode.
        prompt: at least one byte.
        tokens: number of bytes to draw.
        temperature: divides the logits; 0: the most probable token.
        runtime: the device and the precision.
        context: the largest number of tokens that the model takes.
    """
    model = model.to(runtime.device)
    generator = torch.Generator().manual_seed(0)
    tokens_so_far = torch.tensor([list(prompt)], device=runtime.device)
    for _ in range(tokens):
        with runtime.autocast():
            logits = model(tokens_so_far[:, -context:])[0, -1].float().cpu()
        if temperature == 0:
            token = logits.argmax()[None]
        else:
            token = torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)
        tokens_so_far = torch.cat([tokens_so_far, token[None].to(tokens_so_far.device)], 1)
    return bytes(tokens_so_far[0, len(prompt) :].tolist())
