"""The collectives in which ranks wait, as torch's Flight Recorder has them.

torch keeps the last 2,000 calls of each rank, or TORCH_FR_BUFFER_SIZE. Each rank numbers its calls
of a group's collectives. A rank whose last number is smaller than that of a call in which others
wait has not made that call.
"""

import itertools
import pickle
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

# the recorder has no public functions in torch 2.11 to 2.15
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d

from ddp_lab.resilience.heartbeats import lacks

FOLDER = "flight_recorder"  # in the run directory
SHOWN = 8  # the most ranks, tensors and dimensions that a text lists
UNKNOWN = (
    "The collective in which ranks wait is unknown: torch's Flight Recorder has no calls of rank "
    "{}. Either it is off (TORCH_FR_BUFFER_SIZE=0), or it does not support the process group"
)
ALL_CALLED = (
    "No rank lacks a collective in which others wait, by torch's Flight Recorder. It does not "
    "record sends and receives over gloo, nor calls in CUDA graphs"
)


def dump(stacks: bool) -> dict[str, Any]:
    """Return what torch has recorded of this rank, in the form that torch's analyser reads.

    Args:
        stacks: whether with the stack of each call, which can take more than a second.
    """
    if not dist.is_initialized():
        return {"entries": [], "pg_config": {}}
    take = getattr(c10d, "_dump_nccl_trace" if dist.get_backend() == "nccl" else "_dump_fr_trace")
    # no file, but what torch has just pickled
    record = pickle.loads(take(includeStackTraces=stacks))
    groups = distributed_c10d._world.pg_map  # pyright: ignore[reportPrivateUsage]  # no public function lists the groups
    record["pg_config"] = {  # that of gloo has no names in torch 2.15, nor ranks in 2.11
        group.group_name: {
            "name": group.group_name,
            "desc": group.group_desc,
            "ranks": str(dist.get_process_group_ranks(group)),
        }
        for group in groups
    }
    return {"entries": [], **record}


def save(run_dir: Path, step: int, rank: int) -> None:
    """Write this rank's dump, from which `torchfrtrace FOLDER` compares the calls of all ranks."""
    with suppress(OSError):  # a full disk or a removed directory
        folder = folder_of(run_dir, step)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"rank_{rank}").write_bytes(pickle.dumps(dump(stacks=True)))


def folder_of(run_dir: Path, step: int) -> Path:
    """Return the directory of the dumps of a hang that was reported at `step`."""
    return run_dir / FOLDER / f"step_{step}"


def set_aside(run_dir: Path) -> None:
    """Rename the dumps of earlier launches.

    A later hang at the same step, on fewer ranks or with one that cannot write, would mix with
    them.
    """
    for folder in (run_dir / FOLDER).glob("step_*"):
        if "." not in folder.name:
            names = (folder.with_name(f"{folder.name}.{number}") for number in itertools.count(1))
            folder.rename(next(name for name in names if not name.exists()))


def last_calls() -> dict[str, Any]:
    """Return the part of this rank's heartbeat that is about collectives.

    Returns:
        `called`: the number of the last call by the name of its group, 0 if there was none; empty
        if nothing is recorded. `call`: the first call that has not ended, with its group, the
        group's size, its number and a text; None if all have.
    """
    record = dump(stacks=False)
    calls = [entry for entry in record["entries"] if not entry["is_p2p"]]
    called = dict.fromkeys(record["pg_config"] if calls else (), 0)
    called |= {entry["process_group"][0]: entry["collective_seq_id"] for entry in calls}
    call = next((entry for entry in calls if not entry["retired"]), None)
    return {"called": called, "call": call and describe_call(call, record["pg_config"])}


class LastCall(NamedTuple):
    """The last collective of a rank: kind, number, ranks and shapes, and whether it has ended."""

    text: str
    has_ended: bool


def last_call() -> LastCall | None:
    """Return what this rank has called last; None if nothing is recorded."""
    record = dump(stacks=False)
    calls = [entry for entry in record["entries"] if not entry["is_p2p"]]
    if not calls:
        return None
    text = describe_call(calls[-1], record["pg_config"])["text"]
    return LastCall(text, bool(calls[-1]["retired"]))


def describe_last(rank: int, gone: int) -> str:
    """Return what this rank, `rank`, called last; "" if unknown.

    Return also where to look if the rank `gone` called something else.
    """
    last = last_call()
    if last is None:
        return ""
    return (
        f".\nThe last collective of rank {rank} is {last.text}. If rank {gone} called another "
        "one or gave it another shape, the backend has ended it; its reason is then in the output "
        "above"
    )


def describe_call(entry: dict[str, Any], groups: dict[str, Any]) -> dict[str, Any]:
    """Return the field `call` of a heartbeat for an entry of the recorder."""
    name = entry["process_group"][0]
    number = entry["collective_seq_id"]
    ranks = [int(rank) for rank in groups[name]["ranks"].strip("[]").split(",")]
    tensors = zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
    shapes = ", ".join(f"{kind} {size[:SHOWN]}" for kind, size in list(tensors)[:SHOWN])
    text = f"{entry['profiling_name'].partition(':')[2]} {number} of {name_ranks(ranks)} ({shapes})"
    return {"group": name, "number": number, "size": len(ranks), "text": text}


def is_other_call(made: dict[str, Any] | None, call: dict[str, Any]) -> bool:
    """Return whether a rank has made another call in place of one of the same group and number."""
    if not made:
        return False
    is_same_place = (made["group"], made["number"]) == (call["group"], call["number"])
    return is_same_place and made != call


def describe_waits(reporter: dict[str, Any], everyone: list[dict[str, Any]], folder: Path) -> str:
    """Return the collectives in which ranks wait, one per line.

    Each line has the ranks that have called it and those that have not.

    Args:
        reporter: the heartbeat of this rank.
        everyone: as `Table.everyone`.
        folder: where the ranks write their dumps.
    """
    if not reporter["called"]:
        return UNKNOWN.format(reporter["rank"])
    lines = {}
    for call in filter(None, (beat["call"] for beat in everyone)):
        group = call["group"]
        members = [beat for beat in everyone if group in beat["called"]]
        missing = [beat["rank"] for beat in members if lacks(beat, call)]
        other = [beat["rank"] for beat in members if is_other_call(beat["call"], call)]
        inside = [beat["rank"] for beat in members if beat["rank"] not in missing + other]
        unknown = call["size"] - len(members)
        if missing or other or unknown:
            lines[call["text"]] = (
                f"{call['text']}: called by {name_ranks(inside)}"
                + (f", not by {name_ranks(missing)}" if missing else "")
                + (f"; {unknown} more not known" if unknown else "")
            )

    return "\n".join(
        [*(lines.values() or [ALL_CALLED]), f"The calls of each rank, for torchfrtrace: {folder}"]
    )


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3", "ranks 0-7" or "ranks 0, 4, 8"; of many others, the first ones."""
    ranks = sorted(ranks)
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:SHOWN]))}{', ...' if len(ranks) > SHOWN else ''}"
