"""profile=true: the division of a step's time, on made-up traces, and the profiles of real runs."""

import gzip
import json

import pytest
from launches import SMALL, launch, main_in_world, refusal_in_world
from PIL import Image
from worlds import run_world

from ddp_lab.observe.profiler import RECORD
from ddp_lab.observe.time_split import PARTS, diagnose, length, split_steps, straggler, summarise
from ddp_lab.observe.trace import DATA, STEP, Call, StepTrace, read, spans_of_steps, union


def test_union_merges_overlapping_spans():
    assert union([(5, 7), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 7)]
    assert length([(0, 4), (2, 6), (8, 20)], 1, 10) == 7


def test_split_steps_counts_waiting_for_the_last_rank():
    """An all-reduce ends on both ranks at 40. Rank 0 is ready at 10; rank 1 computes longer and is ready at 30."""
    early = StepTrace(0, 50, [(0, 10), (35, 38)], [Call("all_reduce", 0, 10, 40)], [(45, 48)])
    late = StepTrace(1000, 1050, [(1000, 1030)], [Call("all_reduce", 0, 1030, 1040)], [])
    rows = [row["steps"][0] for row in split_steps([{"cpu": [early]}, {"cpu": [late]}])]
    microseconds = [{part: round(1000 * value) for part, value in row.items()} for row in rows]
    assert microseconds[0] == {"compute": 13, "communication": 7, "waiting": 20, "data": 3, "idle": 7}
    assert microseconds[1] == {"compute": 30, "communication": 10, "waiting": 0, "data": 0, "idle": 10}


def test_split_steps_compares_a_message_with_the_shortest_of_its_kind():
    steps = [StepTrace(0, 100, [], [Call("gloo:recv", 0, 0, 60), Call("gloo:recv", 1, 70, 75)], [])]
    (row,) = split_steps([{"cpu": steps}])
    assert row["steps"][0] == pytest.approx({"compute": 0, "communication": 0.01, "waiting": 0.055, "data": 0, "idle": 0.035})


def test_summary_adds_up_to_the_step_even_if_ranks_wait_for_each_other_in_turn():
    """Rank 0 waits in three of ten steps, rank 1 in the others. Medians would show rank 0 no waiting at all."""
    steps = [dict.fromkeys(PARTS, 1.0) | {"waiting": 20.0 if number % 3 == 1 else 0.0} for number in range(10)]
    found = summarise({"steps": steps})
    assert found == {"step": 10.0, "compute": 1, "communication": 1, "waiting": 6.0, "data": 1, "idle": 1}


def event(name: str, cat: str, ts: float, dur: float, **args) -> dict:
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "pid": args.get("device", 7), "args": args}


def test_read_assigns_kernels_to_the_step_that_launched_them():
    """The host is ahead of the GPU: both steps are launched before the kernels of the first one have run."""
    events = [
        *(event(DATA, "user_annotation", ts, 2) for ts in (0, 10)),
        *(event(STEP, "user_annotation", ts, 8) for ts in (2, 12)),
        *(event("cudaLaunchKernel", "cuda_runtime", 3 + i, 1, correlation=i) for i in range(3)),
        *(event("cudaLaunchKernel", "cuda_runtime", 13 + i, 1, correlation=3 + i) for i in range(2)),
        event(STEP, "gpu_user_annotation", 10, 30),
        event("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", 5, 5, correlation=0, device=0),
        event("gemm", "kernel", 10, 20, correlation=1, device=0),
        event("ncclDevKernel_AllReduce_Sum_f32", "kernel", 25, 15, correlation=2, device=0),
        event("gemm", "kernel", 50, 20, correlation=3, device=0),
        event("Memcpy PtoP (Device -> Device)", "gpu_memcpy", 0, 4, correlation=4, bytes=12) | {"pid": 1},
    ]
    found = read({"traceEvents": events})
    first, second = found["cuda:0"]
    assert (first.start, first.end, first.compute) == (0, 40, [(10, 30)])
    assert first.calls == [Call("ncclDevKernel_AllReduce_Sum_f32", 0, 25, 40)]
    assert (second.start, second.end, second.compute) == (40, 70, [(50, 70)])
    (row,) = split_steps([{"cuda:0": [first]}])
    assert row["steps"][0] == pytest.approx(
        {"compute": 0.02, "communication": 0.01, "waiting": 0.0, "data": 0.007, "idle": 0.003}
    )
    (on_the_other,) = found["cuda:1"]  # a step without kernels on this device is left out
    assert [call.name for call in on_the_other.calls] == ["Memcpy PtoP (Device -> Device)"]


def test_read_assigns_time_between_epochs_to_no_step():
    """After the first step the loader was exhausted, and an evaluation followed."""
    ranges = [(DATA, 0, 2), (STEP, 2, 8), (DATA, 11, 1), (DATA, 90, 2), (STEP, 92, 8)]
    events = [event(name, "user_annotation", ts, dur) for name, ts, dur in ranges]
    first, second = read({"traceEvents": [*events, event("aten::mm", "cpu_op", 50, 10)]})["cpu"]
    assert (first.start, first.end) == (0, 10)
    assert (second.start, second.end, second.compute) == (90, 100, [])


