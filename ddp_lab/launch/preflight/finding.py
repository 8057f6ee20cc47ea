"""The result of a check."""

import json
from collections.abc import Callable
from typing import Literal, NamedTuple

from ddp_lab.observe.log import log
from ddp_lab.world.runtime import Runtime


class Finding(NamedTuple):
    """The result of one check.

    Attributes:
        level: How serious it is.
        about: Name of the check.
        text: What was found and, for a warning or an error, the remedy.
    """

    level: Literal["ok", "warning", "error"]
    about: str
    text: str

    def __str__(self) -> str:
        return f"{self.level:8} {self.about}: {self.text}"


def agree_on(runtime: Runtime, key: str, find: Callable[[], Finding]) -> Finding:
    """Let rank 0 check something, and return its finding on every rank, or raise its error on every rank. Collective."""
    return Finding(*json.loads(runtime.agree(key, lambda: json.dumps(find()))))


def warn(findings: list[Finding], runtime: Runtime) -> None:
    """Log the warnings among `findings` once per node. Call it after logging is set up."""
    for finding in findings:
        if finding.level == "warning" and runtime.local_rank == 0:
            log.warning(finding.text)
