"""Lab: which operations run at the same time without parallel code, and which only on request.

python scripts/lab_overlap.py [--size 4096] [--matmuls 10] [--repeat 10] [--out runs/lab_overlap]

Automatic parallelism, Dive into Deep Learning, section 13.3, with timelines. On a GPU a call returns when its work is queued.
Work on the same queue (a stream) runs in the order of issue. Work on different streams may overlap.

1. Matrix multiplications on two devices. Sequential: the host waits for the first device before it issues the second's work.
Concurrent: the host issues both, then waits; this should take as long as one device. Exercise: when is the work too small for a
second device? When the host takes longer to issue the work than the device takes to compute it. The ratio of sequential to
concurrent time is near 2 for large matrices and falls to 1. With one GPU, two of its streams are used instead; large
multiplications fill the GPU, so their ratio is 1.

2. Matrix multiplications, and a copy of each result to the host. Three conditions let copy i overlap with multiplication i+1.
`non_blocking=True`: otherwise the host waits for copy i before it issues multiplication i+1. Pinned memory: the copy engine
needs pages that do not move; to pageable memory the driver copies through a pinned buffer of its own and blocks the host
meanwhile. A second stream: on the compute stream, multiplication i+1 would run after copy i. On the second stream copy i must
wait for the event recorded after multiplication i, or it would copy incomplete data; the script checks all copies.

3. Exercise: do independent operations run in parallel on one device? Not on one stream. On several streams they do, if they are
too small to fill the device and are queued faster than they run. Eight chains of small multiplications run on 1 to 8 streams.
`queued` issues them while a gate runs, a long multiplication that all chains wait for. It counts from the gate's end, so it
measures the device alone. `issued` counts from the first call. It shows what remains of the gain when Python issues the
multiplications one by one.

Without a GPU torch's calls are synchronous. A thread with one core then takes the place of a device or stream, and copies are
plain copies.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from ddp_lab.observe.plot import Boxes, Curve, bars, beside, curves, timeline
from scripts.lanes import Lane, Run, Work, lane, once, repeated

CHAINS, LINKS, SMALL = 8, 32, 128  # number of independent chains, multiplications per chain, size of their matrices
GATE = 4  # number of multiplications of the default size; they must take longer than issuing all chains
SIZE = {"cuda": 4096, "cpu": 512}


def median(lanes: list[Lane], variant: Work, repeat: int) -> Run:
    """Return the run with the median time, so that the number and the timeline are of the same run."""
    return repeated(lanes, variant, repeat)[repeat // 2]


def load(where: Lane, size: int, boxes: int, each: int, label: str = "matmul") -> Callable[..., object]:
    """Return a function that issues matrix multiplications to a lane; memory is allocated here, outside the timed run.

    Args:
        where: the lane.
        size: rows and columns of the matrices.
        boxes: number of calls of `issue`, each a box of the timeline.
        each: multiplications per call.
        label: label of the boxes.

    Returns:
        A function that takes the handle after which the work may start, and returns the handle of the last call.
    """
    matrix = torch.randn(size, size, device=where.device)
    result = torch.empty_like(matrix)

    def work() -> None:
        for _ in range(each):
            torch.mm(matrix, matrix, out=result)

    return lambda after=None: [where.issue(label, work, after) for _ in range(boxes)][-1]


def on_two(pair: list[Lane], size: int, boxes: int, each: int) -> dict[str, Work]:
    """Return the variants of part 1: `boxes` times `each` multiplications on each of two lanes."""
    first, second = (load(where, size, boxes, each) for where in pair)
    return {
        f"{pair[0].name} alone": first,
        f"{pair[1].name} alone": second,
        "sequential": lambda: (first(), pair[0].wait(), second()),
        "concurrent": lambda: (first(), second()),
    }


def sweep(pair: list[Lane], size: int, matmuls: int, repeat: int) -> dict[int, tuple[float, float]]:
    """Return the sequential and concurrent seconds by size. All multiplications are one box, to record only two events."""
    found: dict[int, tuple[float, float]] = {}
    for one in [size >> k for k in (5, 4, 3, 2, 1) if size >> k >= 8] + [size]:
        variants = on_two(pair, one, 1, matmuls)
        sequential, concurrent = (median(pair, variants[name], repeat).seconds for name in ("sequential", "concurrent"))
        found[one] = sequential, concurrent
    return found


def with_copies(lanes: list[Lane], size: int, matmuls: int, repeat: int) -> dict[str, Run]:
    """Run the variants of part 2 on one lane for computing and one for copying.

    Raises:
        AssertionError: a copy on a second stream differs from the result of its multiplication.
    """
    compute, copy = lanes
    gpu, every = compute.device.type == "cuda", range(matmuls)
    matrix = torch.randn(size, size, device=compute.device)
    results = [torch.empty_like(matrix) for _ in every]
    pinned = [torch.empty(size, size, pin_memory=gpu) for _ in every]
    pageable = [torch.empty(size, size) for _ in every] if gpu else []

    def matmul(i: int) -> object:
        return compute.issue("matmul", partial(torch.mm, matrix, matrix, out=results[i]))

    def copied(i: int, where: Lane = compute, host: list[torch.Tensor] = pinned, after: object = None) -> None:
        where.issue("copy", partial(host[i].copy_, results[i], non_blocking=True), after)

    variants: dict[str, Work] = {
        "matmuls alone": lambda: [matmul(i) for i in every],
        "copies alone": lambda: [copied(i) for i in every],
        "sequential": lambda: ([matmul(i) for i in every], compute.wait(), [copied(i) for i in every]),
        "one stream": lambda: [(matmul(i), copied(i)) for i in every],
        "two streams": lambda: [copied(i, copy, after=matmul(i)) for i in every],
    }
    if gpu:
        variants["two, pageable"] = lambda: [copied(i, copy, pageable, matmul(i)) for i in every]
    found = {name: median(lanes, variant, repeat) for name, variant in variants.items()}
    for tensor in (*results, *pinned):
        tensor.zero_()
    once(lanes, variants["two streams"])
    assert all(torch.equal(result.cpu(), host) for result, host in zip(results, pinned, strict=True)), (
        "a copy started too early"
    )
    return found


def after_gate(run: Run) -> float:
    """Return the seconds from the end of the gate to the end of all work."""
    boxes = [box for name, row in run.rows.items() if name != "host" for box in row]
    return max(end for _, end, _ in boxes) - next(end for _, end, label in boxes if label == "gate")


def by_streams(device: torch.device, repeat: int) -> dict[int, tuple[float, float]]:
    """Return the seconds `queued` and `issued` of part 3, by the number of streams."""
    lanes = [lane(f"{device} {i}", device) for i in range(CHAINS)]
    found: dict[int, tuple[float, float]] = {}
    gate = load(lanes[0], SIZE[device.type], 1, GATE, "gate")
    for count in (1, 2, 4, 8):
        chains = [load(lanes[i % count], SMALL, 1, LINKS) for i in range(CHAINS)]

        def queued(chains=chains) -> None:
            opened = gate()
            for chain in chains:
                chain(opened)

        def issued(chains=chains) -> None:
            for chain in chains:
                chain()

        alone = statistics.median(after_gate(run) for run in repeated(lanes[:count], queued, repeat))
        found[count] = alone, median(lanes[:count], issued, repeat).seconds
    return found


def show(title: str, columns: list[str], rows: dict[str, list[float]]) -> None:
    """Print a table."""
    print(f"\n{title}\n" + " " * 24 + "".join(f"{name:>14}" for name in columns))
    for name, values in rows.items():
        print(f"{name:<24}" + "".join(f"{value:>14.3f}" for value in values))


def rows_of(runs: dict[str, Run]) -> dict[str, Boxes]:
    """Return the rows of one timeline for several runs."""
    return {f"{variant}: {name}": row for variant, run in runs.items() for name, row in run.rows.items()}


def checked(arguments: argparse.Namespace) -> Path:
    """Return the path of the picture. Wrong arguments end the script with a one-line message before anything is measured."""
    for name in ("size", "matmuls", "repeat"):
        if getattr(arguments, name) < 1:
            sys.exit(f"error: --{name} {getattr(arguments, name)}: must be at least 1")
    try:
        picture = Path(arguments.out).with_suffix(".png")
        picture.parent.mkdir(parents=True, exist_ok=True)
        picture.touch()
    except (OSError, ValueError) as error:
        sys.exit(f"error: --out {arguments.out}: the picture cannot be written there: {error}")
    return picture


def main() -> None:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    kind = "cuda" if gpus else "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="runs/lab_overlap", help="path of the picture without its suffix: OUT.png is written")
    parser.add_argument(
        "--size", type=int, default=SIZE[kind], help="rows and columns of a matrix; default: 4096, on a CPU 512"
    )
    parser.add_argument("--matmuls", type=int, default=10, help="matrix multiplications on each device")
    parser.add_argument("--repeat", type=int, default=10)
    arguments = parser.parse_args()
    picture = checked(arguments)
    devices = [torch.device(kind, i % gpus) if gpus else torch.device(kind) for i in range(2)]
    names = [str(device) if gpus > 1 else f"{'stream' if gpus else 'thread'} {i}" for i, device in enumerate(devices)]
    if gpus < 2:
        print(f"{'one GPU: two of its streams' if gpus else 'no GPU: two threads of one core each'} stand for two devices")
    try:
        measure([lane(name, device) for name, device in zip(names, devices, strict=True)], arguments, picture)
    except RuntimeError as error:
        # On a CPU torch raises a plain RuntimeError, which only its text distinguishes from others.
        if "out of memory" not in str(error) and "allocate memory" not in str(error):
            raise
        sys.exit(f"error: --size {arguments.size} --matmuls {arguments.matmuls}: {str(error).splitlines()[0]}")


def measure(pair: list[Lane], arguments: argparse.Namespace, picture: Path) -> None:
    """Measure the three parts, print their tables and draw them."""
    size, matmuls, repeat = arguments.size, arguments.matmuls, arguments.repeat
    device, what = pair[0].device, f"{matmuls} matmuls of {size} x {size}"
    twice = {name: median(pair, variant, repeat) for name, variant in on_two(pair, size, matmuls, 1).items()}
    show(f"1. {what} on each of two devices", ["ms"], {name: [1000 * run.seconds] for name, run in twice.items()})
    sizes = {one: (1000 * a, 1000 * b, a / b) for one, (a, b) in sweep(pair, size, matmuls, repeat).items()}
    columns = ["sequential ms", "concurrent ms", "ratio"]
    show(f"{matmuls} matmuls by size", columns, {f"{one} x {one}": list(row) for one, row in sizes.items()})

    copies = with_copies([lane("compute", device), lane("copy", device)], size, matmuls, repeat)
    title = f"2. {what} on {device}, each copied to the host"
    show(title, ["ms"], {name: [1000 * run.seconds] for name, run in copies.items()})
    print("every copy is correct")

    streams = {count: [1000 * value for value in row] for count, row in by_streams(device, repeat).items()}
    title = f"3. {CHAINS} independent chains of {LINKS} matmuls of {SMALL} x {SMALL} on {device}"
    show(title, ["queued ms", "issued ms"], {f"streams: {count}": row for count, row in streams.items()})
    lines = [Curve(name, [(n, row[i]) for n, row in streams.items()]) for i, name in enumerate(("queued", "issued"))]
    plots = [
        timeline("Matrix multiplications on two devices", rows_of(twice)),
        timeline("Matrix multiplications and copies to the host", rows_of(copies)),
        bars("Sequential / concurrent time, by size", "ratio", {str(one): row[2] for one, row in sizes.items()}),
        curves(f"{CHAINS} chains of small matmuls", "streams", "ms", lines, zero=True),
    ]
    beside(plots, picture)
    print(f"\n{picture}")


if __name__ == "__main__":
    main()
