"""Count the launches of two ranks in which users see another error than that of their own class.

python scripts/first_cause.py                       20 launches of each kind and place, 240 in all
python scripts/first_cause.py --seconds 540         as many as fit; the same command continues
python scripts/first_cause.py --times 2 --cold      with new interpreters, which take 14 s a launch

The kinds are strategy, task, tracker, optimizer, dataset and model, and the places the constructor
and the first call of tests/support/own_failing.py. Both ranks raise, or rank 0 alone, or rank 1
alone, under `ddp-lab train` and under `torchrun train.py`, in turn; tests/support/culprits.py
judges what is shown. OUT/first_cause.jsonl has a line for each launch, and the output of those that
are wrong. Launches are forked from a process that has imported torch (tests/support/warm.py), so
that the ranks start, and fail, within milliseconds of each other. Exit code 0: none was wrong.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

RANKS = ["0,1", "0", "1"]
PARALLEL = 2  # launches at a time; most of the time they wait


def cases(times: int) -> Iterator[tuple[str, str, str, str]]:
    """Yield kind, place, options and command of each launch, as for `launch_planted`."""
    from culprits import COMMANDS, KINDS, PLACES

    variants = list(product(RANKS, COMMANDS))
    for number in range(times):
        ranks, command = variants[number % len(variants)]
        for kind, place in product(KINDS, PLACES):
            failing = "0" if kind == "tracker" else ranks  # only rank 0 has trackers
            yield kind, place, f"ranks={failing}", command


def run(case: tuple[str, str, str, str], deadline: float) -> dict[str, Any] | None:
    """Return the record of a launch; None if there is no time left."""
    from culprits import launch_planted

    if time.monotonic() > deadline:
        return None
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        outcome = launch_planted(*case, Path(folder))
    record: dict[str, Any] = dict(zip(("kind", "place", "options", "command"), case, strict=True))
    seconds = round(time.monotonic() - begin, 1)
    record |= {"problem": outcome.problem, "code": outcome.code, "seconds": seconds}
    return record | ({"output": outcome.output} if outcome.problem else {})


def summarize(records: list[dict[str, Any]]) -> int:
    """Print how many launches were wrong, for each kind and place, and return their number."""
    by_place: dict[tuple[str, str], list[str]] = {}
    for record in records:
        by_place.setdefault((record["kind"], record["place"]), []).append(record["problem"])
    for (kind, place), samples in by_place.items():
        problems = list(filter(None, samples))
        print(f"{kind:<10}{place:<12}{len(samples):>3} launches, {len(problems)} wrong")
        for problem in dict.fromkeys(problems):
            print(f"  {problem}")
    wrong = sum(bool(record["problem"]) for record in records)
    print(f"{len(records)} launches, {wrong} wrong")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description="Count wrong culprits.")
    parser.add_argument("--times", type=int, default=20, help="launches of each kind and place")
    forever = float("inf")
    parser.add_argument(
        "--seconds", type=float, default=forever, help="start no launch after these"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "runs", help="folder of the results")
    parser.add_argument("--cold", action="store_true", help="start new interpreters")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    file = options.out / "first_cause.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    records = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    remaining = islice(cases(options.times), len(records), None)
    import warm

    server = None if options.cold else warm.start_server(Path(tempfile.mkdtemp(prefix="warm-")))
    try:
        with ThreadPoolExecutor(PARALLEL) as pool, file.open("a") as out:
            for record in pool.map(lambda case: run(case, deadline), remaining):
                if record is None:
                    break
                records.append(record)
                out.write(json.dumps(record) + "\n")
                out.flush()
    finally:
        if server:
            server.kill()
    sys.exit(min(1, summarize(records)))


if __name__ == "__main__":
    main()
