"""Check of spot_the_bug: the lines of the errors in the programs of the museum."""

from types import ModuleType

from ddp_lab.exercises.explain import Call, Wrong, expect_only
from ddp_lab.exercises.mends import MENDS, lines_of, source_of

WRITE = ("wrong_lines",)
RANKS = (2,)
HINTS = (
    "Run a program: `python exercises/museum/sum_for_mean.py` compares 2 and 4 ranks with one, and "
    "names the first tensor that differs, its factor, and the likely cause.",
    "Which samples, weights and divisors does a rank know, and which of them should be those of "
    "all ranks? Read each collective: is what goes in a part, or complete already?",
    "Where something is missing, name the line that should be another: the call after which the "
    "ranks should have agreed, or the branch that forgets the other case.",
)
FILES = {f"museum/{name}.py": source_of(name) for name in MENDS}  # which the learner gets, too


def check(theirs: ModuleType, calls: list[Call]) -> None:
    answers = theirs.wrong_lines()
    expect_only(calls, (), "the programs are read, or run by themselves")
    if not isinstance(answers, dict):
        raise Wrong(
            f"wrong_lines returned {type(answers).__name__}: expected a dict from the name of a "
            "program to the number of a line"
        )
    unknown = [name for name in answers if name not in MENDS]
    if unknown:
        raise Wrong(f"{unknown[0]!r} is no program; the programs are {', '.join(MENDS)}")
    wrong = [name for name in MENDS if name in answers and not is_right(name, answers[name])]
    if wrong:
        explain(wrong[0], answers[wrong[0]])
    missing = [name for name in MENDS if name not in answers]
    if missing:
        raise Wrong(
            f"{len(answers)} of {len(MENDS)} lines are right; {missing[0]} is missing. In this "
            f"program {MENDS[missing[0]].symptom}."
        )


def is_right(name: str, answer: object) -> bool:
    """Whether an answer is a line of a program's error."""
    return isinstance(answer, int) and answer in lines_of(name)


def explain(name: str, answer: object) -> None:
    """Raise an error about the first wrong answer."""
    lines = source_of(name).splitlines()
    if not isinstance(answer, int) or isinstance(answer, bool):
        raise Wrong(f"{name}: {answer!r} is no number of a line")
    if not 1 <= answer <= len(lines):
        raise Wrong(f"{name}: there is no line {answer}; museum/{name}.py has {len(lines)}")
    text = lines[answer - 1].strip()
    if not text:
        raise Wrong(f"{name}: line {answer} is empty")
    raise Wrong(
        f"{name}: line {answer}, `{text}`, is not the cause. In this program {MENDS[name].symptom}."
    )
