"""A trained model as a file for other programs: weights, or a computation for any batch size."""

import json
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path

import torch

from ddp_lab.config.errors import ConfigError, count
from ddp_lab.models.weights import write_weights
from ddp_lab.run.data_record import DataRecord, input_shape_of
from ddp_lab.run.trained import TrainedRun

INPUT = "images"
OUTPUT = "logits"
BATCH = ({0: torch.export.Dim("batch")},)  # dimension 0 of the input may have any size
Writer = Callable[[TrainedRun, Path], None]


def find_writer(path: Path) -> Writer:
    """Return the function that writes files with the suffix of `path`.

    Raises:
        ConfigError: the suffix is unknown, or packages are missing.
    """
    if path.suffix not in WRITERS:
        raise ConfigError(
            f"--output {path}: the name must end in {', '.join(WRITERS)}, which is the format"
        )
    needed = ("onnx", "onnxscript") if path.suffix == ".onnx" else ()
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"--output {path}: needs the package {missing[0]}: pip install 'ddp_lab[export]'"
        )
    return WRITERS[path.suffix]


def describe_input(run: TrainedRun) -> str:
    """Return a line that tells how images, or other inputs, become the model's input."""
    if not input_shape_of(run.data.shape):
        return "inputs of several tensors, by name or by place"
    shape = f"input {['batch', *example(run.data).shape[1:]]}".replace("'", "")
    if "image_size" not in run.data.shape:
        return shape
    classes = f"; {count(len(run.data.classes), 'class')}" if run.data.classes else ""
    mean = run.inputs.mean
    std = run.inputs.std
    return f"{shape}, (pixels / 255 - {mean}) / {std}{classes}"


def write_safetensors(run: TrainedRun, path: Path) -> None:
    """Write parameters and buffers by name; the metadata have classes and normalisation as JSON."""
    write_weights(path, run.model.state_dict(), metadata(run))


def metadata(run: TrainedRun) -> dict[str, str]:
    """Return what a file says about its model, as JSON: classes, and mean and std of the pixels."""
    values = {"classes": run.data.classes, "mean": run.inputs.mean, "std": run.inputs.std}
    return {key: json.dumps(value) for key, value in values.items()}


def write_onnx(run: TrainedRun, path: Path) -> None:
    """Write the model as ONNX, in one file; the metadata are those of `write_safetensors`."""
    require_fixed_inputs(run, path)
    with exporting(path):
        program = torch.onnx.export(
            run.model,
            (example(run.data),),
            dynamo=True,
            external_data=False,
            verbose=False,
            input_names=[INPUT],
            output_names=[OUTPUT],
            dynamic_shapes=BATCH,
        )
        assert program is not None  # with dynamo=True
        program.model.metadata_props.update(metadata(run))
        program.save(path, external_data=False)


def write_pt2(run: TrainedRun, path: Path) -> None:
    """Write the model as a program of torch.export."""
    require_fixed_inputs(run, path)
    with exporting(path):
        program = torch.export.export(run.model, (example(run.data),), dynamic_shapes=BATCH)
        # Given a path, torch (2.15) ends the process if the disk is full.
        content = BytesIO()
        torch.export.save(program, content)
        path.write_bytes(content.getbuffer())


@contextmanager
def exporting(path: Path) -> Generator[None]:
    """Report what torch cannot export as a ConfigError, without warnings about torch's own code."""
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    except OSError:
        raise
    except Exception as error:  # torch.export raises many kinds of errors
        reason = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"--output: torch cannot export this model as {path.suffix} ({type(error).__name__}: "
            f"{reason}). Its forward must not depend on the values or the number of its inputs; "
            ".safetensors works for any model"
        ) from None


def require_fixed_inputs(run: TrainedRun, path: Path) -> None:
    """Check that the model has one input, of a shape that is known.

    Raises:
        ConfigError: its inputs are a tuple or dict, or batches of data.collate_fn.
    """
    if not input_shape_of(run.data.shape):
        raise ConfigError(
            f"--output {path}: {path.suffix} needs a model of one input, but the inputs of this "
            "run are several tensors. Use .safetensors, which has the weights of any model"
        )
    if not run.inputs.is_fixed:
        raise ConfigError(
            f"--output {path}: {path.suffix} needs inputs of one shape, but data.collate_fn made "
            "batches of any shape in this run. Use .safetensors, which has the weights of any model"
        )


def example(data: DataRecord) -> torch.Tensor:
    """Return two inputs in the shape that the model expects.

    From one, torch.export would conclude that there is always one.
    """
    return torch.zeros(
        2, *input_shape_of(data.shape), dtype=torch.int64 if "vocabulary" in data.shape else None
    )


WRITERS: dict[str, Writer] = {
    ".safetensors": write_safetensors,
    ".onnx": write_onnx,
    ".pt2": write_pt2,
}
