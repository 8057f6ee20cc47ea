"""The watchdog: a thread of each rank that finds lost and hanging ranks and nodes.

It also reports the first failure.

It looks at the table of heartbeats (heartbeats.py) twice a second, even while the main thread waits
in a collective for a rank that never arrives. Only the first failure is reported: on the screen, in
failure.json and in status.json, by one rank. Errors that it causes go to log files.
"""

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from ddp_lab.config.errors import ConfigError, FailureKind, SampleError, TrainingError, advice
from ddp_lab.observe.log import LOG_FILES, log
from ddp_lab.resilience.heartbeats import (
    LISTED,
    STARTING,
    VANISHED,
    Failure,
    Heartbeat,
    NodeLink,
    OwnHeartbeat,
    StalenessCounter,
    Table,
    find_suspect,
)
from ddp_lab.resilience.run_directory import REQUEST, STACKS, RunDir, write_status
from ddp_lab.world.process import OUTCOME, is_alive, show
from ddp_lab.world.runtime import Runtime

BEAT = 0.5  # seconds between two looks
SILENT = 20.0  # seconds in one phase after which, again and again, rank 0 logs it
FROZEN = 6  # looks without a heartbeat after which the next rank of the node leads it
GRACE = 5.0  # seconds for which a rank whose collective failed waits for another rank's report
# the same on several nodes, where the cause may be a node that has vanished
NODE_GRACE = VANISHED + GRACE
# seconds by which a collective's timeout exceeds the watchdog's, which can report the rank
COLLECTIVE_GRACE = 30.0
BUSY: Heartbeat = {"waits": False, "called": {}, "call": None}
SHOWN = ("rank", "host", "epoch", "step", "doing")  # what is reported of the other ranks
KILLED = "exited without reporting an error: killed, crashed or left early"


