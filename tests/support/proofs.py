"""Many programs by `verify`, in one world for each number of ranks, and their reports.

`verify` itself would start a process and three worlds for each program.
"""

import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ddp_lab.proof.alone import Alone, rows_needed
from ddp_lab.proof.batches import select, size_of
from ddp_lab.proof.evidence import Evidence
from ddp_lab.proof.foreign import explain, judge
from ddp_lab.proof.foreign_server import Server
from ddp_lab.proof.names import with_names_of
from ddp_lab.proof.report import Row

TIMEOUT = 100
Programs = Mapping[str, Path]


def run_all(rank: int, world_size: int, work: Mapping[str, tuple[Path, Any]]) -> dict[str, Tensor]:
    """Run the step of each program; a result is named PROGRAM|TENSOR."""
    tensors = {}
    for name, (path, batch) in work.items():
        step = runpy.run_path(str(path))["step"]
        for each, tensor in step(rank, world_size, batch).items():
            tensors[f"{name}|{each}"] = tensor
    return tensors


def of_program(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    prefix = f"{name}|"
    return {
        each.removeprefix(prefix): tensor
        for each, tensor in tensors.items()
        if each.startswith(prefix)
    }


def reports(programs: Programs, sizes: tuple[int, ...] = (2, 4)) -> dict[str, dict[int, Row]]:
    """Return for each program the rows of each number of ranks, as `verify` makes them."""
    batches = {name: runpy.run_path(str(path))["make_batch"]() for name, path in programs.items()}
    work = {name: (path, batches[name]) for name, path in programs.items()}
    with Server(run_all) as server:
        (together,) = server.results(1, work, TIMEOUT)
        by_size = {size: server.results(size, work, TIMEOUT) for size in sizes}
        rows = {}
        results = {}
        for name in programs:
            expected = of_program(name, together)
            assert expected, name
            results[name] = {
                size: [with_names_of(expected, of_program(name, one)) for one in ranks]
                for size, ranks in by_size.items()
            }
            rows[name] = {
                size: judge(expected, ranks, None, Evidence(ranks=ranks))
                for size, ranks in results[name].items()
            }
        wrong = {
            name: [size for size in sizes if rows[name][size].outcome == "different"]
            for name in programs
        }
        alone = run_alone(server, work, wrong)
    for name, different in wrong.items():
        expected = of_program(name, together)
        if different:
            rows[name] |= explain(expected, results[name], different, None, alone[name])
    return rows


def run_alone(
    server: Server, work: Mapping[str, tuple[Path, Any]], wrong: Mapping[str, list[int]]
) -> dict[str, Alone]:
    """Return what one rank computes for parts of the batches of the programs that differ."""
    jobs = [
        (name, rows)
        for name, different in wrong.items()
        for rows in (rows_needed(size_of(work[name][1]), different) if different else [])
    ]
    if not jobs:
        return {}
    parts = [{name: (work[name][0], select(work[name][1], rows))} for name, rows in jobs]
    answers = server.answers(1, parts, TIMEOUT)
    alone = {name: {} for name in wrong}
    for (name, rows), (answer,) in zip(jobs, answers, strict=True):
        if answer.tensors is not None:
            alone[name][rows] = of_program(name, answer.tensors)
    return {name: Alone(size_of(work[name][1]), results) for name, results in alone.items()}
