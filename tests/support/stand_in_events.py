"""CUDA events without a GPU: the time is a number of the test."""

from typing import Any

import torch


class Event:
    """An event that happens at once, or when the test says so.

    Attributes:
        now: seconds on the device, of all events.
        is_late: whether the device has not reached any event yet.
        recorded: number of records of all events.
    """

    now = 0.0
    is_late = False
    recorded = 0

    def __new__(cls, enable_timing=False, blocking=False, interprocess=False, external=False):
        assert enable_timing
        event = super().__new__(cls)
        event.external = external
        return event

    def record(self) -> None:
        Event.recorded += 1
        self.at = Event.now

    def query(self) -> bool:
        return not Event.is_late

    def elapsed_time(self, other: "Event") -> float:
        assert not Event.is_late, "it would wait for the device"
        return 1000 * (other.at - self.at)


class OldEvent(Event):
    """That of a torch without external events."""

    def __new__(cls, enable_timing=False, blocking=False, interprocess=False):
        return super().__new__(cls, enable_timing)


def replace_events(monkeypatch: Any, kind: type[Event] = Event) -> type[Event]:
    """Let EventTimer work without a GPU; return the class of its events."""
    Event.now = 0.0
    Event.is_late = False
    Event.recorded = 0
    monkeypatch.setattr(torch.cuda, "Event", kind)
    return Event
