"""Lab: what runs at the same time without parallel code, and what has to be asked for.

python scripts/lab_overlap.py [--size 4096] [--products 10] [--repeat 10] [--out runs/lab_overlap]

The chapter "automatic parallelism" of the textbooks, with a picture of when what ran. On a GPU a call returns when its work
is queued. What shares a queue, a stream, runs in the order of issue; what does not may overlap.

1. Products of matrices on two devices. In turn: the host waits for the first device before it issues the second one's work.
Together: it issues both, then waits; that should take as long as one device. Exercise: when is the work too small for a second
device? When issuing it takes the host longer than computing it takes the device, for there is one host. The ratio of in turn to
together is near 2 for large matrices and falls to 1. One GPU is tried with two of its streams: large products fill it, and the
ratio is 1 for them.

2. Products, and a copy of each result to the host. That copy i travels while product i+1 computes takes three things.
`non_blocking=True`: otherwise the host waits for copy i and has not yet issued product i+1. Pinned memory: the copy engine
needs pages that stay where they are; to others the driver copies through a pinned buffer of its own, and holds the host until
it is done. A second stream: on the one that computes, product i+1 stands behind copy i, whoever waits. Copy i then has to wait
for the event that product i leaves behind, or it would take what is not there yet; that all copies are right is checked.

3. Exercise: do independent operations run in parallel on one device? Not on one stream. On several they do if they are too
small to fill the device and are queued faster than they run. Eight chains of small products, on 1 to 8 streams: `queued` issues
them behind a gate, a long product that all wait for, and counts from its end, so that the device alone is measured; `issued`
counts from the first call, and says what is left of the gain when Python issues one small product after the other.

Without a GPU torch's calls are synchronous; a thread of one core then is the device or stream, and copies are plain copies.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from ddp_lab.observe.plot import Curve, bars, beside, curves, timeline
from scripts.lanes import Lane, Run, Work, lane, once, repeated

CHAINS, LINKS, SMALL = 8, 32, 128  # independent chains of so many products, SMALL x SMALL
GATE = 4  # products of the default size, which must last until all chains are issued
SIZE = {"cuda": 4096, "cpu": 512}


def median(lanes: list[Lane], variant: Work, repeat: int) -> Run:
    """A whole run, so that the number and the picture are of the same one."""
    return repeated(lanes, variant, repeat)[repeat // 2]


def load(where: Lane, size: int, boxes: int, each: int, label: str = "product") -> Callable:
    """What issues `boxes` times `each` products, size x size. Memory is allocated here, before any clock runs."""
    matrix = torch.randn(size, size, device=where.device)
    result = torch.empty_like(matrix)

    def work() -> None:
        for _ in range(each):
            torch.mm(matrix, matrix, out=result)

    return lambda after=None: [where.issue(label, work, after) for _ in range(boxes)][-1]


def on_two(pair: list[Lane], size: int, boxes: int, each: int) -> dict[str, Work]:
    """Part 1, on each of two lanes: `boxes` times `each` products."""
    first, second = (load(where, size, boxes, each) for where in pair)
    return {
        f"{pair[0].name} alone": first,
        f"{pair[1].name} alone": second,
        "in turn": lambda: (first(), pair[0].wait(), second()),
        "together": lambda: (first(), second()),
    }


def sweep(pair: list[Lane], size: int, products: int, repeat: int) -> dict[int, tuple[float, float]]:
    """Seconds in turn and together, by size. The products are one box: two events for the host to record, not two for each."""
    found = {}
    for one in [size >> k for k in (5, 4, 3, 2, 1) if size >> k >= 8] + [size]:
        variants = on_two(pair, one, 1, products)
        found[one] = tuple(median(pair, variants[name], repeat).seconds for name in ("in turn", "together"))
    return found


def with_copies(lanes: list[Lane], size: int, products: int, repeat: int) -> dict[str, Run]:
    """Part 2, on a lane to compute and one to copy.

    Raises:
        AssertionError: a copy on a second stream is not the product.
    """
    compute, copy = lanes
    gpu, every = compute.device.type == "cuda", range(products)
    matrix = torch.randn(size, size, device=compute.device)
    results = [torch.empty_like(matrix) for _ in every]
    pinned = [torch.empty(size, size, pin_memory=gpu) for _ in every]
    pageable = [torch.empty(size, size) for _ in every] if gpu else []

    def product(i: int) -> object:
        return compute.issue("product", partial(torch.mm, matrix, matrix, out=results[i]))

    def copied(i: int, where: Lane = compute, host: list = pinned, after: object = None) -> None:
        where.issue("copy", partial(host[i].copy_, results[i], non_blocking=True), after)

    variants: dict[str, Work] = {
        "products alone": lambda: [product(i) for i in every],
        "copies alone": lambda: [copied(i) for i in every],
        "in turn": lambda: ([product(i) for i in every], compute.wait(), [copied(i) for i in every]),
        "one stream": lambda: [(product(i), copied(i)) for i in every],
        "two streams": lambda: [copied(i, copy, after=product(i)) for i in every],
    }
    if gpu:
        variants["two, pageable"] = lambda: [copied(i, copy, pageable, product(i)) for i in every]
    found = {name: median(lanes, variant, repeat) for name, variant in variants.items()}
    for matrix_of_zeros in (*results, *pinned):
        matrix_of_zeros.zero_()
    once(lanes, variants["two streams"])
    assert all(torch.equal(result.cpu(), host) for result, host in zip(results, pinned, strict=True)), "a copy came too early"
    return found


def behind_gate(run: Run) -> float:
    """Seconds from the gate's end to that of all work."""
    boxes = [box for name, row in run.rows.items() if name != "host" for box in row]
    return max(end for _, end, _ in boxes) - next(end for _, end, label in boxes if label == "gate")


