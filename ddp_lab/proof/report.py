"""What a comparison with one rank has shown: a row for each strategy or number of ranks."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

OutcomeName = Literal["equal", "different", "refused", "failed"]
INDENT = 4  # spaces before a difference and its cause


@dataclass(frozen=True)
class Difference:
    """The first tensor that differs from that of one rank, and why.

    Attributes:
        name: of the tensor.
        factor: the constant that the expected tensor is multiplied by; None: there is no constant.
        cause: the likely cause, a sentence.
        relative: the largest difference of an element, divided by the largest expected element.
        where: which tensors, ranks and steps differ, for example "all 6 tensors, on every rank".
    """

    name: str
    factor: float | None
    cause: str
    relative: float
    where: str

    def __str__(self) -> str:
        if self.factor is None:
            size = f"differs by {self.relative:.2g} of its largest element"
        else:
            size = f"is {factor_text(self.factor)} the expected tensor"
        return f"{self.name} {size} ({self.where}).\n{self.cause}"


@dataclass(frozen=True)
class Row:
    """The outcome of one comparison.

    Attributes:
        name: of the strategy, or the number of ranks.
        outcome: equal or different; refused: it cannot be compared; failed: it raised an error.
        reason: why it is refused or has failed, or a remark; "" if there is nothing to add.
        difference: if the outcome is "different".
    """

    name: str
    outcome: OutcomeName
    reason: str = ""
    difference: Difference | None = None


@dataclass(frozen=True)
class Report:
    """The outcomes of a proof. `print(report)` shows them as a table.

    Attributes:
        rows: one for each strategy or number of ranks, in their order.
    """

    rows: Sequence[Row]

    @property
    def ok(self) -> bool:
        """Whether something was compared, and nothing differs or has failed."""
        outcomes = [row.outcome for row in self.rows]
        return "equal" in outcomes and not {"different", "failed"} & set(outcomes)

    def __str__(self) -> str:
        width = max((len(row.name) for row in self.rows), default=0)
        lines = list[str]()
        for row in self.rows:
            lines.append(f"{row.name:<{width}}  {row.outcome:<9}  {row.reason}".rstrip())
            if row.difference:
                lines += [" " * INDENT + line for line in str(row.difference).splitlines()]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Return the report as a value that `json.dump` writes.

        Returns:
            {"ok": bool, "rows": [{"name", "outcome", "reason", "difference"}, ...]}. A difference
            is None or has the attributes of `Difference`. Numbers that JSON does not have are
            texts: "nan", "inf".
        """
        rows = [asdict(row) for row in self.rows]
        for row in rows:
            if row["difference"]:
                row["difference"] = {k: json_value(v) for k, v in row["difference"].items()}
        return {"ok": self.ok, "rows": rows}


def json_value(value: Any) -> Any:
    """Return a value, as text if it is a number that JSON does not have."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def factor_text(factor: float) -> str:
    """Return a factor as a multiple or a fraction: x2, x1/2, x0.73."""
    if is_whole(factor):
        return f"x{round(factor)}"
    if factor and is_whole(1 / factor):
        return f"x1/{round(1 / factor)}".replace("1/-", "-1/")
    return f"x{factor:.4g}"


def is_whole(number: float) -> bool:
    """Whether a number is an integer, but for rounding."""
    return math.isfinite(number) and abs(number - round(number)) <= 1e-4 * max(1.0, abs(number))
