"""`ddp-lab predict --prompt`: which tokens a model sees, and how the next one is drawn."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from ddp_lab.commands import predict
from ddp_lab.run.predict import generate
from ddp_lab.run.trained import InputFormat, TrainedRun
from ddp_lab.tasks.tokens import Tokens
from ddp_lab.world.runtime import Runtime


class NextLetter(nn.Module):
    """Predicts the letter after the first one that it is given, and notes what it is given."""

    def __init__(self):
        super().__init__()
        self.contexts: list[bytes] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.contexts.append(bytes(tokens[0].tolist()))
        logits = torch.zeros(*tokens.shape, 256)
        logits[0, -1, tokens[0, 0] + 1] = 9.0
        return logits


@pytest.mark.parametrize(
    ("prompt", "context", "text", "contexts"),
    [
        (b"abcd", 3, b"cde", [b"bcd", b"cdc", b"dcd"]),
        (b"abcd", 4, b"bcd", [b"abcd", b"bcdb", b"cdbc"]),
        (b"ab", 4, b"bbb", [b"ab", b"abb", b"abbb"]),
        (b"a", 1, b"bcd", [b"a", b"b", b"c"]),
    ],
    ids=["longer", "equal", "shorter", "one"],
)
def test_model_sees_the_last_tokens_of_its_context(prompt, context, text, contexts):
    model = NextLetter()
    assert generate(model, prompt, 3, 0.0, Runtime("cpu"), context) == text
    assert model.contexts == contexts


class Drawn(nn.Module):
    """Predicts byte 1 with twice the odds of byte 0, and no other one."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = torch.full((*tokens.shape, 256), -math.inf)
        logits[..., 0] = 0.0
        logits[..., 1] = math.log(2.0)
        return logits


@pytest.mark.parametrize(("temperature", "share"), [(1.0, 2 / 3), (0.5, 4 / 5), (0.0, 1.0)])
def test_temperature_divides_the_logits(temperature, share):
    """At temperature 1/2 the odds are squared: 4 to 1."""
    text = generate(Drawn(), b"\0", 3000, temperature, Runtime("cpu"), 1)
    assert sum(text) / len(text) == pytest.approx(share, abs=0 if share == 1 else 0.03)


def test_prompt_longer_than_the_context_is_continued_by_the_command(command, monkeypatch):
    class Data:
        shape = {"context": 3}

    run = TrainedRun(
        Data(), Path("step_00000001.pt"), NextLetter(), Tokens, InputFormat([0.0], [1.0], None)
    )
    monkeypatch.setattr("ddp_lab.run.build_trained.open_run", lambda folder, checkpoint: run)
    line = [
        "runs/mine",
        "--prompt",
        "abcd",
        "--tokens",
        "3",
        "--temperature",
        "0",
        "--device",
        "cpu",
    ]
    assert command(predict.main, *line)[:2] == (0, "abcdcde\n")