def by_streams(device: torch.device, repeat: int) -> dict[int, tuple[float, float]]:
    """Part 3: seconds `queued` and `issued`, by the number of streams."""
    lanes, found = [lane(f"{device} {i}", device) for i in range(CHAINS)], {}
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

        alone = statistics.median(behind_gate(run) for run in repeated(lanes[:count], queued, repeat))
        found[count] = alone, median(lanes[:count], issued, repeat).seconds
    return found


def show(title: str, columns: list[str], rows: dict[str, list[float]]) -> None:
    print(f"\n{title}\n" + " " * 24 + "".join(f"{name:>14}" for name in columns))
    for name, values in rows.items():
        print(f"{name:<24}" + "".join(f"{value:>14.3f}" for value in values))


def rows_of(runs: dict[str, Run]) -> dict:
    return {f"{variant}: {name}": row for variant, run in runs.items() for name, row in run.rows.items()}


def checked(arguments: argparse.Namespace) -> Path:
    """The picture's path. What cannot be is one line, before anything is measured."""
    for name in ("size", "products", "repeat"):
        if getattr(arguments, name) < 1:
            sys.exit(f"error: --{name} {getattr(arguments, name)}: must be at least 1")
    try:
        picture = Path(arguments.out).with_suffix(".png")
        picture.parent.mkdir(parents=True, exist_ok=True)
        picture.touch()
    except (OSError, ValueError) as error:
        sys.exit(f"error: --out {arguments.out}: no picture can be written there: {error}")
    return picture


def main() -> None:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    kind = "cuda" if gpus else "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="runs/lab_overlap", help="where the picture goes: OUT.png")
    parser.add_argument("--size", type=int, default=SIZE[kind], help="rows and columns of a matrix; else 4096, on a CPU 512")
    parser.add_argument("--products", type=int, default=10, help="on each device")
    parser.add_argument("--repeat", type=int, default=10)
    arguments = parser.parse_args()
    picture = checked(arguments)
    devices = [torch.device(kind, i % gpus) if gpus else torch.device(kind) for i in range(2)]
    names = [str(device) if gpus > 1 else f"{'stream' if gpus else 'thread'} {i}" for i, device in enumerate(devices)]
    if gpus < 2:
        print(f"{'two streams of the one GPU' if gpus else 'no GPU: two threads of one core each'} stand for two devices")
    try:
        measure([lane(name, device) for name, device in zip(names, devices, strict=True)], arguments, picture)
    except RuntimeError as error:
        # On a CPU torch raises a plain RuntimeError, which its text alone tells from others.
        if "out of memory" not in str(error) and "allocate memory" not in str(error):
            raise
        sys.exit(f"error: --size {arguments.size} --products {arguments.products}: {str(error).splitlines()[0]}")


def measure(pair: list[Lane], arguments: argparse.Namespace, picture: Path) -> None:
    size, products, repeat = arguments.size, arguments.products, arguments.repeat
    device, what = pair[0].device, f"{products} products of {size} x {size}"
    twice = {name: median(pair, variant, repeat) for name, variant in on_two(pair, size, products, 1).items()}
    show(f"1. {what} on each of two devices", ["ms"], {name: [1000 * run.seconds] for name, run in twice.items()})
    sizes = {one: (1000 * turn, 1000 * both, turn / both) for one, (turn, both) in sweep(pair, size, products, repeat).items()}
    columns = ["in turn ms", "together ms", "ratio"]
    show(f"{products} products by size", columns, {f"{one} x {one}": list(row) for one, row in sizes.items()})

    copies = with_copies([lane("compute", device), lane("copy", device)], size, products, repeat)
    title = f"2. {what} on {device}, each copied to the host"
    show(title, ["ms"], {name: [1000 * run.seconds] for name, run in copies.items()})
    print("every copy is the product")

    streams = {count: [1000 * value for value in row] for count, row in by_streams(device, repeat).items()}
    title = f"3. {CHAINS} independent chains of {LINKS} products of {SMALL} x {SMALL} on {device}"
    show(title, ["queued ms", "issued ms"], {f"streams: {count}": row for count, row in streams.items()})
    lines = [Curve(name, [(n, row[i]) for n, row in streams.items()]) for i, name in enumerate(("queued", "issued"))]
    plots = [
        timeline("Products on two devices", rows_of(twice)),
        timeline("Products, and copies of them to the host", rows_of(copies)),
        bars("In turn / together, by size of the matrices", "ratio", {str(one): row[2] for one, row in sizes.items()}),
        curves(f"{CHAINS} chains of small products", "streams", "ms", lines, zero=True),
    ]
    beside(plots, picture)
    print(f"\n{picture}")


if __name__ == "__main__":
    main()