class Watchdog:
    """A watchdog that writes this rank's heartbeat and reads those of other ranks. Collective.

    Use it as a context manager around training. If an exception leaves the context, the failure is
    reported and the process exits.

    Args:
        run_dir: where failure.json and status.json are written.
        runtime: rank and world size.
        timeout: seconds without progress after which the launch is ended and the rank with the
            least progress is reported.
        before_exit: called by the watchdog's thread before it ends this process.

    Attributes:
        own: the heartbeat of this rank. `since` is the Unix time at which its phase began, `beat`
            the number of looks, `waits` whether the main thread is most likely in a collective,
            `called` and `call` what `last_calls` returns. These three are only found out if the
            launch may hang.
        heartbeat: writes it, once the context is entered.
    """

    def __init__(
        self,
        run_dir: RunDir,
        runtime: Runtime,
        timeout: float,
        before_exit: Callable[[], object] = lambda: None,
    ):
        self.run_dir = run_dir.path
        self.runtime = runtime
        self.timeout = timeout
        self.rank = runtime.rank
        # A hang is judged when the heartbeats of all ranks show who waits in a collective.
        self.settled = timeout + 2 * BEAT + (4.0 if runtime.nodes > 1 else 0)

        self.record: Heartbeat = {
            "rank": runtime.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        self.record |= {
            "epoch": 0,
            "step": 0,
            "doing": STARTING,
            "since": time.time(),
            "beat": 0,
            **BUSY,
        }

        self.before_exit = before_exit
        # on the rank that leads its node, if there are several nodes
        self.link: NodeLink | None = None
        self._main = threading.get_ident()
        self._request = self.run_dir / STACKS / REQUEST
        self._answered = self._requested_at()  # a request of before this launch
        self._unchanged = StalenessCounter()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self.table = Table(self.runtime)
        self.heartbeat = OwnHeartbeat(self.table, self.runtime.local_rank, self.record)
        self.heartbeat.write()
        # sends the node's first heartbeat: a node that has never sent one cannot be missed
        self._leads()
        self._thread.start()
        if self.rank == 0:
            write_status(self.run_dir, "running", 0, 0, heartbeats=self.table.path)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: object) -> None:
        if error is None or isinstance(error, ConfigError):
            self.stop()
            if error is not None and self.rank == 0:
                write_status(self.run_dir, "failed", self.record["epoch"], self.record["step"])
            return
        try:
            self.failed(error)
            sys.stdout.flush()
        finally:
            # Not sys.exit: an open process group could keep the interpreter from exiting.
            exit_now(130 if isinstance(error, KeyboardInterrupt) else 1)

    def stop(self) -> None:
        """Stop the watchdog thread, because this rank exits normally."""
        self._stop.set()
        self._thread.join()
        self.heartbeat.at("done")
        if self.link:
            self.link.stop()

    def _watch(self) -> None:
        while not self._stop.wait(BEAT) and not self.look():
            pass

    def look(self) -> bool:
        """Write the heartbeat, and look at those of others.

        Return whether a failure is known, after this rank has left.
        """
        self.record["beat"] += 1
        self.heartbeat.write()
        self._answer_request()
        leads = self._leads()
        if self.table.read("failure"):
            # Exit later than the rank that reported the failure, so that torchrun's summary
            # contains that rank's message.
            self.leave(GRACE + 4 * BEAT)
            return True

        failure = (
            self._dead_neighbour()
            or (self.link and self.link.find_lost(1 / BEAT))
            or self._hang(leads)
        )
        if failure:
            self._report_found(failure)
            self.leave(GRACE)
        return failure is not None

    def _report_found(self, failure: Failure) -> bool:
        """Report what this rank has found out about another one, or about itself.

        Return whether it is the launch's first failure.
        """
        who, kind, problem = failure
        if kind == "lost_rank":
            from ddp_lab.resilience import flight_recorder

            problem += flight_recorder.describe_last(self.rank, who["rank"])
        return self._report(who, kind, describe(who, problem, self.table.everyone()))

    def _requested_at(self) -> int | None:
        """Return when the stacks of the ranks were last asked for, as a file time; None: never."""
        try:
            return os.stat(self._request).st_mtime_ns
        except OSError:
            return None

    def _answer_request(self) -> None:
        """Write the stacks of this rank if they were asked for since the last look.

        It costs one call of stat in each look.
        """
        requested_at = self._requested_at()
        if requested_at in (None, self._answered):
            return
        self._answered = requested_at
        from ddp_lab.resilience import stacks

        stacks.answer(self.run_dir, self.record, self._main)

    def _leads(self) -> bool:
        """Return whether this rank leads its node, because no rank before it is awake.

        If it does, link it with the others.
        """
        before = {local: self.table.read(local) for local in range(self.runtime.local_rank)}
        still = [
            self._unchanged.count(local, beat and beat["beat"]) for local, beat in before.items()
        ]
        # a rank that is suspended is not a lost node
        leads = all(looks >= FROZEN for looks in still)
        if leads and self.runtime.nodes > 1 and self.link is None:
            self.link = NodeLink(self.runtime, self.table)
            self.link.start()
        return leads

    def _dead_neighbour(self) -> Failure | None:
        """Return the next rank of this node that has not left normally, if its process has exited.

        Each rank watches only one other, so the cost of a look does not depend on the number of
        ranks. If some ranks of a node are dead, the one before them still finds the first of them.
        """
        return next(self._lost_ranks(), None)

    def _lost_ranks(self) -> Iterator[Failure | None]:
        """Yield, for each other rank of this node that has not left normally, whether it is lost.

        The next one is the first.
        """
        for distance in range(1, self.table.size):
            beat = self.table.read((self.runtime.local_rank + distance) % self.table.size)
            if beat is not None and beat["doing"] != "done":
                yield None if is_alive(beat["pid"]) else (beat, "lost_rank", KILLED)

    def _hang(self, leads: bool) -> Failure | None:
        """Return the rank for which the others wait, if this one has to report a hang.

        The time is counted in looks: while this process is suspended, nothing is counted. Reported
        is the rank with the least progress, or one that lacks the collective in which that rank
        waits. If it can report its stack, it reports itself.
        """
        still = self._unchanged.count("own", self.record["since"]) * BEAT
        if self.rank == 0 and still and still % SILENT == 0:
            log.info(
                f"{self.record['doing']} for {still:.0f} s (epoch {self.record['epoch']}, step "
                f"{self.record['step']})"
            )

        # early, because on a busy machine this rank may count late what others need to judge, and
        # `ddp-lab watch` shows it
        if still < min(SILENT, self.timeout / 4):
            self.record |= BUSY
            return None
        frame = sys._current_frames()[self._main]  # pyright: ignore[reportPrivateUsage]  # documented, and the only way
        self.record["waits"] = "/torch/" in frame.f_code.co_filename  # most likely in a collective
        if still < self.timeout / 4:
            return None
        from ddp_lab.resilience import flight_recorder

        if not self.record["called"]:
            self.record |= flight_recorder.last_calls()
        if still < self.settled:
            return None

        everyone = self.table.everyone()
        suspect = find_suspect(everyone)
        if suspect["rank"] == self.rank:
            stack = "".join(traceback.format_stack(frame)[-3:])
            limit = f"timeout={self.timeout:g}; raise it if a step may take longer"
            problem = f"hangs: no progress for {still:.0f} s ({limit}), in\n{stack}"
        elif leads and still > self.settled + 4 * BEAT:  # the hanging rank reports first
            problem = (
                f"stalls the other ranks, which have waited for {still:.0f} s "
                f"(timeout={self.timeout:g})"
            )
            problem += (
                ". Its own watchdog reports nothing: the process is suspended, or its node is "
                "down\n"
            )
        else:
            return None

        if self.runtime.world_size > 1:
            folder = flight_recorder.folder_of(self.run_dir, suspect["step"])
            problem += flight_recorder.describe_waits(self.record, everyone, folder)
        return suspect, "hang", problem

    def failed(self, error: BaseException) -> None:
        """Report an exception of the main thread if it is the first failure.

        Otherwise append it to this rank's log only.
        """
        from ddp_lab.config.causes import is_secondary
        from ddp_lab.data.lost_worker import find_lost_worker

        error = find_lost_worker(error) or error
        text = "".join(traceback.format_exception(error))
        secondary = is_secondary(error) or getattr(error, "rank", self.rank) != self.rank
        deadline = time.time() + (NODE_GRACE if self.runtime.nodes > 1 else GRACE)
        while secondary and time.time() < deadline and not self.table.read("failure"):
            time.sleep(BEAT / 5)
        # The watchdogs have found no lost rank: on a busy machine they may have had no time to.
        lost = next(filter(None, self._lost_ranks()), None) if secondary else None

        if lost is not None and not self.table.read("failure"):
            self._report_found(lost)
            first = False  # this error follows from it
        elif isinstance(error, TrainingError):  # its message contains the step and the rank
            first = self._report(self.record, error.kind, f"error: {error}")
        else:
            shown = f"failed:\n{''.join(text.splitlines(True)[-6:]).rstrip()}{advice(text)}"
            problem = str(error) if isinstance(error, SampleError) else shown
            first = self._report(
                self.record, "exception", describe(self.record, problem, self.table.everyone())
            )

        if not first:
            text = (
                f"Error on rank {self.rank} after another rank's failure, which is in "
                f"failure.json:\n{text}"
            )
        if first or self.rank < LOG_FILES:
            with (self.run_dir / (f"train.rank{self.rank}.log" if self.rank else "train.log")).open(
                "a"
            ) as file:
                file.write(text)

        if not first and self.runtime.world_size > 1:
            # the rank that reported the failure must exit first: torchrun's summary has its message
            time.sleep(4 * BEAT)
        self._stop.set()

    def _report(self, who: Heartbeat, kind: FailureKind, message: str) -> bool:
        """Write and print a failure if it is the launch's first, and make it known to all ranks.

        Return whether it is.
        """
        if self.table.read("failure"):
            return False
        path = self.run_dir / "failure.json"
        first = True
        listed = [
            {key: beat[key] for key in SHOWN} for beat in others(who["rank"], self.table.everyone())
        ]
        record: dict[str, Any] = {**who, "kind": kind, "message": message, "others": listed}
        try:
            with path.open("x") as file:  # fails if another rank was first
                json.dump(record | {"reported_by": self.rank, "time": time.time()}, file, indent=1)
            write_status(self.run_dir, "failed", who["epoch"], who["step"])
        except FileExistsError:
            first = False
        except OSError as error:  # a full disk or a removed directory: the failure is only printed
            message += f"\n(failure.json could not be written in {self.run_dir}: {error.strerror})"

        if first:
            show(f"{message}\nDetails: {self.run_dir}/train*.log, {path}", began=who["since"] - 1)
        self.table.write("failure", who)
        if self.link:
            self.link.stop()
        return first

    def leave(self, grace: float) -> None:
        """Exit with code 1 unless the main thread stops the watchdog within `grace` seconds."""
        if self.record["called"] and (failure := self.table.read("failure")):
            from ddp_lab.resilience import flight_recorder

            flight_recorder.save(self.run_dir, failure["step"], self.rank)
        deadline = time.monotonic() + grace
        self.before_exit()
        if not self._stop.wait(max(0.0, deadline - time.monotonic())):
            exit_now(1)


def exit_now(code: int) -> None:
    """End this process at once. If it is the one that the user has started, write the outcome."""
    try:
        if OUTCOME in os.environ and "RANK" not in os.environ:
            from ddp_lab.resilience import outcome

            outcome.write(code)
    finally:
        os._exit(code)


def others(failed: int, everyone: list[Heartbeat]) -> list[Heartbeat]:
    """Return at most LISTED of the heartbeats other than that of the rank `failed`, by rank."""
    return sorted(
        [beat for beat in everyone if beat["rank"] != failed][:LISTED],
        key=lambda beat: beat["rank"],
    )


def describe(who: Heartbeat, problem: str, everyone: list[Heartbeat]) -> str:
    """Return the message about a failure of the rank with the heartbeat `who`.

    `everyone`: as `Table.everyone`.
    """
    place = (
        f"rank {who['rank']} on {who['host']} (pid {who['pid']}), epoch {who['epoch']}, step "
        f"{who['step']}"
    )
    message = f"error: {place}, {who['doing']}: {problem.rstrip()}"
    if listed := others(who["rank"], everyone):
        message += "\nThe other ranks at that time: "
        message += "; ".join(
            f"rank {beat['rank']} {beat['doing']}, step {beat['step']}" for beat in listed
        )
    return message
