"""The lights of `ddp-lab watch`: what each rank is doing, and which one the others wait for.

It reads the table of heartbeats that the ranks keep in memory, and adds nothing to their work. Only
a process on the machine of rank 0 can read it. There it has the ranks of that machine and, of
those of other machines, the ones with the least progress.

| light | meaning |
|---|---|
| green | the rank makes progress |
| amber | it waits for another rank, or makes no progress |
| red | the others wait for it, its process is gone or suspended, or it has failed |
| grey | the run is over, or nothing is known of the rank |
"""

import os
import socket
import stat
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil

from ddp_lab.resilience.heartbeats import (
    ROW,
    SHARED,
    VANISHED,
    Heartbeat,
    find_suspect,
    read_row,
    suspicion,
)
from ddp_lab.resilience.run_directory import LOCK_FILE, read_json
from ddp_lab.world.process import is_alive

Colour = Literal["green", "amber", "red", "grey"]
SLOW = 20.0  # seconds in one phase after which a rank counts as making no progress
OUTDATED = 2.0  # seconds for which a heartbeat may still say that its rank waits, when it does not


class Light(NamedTuple):
    """The light of a rank.

    Attributes:
        rank: of the launch.
        colour: of the table above.
        text: why it has this colour.
        step, phase: of the heartbeat; None: unknown.
        age: seconds since the phase began; None: unknown.
        host, pid: of the process; None: unknown.
        memory_MiB: resident memory of the process; None: unknown.
    """

    rank: int
    colour: Colour
    text: str
    step: int | None = None
    phase: str | None = None
    age: float | None = None
    host: str | None = None
    pid: int | None = None
    memory_MiB: float | None = None


class Table(NamedTuple):
    """The heartbeats of a launch, and why there are none; "" if there are."""

    beats: dict[int, Heartbeat]
    problem: str = ""


@dataclass
class Lights:
    """The lights of the ranks of a run. Call `look` about once a second.

    Args:
        path: the run directory.
    """

    path: Path
    _seen: dict[int, tuple[int, float]] = field(default_factory=dict[int, tuple[int, float]])

    def look(self, ranks: int) -> tuple[list[Light], str]:
        """Return the lights of a running launch, and why nothing is known; "" if something is.

        Args:
            ranks: number of ranks of the launch, 0 if unknown.
        """
        table = read_table(self.path)
        lights = judge(list(table.beats.values()), time.time(), self._silent(table.beats))
        by_rank = {light.rank: light for light in lights}
        total = max([ranks, *(rank + 1 for rank in by_rank)])
        unknown = "its heartbeat is known on its machine only"
        return [by_rank.get(rank, Light(rank, "grey", unknown)) for rank in range(total)], (
            table.problem
        )

    def _silent(self, beats: dict[int, Heartbeat]) -> dict[int, str]:
        """Return the ranks whose process is gone or does nothing, with what it is."""
        silent: dict[int, str] = {}
        now = time.monotonic()
        here = socket.gethostname()
        for rank, beat in beats.items():
            before, since = self._seen.get(rank, (None, now))
            if before != beat["beat"]:
                since = now
            self._seen[rank] = beat["beat"], since
            if beat["doing"] == "done":
                continue
            if beat["host"] == here and not is_alive(beat["pid"]):
                silent[rank] = "its process is gone"
            elif now - since >= VANISHED:
                silent[rank] = (
                    f"no heartbeat for {now - since:.0f} s: the process is suspended, or code in C "
                    "holds its interpreter"
                )
        return silent


def judge(beats: Sequence[Heartbeat], now: float, silent: dict[int, str]) -> list[Light]:
    """Return the lights of the ranks with these heartbeats.

    Args:
        beats: of the ranks that are known.
        now: Unix time.
        silent: ranks whose process is gone or suspended, with what it is.
    """
    active = sorted((beat for beat in beats if beat["doing"] != "done"), key=suspicion)
    culprit = find_culprit(active, now)
    return [light_of(beat, now, silent, culprit) for beat in beats]


