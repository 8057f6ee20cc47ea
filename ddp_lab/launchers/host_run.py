"""The ranks of a launch over ssh while they run: their output, their signals, and their end."""

import signal
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any

from ddp_lab.launchers.command import PREEMPTED, REFUSED
from ddp_lab.launchers.host_agent import GRACE, SILENCE
from ddp_lab.launchers.ssh import Answer, Connection
from ddp_lab.launchers.start_ranks import EXIT_CODES, order_of
from ddp_lab.world.process import note

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)
POLL = 0.5  # seconds between looks at the clock
# Seconds for which the other hosts may report after one has failed: if its error was the first
# one, and if it most likely follows from that of another host.
AFTER_CAUSE = 5.0
AFTER_OTHER = 15.0
KILLED = 3.0  # seconds after GRACE in which a host reports that it has killed what was left


class HostRun:
    """The launch on all hosts.

    Args:
        connections: By host.
        answers: What the hosts say.
        ahead: Seconds by which the hosts' clocks are ahead of this machine's.
        first: The host with rank 0.
    """

    def __init__(
        self,
        connections: Mapping[str, Connection],
        answers: "SimpleQueue[Answer]",
        ahead: Mapping[str, float],
        first: str,
    ):
        self.connections = connections
        self.answers = answers
        self.ahead = ahead
        self.first = first
        self.ended = dict[str, dict[str, Any]]()
        self.lost = dict[str, str]()
        self.signals = list[signal.Signals]()
        self.end_at: float | None = None
        self.give_up_at: float | None = None

    @property
    def running(self) -> list[str]:
        """The hosts that have neither ended nor been lost."""
        return [name for name in self.connections if name not in {*self.ended, *self.lost}]

    def wait(self) -> int:
        """Print what the hosts print, until all have ended; return the exit code of the command."""
        with self.passing_signals():
            while self.running:
                with suppress(Empty):
                    self.take(self.answers.get(timeout=POLL))
                now = time.monotonic()
                if self.end_at is not None and now > self.end_at and self.give_up_at is None:
                    self.end_all(GRACE)
                if self.give_up_at is not None and now > self.give_up_at:
                    break
        return self.report()

    def take(self, answer: Answer) -> None:
        """Act on what a host has said, or on a signal that this process got."""
        facts = answer.facts
        if answer.kind == "line":
            stream = sys.stdout if facts["stream"] == 1 else sys.stderr
            print(f"{answer.host}: {facts['text']}", file=stream, flush=True)
        elif answer.kind == "ended":
            self.ended[answer.host] = facts
            if facts["code"] and self.end_at is None:
                error = facts["error"]
                is_cause = error and not error["message"]["extraInfo"].get("secondary")
                self.end_at = time.monotonic() + (AFTER_CAUSE if is_cause else AFTER_OTHER)
        elif answer.kind == "lost" and answer.host not in self.ended:
            self.lose(answer.host, facts["text"])
        elif answer.kind == "signal":
            self.pass_on(signal.Signals(facts["number"]))

    def lose(self, host: str, text: str) -> None:
        """Report a lost connection, and end the launch on the other hosts."""
        reason = f" ({text})" if text else ""
        message = (
            f"{host}: the connection was lost{reason}. Its ranks end with it, and so do those of "
            "the other hosts; the same command resumes the run"
        )
        self.lost[host] = message
        if not self.signals:
            print(f"error: {message}", file=sys.stderr, flush=True)
            note(error=message)
        self.end_all(GRACE)

    def end_all(self, seconds: float) -> None:
        """End the launch on all hosts within so many seconds."""
        for name in self.running:
            self.connections[name].ask("end", seconds=seconds)
        limit = time.monotonic() + seconds + KILLED
        self.give_up_at = limit if self.give_up_at is None else min(limit, self.give_up_at)

    def pass_on(self, number: signal.Signals) -> None:
        """Pass a signal on to all hosts, whose ranks save and exit. The second one kills them."""
        self.signals.append(number)
        if len(self.signals) > 1:
            self.end_all(0.0)
            return
        for name in self.running:
            self.connections[name].ask("signal", number=number)

    @contextmanager
    def passing_signals(self) -> Generator[None]:
        """Take signals for the ranks while the body runs."""

        def take(number: int, frame: object) -> None:
            self.answers.put(Answer("", "signal", {"number": number}))

        before = {number: signal.signal(number, take) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def report(self) -> int:
        """Print the first error of all hosts, note the outcome, and return the exit code."""
        record = (self.ended.get(self.first) or {}).get("outcome")
        if record:
            note(of_host=record)
        for name in self.running:
            print(
                f"error: {name}: has not reported the end of its ranks. They end there at the "
                f"latest {SILENCE:.0f} s after this command",
                file=sys.stderr,
            )
        failed = {name: facts for name, facts in self.ended.items() if facts["code"]}
        if not failed and not self.lost and not self.running:
            return 0
        errors = {
            name: facts["error"]["message"] for name, facts in failed.items() if facts["error"]
        }
        if self.signals:
            number = self.signals[0]
            return EXIT_CODES.get(number, 128 + number)
        if self.lost:  # all else follows from it
            return 1
        if errors:
            return self.report_first(errors)
        if PREEMPTED in [facts["code"] for facts in failed.values()]:
            return PREEMPTED
        for name, facts in failed.items():
            print(f"{name}: ended with exit code {facts['code']}", file=sys.stderr)
        is_refused = {facts["code"] for facts in failed.values()} == {REFUSED}
        return REFUSED if is_refused else 1

    def report_first(self, errors: Mapping[str, dict[str, Any]]) -> int:
        """Print the error that came first, and return the exit code of the command.

        Args:
            errors: By host, as `show` in world/process.py writes them.
        """

        def order(name: str) -> tuple[bool, float]:
            secondary, seconds = order_of(errors[name]["extraInfo"])
            return secondary, seconds - self.ahead[name]

        host = min(errors, key=order)
        text: str = errors[host]["extraInfo"]["py_callstack"]
        is_of_all = len(errors) > 1 and all(
            each["extraInfo"]["py_callstack"] == text for each in errors.values()
        )
        note(error=text.removeprefix("error: "))
        prefix = "" if is_of_all else f"{host}: "
        for line in text.splitlines():
            print(f"{prefix}{line}", file=sys.stderr)
        return REFUSED if errors[host].get("errorCode") == REFUSED else 1
