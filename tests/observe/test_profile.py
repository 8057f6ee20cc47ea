"""profile=true: the division of a step's time, on made-up traces, and the profiles of real runs."""

import gzip
import json

import pytest
from launches import SMALL, launch, main_in_world
from worlds import run_world

from ddp_lab.observe.time_split import DATA, PARTS, STEP, compare, diagnose, read
from ddp_lab.training.profiler import RECORD


def step(**parts: float) -> dict[str, float]:
    """Return a step of a device as `read` does."""
    return {"compute": 0.0, "communication": 0.0, "data": 0.0, "idle": 0.0} | parts


def test_means_of_a_row_add_up_and_waiting_is_beyond_the_rank_that_communicates_least():
    """Rank 0 waits in three of ten steps, rank 1 in the others.

    Medians would show rank 0 no waiting at all.
    """
    slow = step(compute=6, communication=21, data=1, idle=2)
    fast = step(compute=26, communication=1, data=1, idle=2)
    ranks = [[slow, fast, fast] * 3 + [fast], [fast, slow, slow] * 3 + [slow]]
    first, second = compare([{"cpu": steps} for steps in ranks], pipeline=False)
    expected = {"step": 30, "compute": 20, "communication": 1, "waiting": 6, "data": 1, "idle": 2}
    assert first == pytest.approx({"rank": 0, "device": "cpu", **expected})
    assert second["waiting"] == pytest.approx(14)
    (row,) = compare([{"cpu": [slow]}], pipeline=True)
    assert (row["communication"], row["waiting"]) == (0, 21), (
        "the stages of a pipeline wait for each other"
    )


def event(name: str, cat: str, ts: float, dur: float, **args) -> dict:
    return {
        "ph": "X",
        "name": name,
        "cat": cat,
        "ts": ts,
        "dur": dur,
        "pid": args.get("device", 7),
        "args": args,
    }


def test_read_assigns_kernels_to_the_step_that_launched_them():
    """The host is ahead of the GPU: it launches both steps before the first one's kernels run."""
    events = [
        *(event(DATA, "user_annotation", ts, 2) for ts in (0, 10)),
        *(event(STEP, "user_annotation", ts, 8) for ts in (2, 12)),
        *(event("cudaLaunchKernel", "cuda_runtime", 3 + i, 1, correlation=i) for i in range(3)),
        *(
            event("cudaLaunchKernel", "cuda_runtime", 13 + i, 1, correlation=3 + i)
            for i in range(2)
        ),
        event(STEP, "gpu_user_annotation", 10, 30),
        event("aten::mm", "cpu_op", 3, 1),
        event("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", 5, 5, correlation=0, device=0),
        event("gemm", "kernel", 10, 20, correlation=1, device=0),
        event("ncclDevKernel_AllReduce_Sum_f32", "kernel", 25, 12, correlation=2, device=0),
        event(
            "c10d::symmetric_memory::barrier_kernel(unsigned int**)",
            "kernel",
            37,
            3,
            correlation=2,
            device=0,
        ),
        event("gemm", "kernel", 50, 20, correlation=3, device=0),
        event("Memcpy PtoP (Device -> Device)", "gpu_memcpy", 20, 4, correlation=4, bytes=12)
        | {"pid": 1},
    ]
    by_device = read({"traceEvents": events})
    assert list(by_device) == ["cuda:0", "cuda:1"]
    first, second = by_device["cuda:0"]
    assert first == pytest.approx(step(compute=0.02, communication=0.01, data=0.007, idle=0.003)), (
        "from 0 to 40"
    )
    assert second == pytest.approx(step(compute=0.02, idle=0.01)), "from 40 to 70"
    assert by_device["cuda:1"][1] == pytest.approx(
        step(communication=0.004, data=0.002, idle=0.008)
    ), "from 10 to 24"


def test_read_assigns_time_between_epochs_to_no_step():
    """After the first step the loader was exhausted, and an evaluation followed."""
    ranges = [(DATA, 0, 2), (STEP, 2, 8), (DATA, 11, 1), (DATA, 90, 2), (STEP, 92, 8)]
    events = [event(name, "user_annotation", ts, dur) for name, ts, dur in ranges]
    first, second = read({"traceEvents": [*events, event("aten::mm", "cpu_op", 50, 10)]})["cpu"]
    assert first == second == pytest.approx(step(data=0.002, idle=0.008))