def find_culprit(active: Sequence[Heartbeat], now: float) -> int | None:
    """Return the rank for which others wait in a collective; None if nobody waits for long.

    A rank says that it waits when it has made no progress for a while
    (`ddp_lab/resilience/watchdog.py`).

    Args:
        active: the heartbeats of ranks that are not done, by `suspicion`.
        now: Unix time.
    """
    if not active:
        return None
    suspect = find_suspect(active)
    waiting = [beat for beat in active if beat["waits"] and now - beat["since"] >= OUTDATED]
    return suspect["rank"] if any(beat is not suspect for beat in waiting) else None


def light_of(beat: Heartbeat, now: float, silent: dict[int, str], culprit: int | None) -> Light:
    """Return the light of a rank. Arguments as in `judge`; others wait for rank `culprit`."""
    rank = beat["rank"]
    age = max(0.0, now - beat["since"])
    phase = beat["doing"]
    colour: Colour = "green"
    text = f"{phase} for {age:.0f} s"
    if phase == "done":
        colour = "grey"
        text = "done"
    elif rank in silent:
        colour = "red"
        text = silent[rank]
    elif rank == culprit:
        colour = "red"
        text = f"the other ranks wait for it: {text}"
    elif beat["waits"] and culprit is not None:
        colour = "amber"
        text = f"waits for rank {culprit}: {text}"
    elif age >= SLOW:
        colour = "amber"
        text = f"no progress: {text}"
    return Light(
        rank=rank,
        colour=colour,
        text=text,
        step=beat["step"],
        phase=phase,
        age=age,
        host=beat["host"],
        pid=beat["pid"],
        memory_MiB=memory_of(beat),
    )


def over(ranks: int, step: int | None, failed: int | None, state: str) -> list[Light]:
    """Return the lights of a run that is over.

    Args:
        ranks: number of ranks of its last launch.
        step: the last one; None: unknown.
        failed: the rank that failed; None: none has.
        state: of the run.
    """
    lights = [Light(rank, "grey", state, step) for rank in range(ranks)]
    if failed is not None and failed < ranks:
        lights[failed] = Light(failed, "red", "has failed", step)
    return lights


def memory_of(beat: Heartbeat) -> float | None:
    """Return the resident memory of a rank's process on this machine, in MiB; None: unknown."""
    if beat["host"] == socket.gethostname():
        with suppress(psutil.Error, OSError):
            return psutil.Process(beat["pid"]).memory_info().rss / 2**20
    return None


def read_table(path: Path) -> Table:
    """Return the heartbeats of the launch that is writing in a run directory."""
    record = read_json(path / "status.json") or {}
    if "heartbeats" not in record:
        return Table({}, "the ranks have not started yet")
    try:
        writer = (path / LOCK_FILE).read_text(errors="replace")
    except OSError:
        writer = ""
    host = writer.partition(" on ")[2].partition(" since ")[0]
    if host and host != socket.gethostname():
        return Table({}, f"the heartbeats are in the memory of {host}: start `ddp-lab watch` there")
    try:
        return Table(read_beats(Path(record["heartbeats"])))
    except OSError as error:
        return Table({}, f"the heartbeats cannot be read ({error.strerror})")


def read_beats(table: Path) -> dict[int, Heartbeat]:
    """Return the heartbeats in the file of a table, by rank; none if it is no such file.

    Raises:
        OSError: it cannot be read, as that of another user, or of a launch that has ended.
    """
    # the number of a process may be another one's by now
    if not stat.S_ISREG(table.stat().st_mode):
        return {}
    file = os.open(table, os.O_RDONLY)
    try:
        rows, rest = divmod(os.fstat(file).st_size, ROW)
        if rest:
            return {}
        overview = read_row(file, "overview") or {}
        records = [read_row(file, local) for local in range(rows - len(SHARED))]
    finally:
        os.close(file)
    elsewhere = {beat["rank"]: beat for beat in valid(overview.get("ranks", []))}
    here = {beat["rank"]: beat for beat in valid(records)}
    return dict(sorted((elsewhere | here).items()))


def valid(records: Collection[Any]) -> list[Heartbeat]:
    """Return the records that are heartbeats."""
    fields = {"rank", "host", "pid", "step", "doing", "since", "beat", "waits"}
    return [record for record in records if isinstance(record, dict) and fields <= record.keys()]