def test_split_steps_does_not_compare_collectives_of_different_groups():
    def of_group(ranks: str, dur: float) -> dict:
        step = event(STEP, "user_annotation", 0, 10)
        launch = event("cudaLaunchKernel", "cuda_runtime", 1, 1, correlation=1)
        kernel = event("ncclDevKernel_AllReduce", "kernel", 2, dur, correlation=1, device=0, **{"Process Group Ranks": ranks})
        return read({"traceEvents": [step, launch, kernel]})

    rows = split_steps([of_group("[0, 1]", 10), of_group("[0, 1]", 10), of_group("[2, 3]", 1), of_group("[2, 3]", 4)])
    assert [round(1000 * row["steps"][0]["waiting"]) for row in rows] == [0, 0, 0, 3]


def row(rank: int, **parts: float) -> dict:
    steps = [{"compute": 0.0, "communication": 0.0, "waiting": 0.0, "data": 0.0, "idle": 0.0} | parts]
    return {"rank": rank, "device": "cpu", "steps": steps} | summarise({"steps": steps})


@pytest.mark.parametrize(
    ("rows", "bubble", "expected"),
    [
        ([row(0, compute=9, idle=1)], None, "compute is 90% of a step"),
        (
            [row(0, compute=0.04, communication=0.09)] * 2,
            None,
            "too small to scale here: 0.04 ms of compute against 0.09 ms of exposed",
        ),
        ([row(0, compute=5, waiting=5), row(1, compute=9, waiting=1)], None, "straggler: rank 1 (cpu)"),
        ([row(0, compute=7, waiting=3)] * 2, None, "waiting: 30% of a step, and not always for the same rank"),
        ([row(0, compute=6, communication=4)] * 2, None, "communication: 6.00 ms of compute against 4.00"),
        ([row(0, compute=2, idle=8)], None, "idle: for 80% of a step"),
        ([row(0, compute=5, data=5)], None, "data: devices wait for data for 50%"),
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


def test_straggler_must_be_late_in_most_steps():
    def rows(*waits: tuple[float, float]) -> list[dict]:
        rows = []
        for rank in (0, 1):
            steps = [row(rank, compute=10 - wait[rank], waiting=wait[rank])["steps"][0] for wait in waits]
            rows.append({"rank": rank, "device": "cpu", "steps": steps} | summarise({"steps": steps}))
        return rows

    assert straggler(rows((4, 0), (5, 0), (4, 0), (0, 1), (4, 0))) == 1
    assert straggler(rows((4, 0), (5, 0), (4, 0), (0, 1), (0, 1))) is None
    assert straggler(rows((0.5, 0), (0.5, 0))) is None, "half a millisecond of ten"


def test_profile_writes_summary_traces_and_picture(tmp_path):
    """Rank 1 sleeps before every step."""
    line = "torchrun --standalone --nproc_per_node=2 train.py strategy=ddp strategy._target_=crash.Straggling profile=true"
    code, output = launch(line, *SMALL, "epochs=4", f"runs_dir={tmp_path}", "name=run")
    assert code == 0, output
    folder = tmp_path / "run" / "profile"
    summary = json.loads((folder / "summary.json").read_text())
    assert [(row["rank"], row["device"], len(row["steps"])) for row in summary["rows"]] == [
        (0, "cpu", RECORD - 1),
        (1, "cpu", RECORD - 1),
    ]
    header = next(line.split() for line in output.splitlines() if "waiting" in line)
    assert header == ["rank", "device", "step", *PARTS]
    for row in summary["rows"]:
        assert row["compute"] > 0
        assert all(min(step.values()) >= 0 for step in row["steps"])
        assert all(step["communication"] + step["waiting"] > 0 for step in row["steps"]), "the all-reduce is missing"
        cells = next(line.split() for line in output.splitlines() if line.split()[:2] == [str(row["rank"]), "cpu"])
        step, *columns = map(float, cells[2 : len(header)])
        assert sum(columns) == pytest.approx(step, abs=0.005 * len(header)), "the columns do not add up to the step"
        with gzip.open(folder / f"rank{row['rank']}.json.gz") as file:
            events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
        assert [event["name"] for event in events].count(STEP) == RECORD
        spans = spans_of_steps(events)[1:]
        assert step == pytest.approx(sum(end - start for start, end in spans) / len(spans) / 1000, abs=0.006)
    assert len(summary["peak_memory_bytes"]) == 2
    assert all(line in output for line in summary["diagnosis"])
    assert any(line.startswith("straggler: rank 1 (cpu)") for line in summary["diagnosis"])
    assert Image.open(folder / "time_split.png").width > 600
    assert "profiler_st" not in output, "the profiler's own messages are shown"


def test_profile_compares_a_pipelines_bubble_with_the_formula(tmp_path):
    overrides = [*SMALL, "strategy=pipeline", "strategy.num_microbatches=4", "profile=true", "epochs=4"]
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
    run_world(1, main_in_world, *overrides)
    log = (tmp_path / "run" / "train.log").read_text()
    assert "profile=true: disabled: 10 steps are left, but the profiler needs 16" in log


def test_profile_refuses_a_run_with_too_few_steps(tmp_path):
    code, printed = run_world(1, refusal_in_world, f"profile=true epochs=3 {' '.join(SMALL)} runs_dir={tmp_path}")[0]
    assert (code, printed) == (2, "error: profile=true: needs 16 steps of training, and this run has 15; raise epochs\n")
