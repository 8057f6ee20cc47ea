"""The energy of a run on GPUs, against an integral of the power that nvidia-smi reports."""

import re
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
import torch
from launches import launch, read_metrics

PERIOD = 50  # milliseconds between two values of nvidia-smi
TIME = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) INFO (.*)$", re.MULTILINE)


def power_field() -> str:
    """Return the field of the present power; older drivers have only that of the last second."""
    query = ["nvidia-smi", "--query-gpu=power.draw.instant", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=60)
    first = done.stdout.partition("\n")[0]
    return "power.draw.instant" if re.fullmatch(r"[\d.]+", first) else "power.draw"


@contextmanager
def recorded_power(path: Path) -> Generator[None]:
    """Let nvidia-smi write time, UUID and watts of each GPU to a file."""
    fields = f"--query-gpu=timestamp,uuid,{power_field()}"
    command = ["nvidia-smi", fields, "--format=csv,noheader,nounits", f"-lms={PERIOD}"]
    with path.open("w") as file, subprocess.Popen(command, stdout=file) as process:
        try:
            yield
        finally:
            process.terminate()


def joules_of(path: Path, gpus: int, begin: float, end: float) -> float:
    """Return the integral of the power of the first GPUs between two times."""
    uuids = [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(gpus)]
    points: dict[str, list[tuple[float, float]]] = {uuid: [] for uuid in uuids}
    for line in path.read_text().splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 3 and cells[1] in points:
            moment = datetime.strptime(cells[0], "%Y/%m/%d %H:%M:%S.%f").timestamp()
            points[cells[1]].append((moment, float(cells[2])))
    joules = 0.0
    for values in points.values():
        times, watts = np.array(values).T
        assert times[0] <= begin
        assert end <= times[-1] + 1
        inside = times[(times > begin) & (times < end)]
        grid = np.array([begin, *inside, end])
        joules += float(np.trapezoid(np.interp(grid, times, watts), grid))
    return joules


def time_of(log: str, begins: str) -> float:
    """Return when the last line of a log was written that begins with a text."""
    moments = [moment for moment, text in TIME.findall(log) if text.startswith(begins)]
    return datetime.strptime(moments[-1], "%Y-%m-%d %H:%M:%S,%f").timestamp()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "strategy", "gpus"),
    [
        pytest.param("python train.py device=cuda:0", "single", 1, marks=pytest.mark.gpu(1)),
        pytest.param(
            "torchrun --standalone --nproc_per_node=2 train.py", "ddp", 2, marks=pytest.mark.gpu(2)
        ),
        pytest.param(
            "python train.py strategy.devices=[cuda:0,cuda:1]",
            "split",
            2,
            marks=pytest.mark.gpu(2),
        ),
    ],
)
def test_energy_is_within_three_percent_of_the_integral_of_the_power(
    line, strategy, gpus, tmp_path
):
    """Half a minute of training: a tenth of a second at either end changes 0.3 %."""
    overrides = ["data=synthetic", "data.dataset.train_size=20000", "data.dataset.test_size=500"]
    overrides += ["model=resnet18", "batch_size=500", "max_minutes=0.5", "compile=false"]
    overrides += [f"strategy={strategy}", f"runs_dir={tmp_path}", "name=run", "tracker=none"]
    with recorded_power(tmp_path / "power.csv"):
        code, output = launch(line, *overrides, gpus=True)
    assert code == 0, output
    rows = read_metrics(tmp_path / "run")
    log = (tmp_path / "run" / "train.log").read_text()
    # the counters are opened after the line of the strategy, and read before that of an epoch
    begin = time_of(log, "split: " if strategy == "split" else f"{strategy} on {gpus} x ")
    end = time_of(log, f"epoch {rows[-1]['epoch']}: ")
    expected = joules_of(tmp_path / "power.csv", gpus, begin, end)
    assert rows[-1]["energy_kWh"] * 3.6e6 == pytest.approx(expected, rel=0.03)
    by_steps = sum(row["joules_per_sample"] * 20_000 for row in rows[:-1])
    assert 0.5 * expected < by_steps < expected, "the steps are most of the run"
    assert re.search(r"^.* result: .* kWh, [\d.]+ J/sample ", log, re.MULTILINE)
