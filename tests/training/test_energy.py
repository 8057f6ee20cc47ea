"""The energy of a run, from counters of GPUs that a small library in place of NVML has."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from shutil import which

import own_load
import pytest
from launches import SMALL, SUPPORT, main_in_world, read_metrics
from worlds import run_world

from ddp_lab.run import train
from ddp_lab.training import energy
from ddp_lab.training.energy import choose_readers
from ddp_lab.world import nvml
from ddp_lab.world.nvml import open_counters

STEPS = 5  # of an epoch of SMALL
SAMPLES = 100
BEFORE = 7_000_000  # millijoules of each GPU before the run
STEP = own_load.STEP / 1000  # joules


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> str:
    """Return the path of the library in place of NVML."""
    compiler = which("cc") or pytest.skip("there is no compiler of C")
    path = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    command = [compiler, "-shared", "-fPIC", "-o", path, SUPPORT / "fake_nvml.c"]
    subprocess.run(command, check=True, timeout=60)
    return str(path)


@pytest.fixture
def gpus(tmp_path, monkeypatch) -> Path:
    """Return the folder of two GPUs."""
    folder = tmp_path / "gpus"
    folder.mkdir()
    for number in range(2):
        (folder / f"gpu{number}").write_text(str(BEFORE))
    monkeypatch.setenv("FAKE_GPUS", str(folder))
    return folder


def joules_in(folder: Path) -> float:
    """Return what the GPUs in a folder have used since `gpus` made them."""
    counts = [int(path.read_text()) for path in folder.iterdir()]
    return sum(count - BEFORE for count in counts) / 1000


def train_on(library: str, gpus: Path, shared: bool, overrides: Sequence[str]) -> None:
    """Run train.py on this rank, with GPUs in a folder in place of its CPUs.

    Args:
        library: in place of NVML.
        gpus: the folder.
        shared: whether all ranks use the first GPU. If not, the devices of this rank are the GPUs
            from that with its number on.
        overrides: of train.py.
    """

    def uuids_of(devices: Sequence[object]) -> list[str]:
        first = 0 if shared else int(os.environ["RANK"])
        return [f"GPU-{gpus}/gpu{first + index}" for index, _ in enumerate(devices)]

    nvml.LIBRARY = library
    energy.uuids_of = uuids_of
    # as if the ranks were on GPUs
    train.open_energy = lambda job, progress: energy.open_meter(
        job.runtime, job.strategy.devices, progress.joules
    )
    main_in_world(*overrides)


def run(
    folder: Path, library: str, gpus: Path, *more: str, ranks: int = 2, shared: bool = False
) -> list[dict]:
    """Train on GPUs in place of CPUs; return the rows of the epochs."""
    overrides = [*SMALL, f"runs_dir={folder}", "name=run", "tracker=none", *more]
    overrides.append("callbacks=[own_load.Load]")
    run_world(ranks, train_on, library, gpus, shared, overrides)
    return read_metrics(folder / "run")


def test_energy_of_all_ranks_is_recorded_and_a_resumed_run_adds_up(tmp_path, library, gpus):
    """An epoch has its five steps on each rank; its evaluations count for the run alone."""
    first = ["strategy=ddp", "epochs=2", "evaluate_every=3"]
    rows = run(tmp_path, library, gpus, *first, "max_steps=7")
    by_sample = [row["joules_per_sample"] for row in rows]
    # of all five steps, and of the first two
    assert by_sample == pytest.approx([2 * STEPS * STEP / SAMPLES, 2 * 2 * STEP / 48])
    used = joules_in(gpus)
    assert used > 14 * STEP, "the evaluations have used some"
    assert rows[-1]["energy_kWh"] == pytest.approx(used / 3.6e6)
    assert 0 < rows[0]["energy_kWh"] < rows[1]["energy_kWh"]

    for gpu in gpus.iterdir():
        own_load.add(gpu, 50_000)  # other programs, between the launches
    rows = run(tmp_path, library, gpus, *first)
    assert len(rows) == 2
    of_this_launch = pytest.approx(2 * 3 * STEP / 52)
    assert rows[1]["joules_per_sample"] == of_this_launch
    assert rows[1]["energy_kWh"] == pytest.approx((joules_in(gpus) - 100) / 3.6e6)
    result = (tmp_path / "run" / "train.log").read_text().splitlines()[-1]
    median = (rows[0]["joules_per_sample"] + rows[1]["joules_per_sample"]) / 2
    total = rows[1]["energy_kWh"]
    assert f" on 2 x cpu, {total:.4g} kWh, {median:.4g} J/sample (" in result


def test_gpu_of_several_ranks_counts_once(tmp_path, library, gpus):
    (gpus / "gpu1").unlink()  # so that only rank 0 adds to the first one
    (row,) = run(tmp_path, library, gpus, "strategy=ddp", "epochs=1", shared=True)
    assert row["energy_kWh"] == pytest.approx(joules_in(gpus) / 3.6e6)
    assert row["joules_per_sample"] == pytest.approx(STEPS * STEP / SAMPLES)


def test_gpus_of_one_process_are_summed(tmp_path, library, gpus):
    split = ["strategy=split", "strategy.devices=[cpu,cpu]"]
    own_load.add(gpus / "gpu1", 1)
    (row,) = run(tmp_path, library, gpus, *split, "epochs=1", ranks=1)
    assert row["joules_per_sample"] == pytest.approx(STEPS * STEP / SAMPLES)
    assert row["energy_kWh"] == pytest.approx((joules_in(gpus) - 0.001) / 3.6e6)


def test_run_with_a_gpu_without_counter_records_no_energy(tmp_path, library, gpus):
    """The energy of the others would be taken for that of all."""
    (gpus / "gpu1").unlink()
    (row,) = run(tmp_path, library, gpus, "strategy=ddp", "epochs=1")
    assert not [key for key in row if "joules" in key or "energy" in key]
    assert " kWh" not in (tmp_path / "run" / "train.log").read_text()


def train_on_cpu(folder: Path) -> None:
    """Run train.py on this rank, which must not look for a counter."""
    energy.open_meter = lambda *_: pytest.fail("a counter is looked for")
    main_in_world(*SMALL, "strategy=single", "epochs=1", f"runs_dir={folder}", "name=run")


def test_run_on_cpus_reads_no_counter_and_records_no_energy(tmp_path):
    run_world(1, train_on_cpu, tmp_path)
    (row,) = read_metrics(tmp_path / "run")
    assert not [key for key in row if "joules" in key or "energy" in key]


def test_each_gpu_is_read_by_its_first_rank_and_none_if_one_has_no_counter():
    assert choose_readers([(True, ["a", "b"]), (True, ["b", "c"])]) == [
        ("a", 0),
        ("b", 0),
        ("c", 1),
    ]
    assert choose_readers([(True, ["a"]), (False, ["b"])]) == []
    assert choose_readers([(True, [])]) == []


def test_counters_are_those_of_gpus_that_have_one(library, gpus, monkeypatch):
    uuids = [f"GPU-{gpus}/gpu0", f"GPU-{gpus}/old", "MIG-1"]
    monkeypatch.setattr(nvml, "LIBRARY", library)
    (counter,) = open_counters(uuids)
    assert (counter.uuid, counter.joules()) == (uuids[0], BEFORE / 1000)
    own_load.add(gpus / "gpu0", 1500)
    assert counter.joules() == BEFORE / 1000 + 1.5
    (gpus / "gpu0").unlink()
    assert counter.joules() == BEFORE / 1000 + 1.5, "the driver does not answer any more"
    monkeypatch.setenv("FAKE_NVML_BROKEN", "1")
    assert open_counters(uuids) == []
    monkeypatch.setattr(nvml, "LIBRARY", "libnvidia-ml.so.none")
    assert open_counters(uuids) == []