def row(rank: int, **parts: float) -> dict:
    parts = dict.fromkeys(PARTS, 0.0) | parts
    return {"rank": rank, "device": "cpu", "step": sum(parts.values())} | parts


@pytest.mark.parametrize(
    ("rows", "bubble", "expected"),
    [
        ([row(0, compute=9, idle=1)], None, "compute is 90% of a step"),
        (
            [row(0, compute=0.04, communication=0.09)] * 2,
            None,
            "too small to scale here: 0.04 ms of compute against 0.09 ms of exposed",
        ),
        (
            [row(0, compute=5, waiting=5), row(1, compute=9, waiting=1)],
            None,
            "straggler: rank 1 (cpu)",
        ),
        (
            [row(0, compute=7, waiting=3)] * 2,
            None,
            "waiting: 30% of a step, and not always for the same rank",
        ),
        (
            [row(0, compute=6, communication=4)] * 2,
            None,
            "communication: 6.00 ms of compute against 4.00",
        ),
        ([row(0, compute=2, idle=8)], None, "idle: for 80% of a step"),
        ([row(0, compute=5, data=5)], None, "data: for 50% of a step"),
        (
            [row(0, compute=8, waiting=2), row(1, compute=5, waiting=5)],
            0.11,
            "bubble: the busiest rank, 0, does not compute for 20%",
        ),
    ],
)
def test_diagnose_names_what_stands_out(rows, bubble, expected):
    (line,) = diagnose(rows, graph=False, bubble=bubble)
    assert expected in line


@pytest.mark.covers("profile")
def test_profile_writes_summary_and_traces(tmp_path):
    """Rank 1 sleeps before every step."""
    line = (
        "torchrun --standalone --nproc_per_node=2 train.py strategy=ddp "
        "strategy._target_=crash.Straggling profile=true"
    )
    code, output = launch(line, *SMALL, "epochs=4", f"runs_dir={tmp_path}", "name=run")
    assert code == 0, output
    folder = tmp_path / "run" / "profile"
    summary = json.loads((folder / "summary.json").read_text())
    header = next(line.split() for line in output.splitlines() if "waiting" in line)
    assert header == ["rank", "device", "step", *PARTS]
    assert [(row["rank"], row["device"]) for row in summary["rows"]] == [(0, "cpu"), (1, "cpu")]
    for row in summary["rows"]:
        assert min(row[part] for part in PARTS) >= 0
        assert row["step"] > 100, "rank 1 sleeps for 100 ms"
        assert min(row["compute"], row["communication"]) > 0
        cells = next(
            line.split()
            for line in output.splitlines()
            if line.split()[:2] == [str(row["rank"]), "cpu"]
        )
        assert list(map(float, cells[2:8])) == pytest.approx(
            [row[name] for name in header[2:]], abs=0.006
        )
        with gzip.open(folder / f"rank{row['rank']}.json.gz") as file:
            events = [
                event
                for event in json.load(file)["traceEvents"]
                if event.get("cat") == "user_annotation"
            ]
        assert [event["name"] for event in events].count(STEP) == RECORD
    assert len(summary["peak_memory_bytes"]) == 2
    assert all(line in output for line in summary["diagnosis"])
    assert any(line.startswith("straggler: rank 1 (cpu)") for line in summary["diagnosis"])
    assert "profiler_st" not in output, "the profiler's own messages are shown"


@pytest.mark.slow
def test_profile_compares_a_pipelines_bubble_with_the_formula(tmp_path):
    overrides = [
        *SMALL,
        "strategy=pipeline",
        "strategy.num_microbatches=4",
        "profile=true",
        "epochs=4",
    ]
    run_world(2, main_in_world, *overrides, f"runs_dir={tmp_path}", "name=run")
    first, *_ = json.loads((tmp_path / "run" / "profile" / "summary.json").read_text())["diagnosis"]
    assert first.startswith("bubble: the busiest rank, ")
    assert first.endswith("formula 20%")
    assert first in (tmp_path / "run" / "train.log").read_text()


def test_profile_reports_a_run_that_ends_too_early(tmp_path):
    overrides = [*SMALL, "epochs=4", f"runs_dir={tmp_path}", "name=run", "profile=true"]
    _, output = launch("python train.py", *overrides, "inject=sigterm@rank=0,step=10")
    assert "profile=true: this launch ended before its 16th step; there is no profile" in output
    assert "record_function" not in output
