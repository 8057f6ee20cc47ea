"""Text from a trained language model, one token after the other."""

import torch
from torch import nn

from ddp_lab.world.runtime import Runtime


@torch.no_grad()
def generate(model: nn.Module, prompt: bytes, tokens: int, temperature: float, runtime: Runtime, context: int) -> bytes:
    """Return the bytes that follow a prompt, according to a model whose tokens are bytes.

    Nothing is cached: each token costs a forward pass of at most `context` tokens.

    Args:
        model: in evaluation mode.
        prompt: at least one byte.
        tokens: number of bytes to draw.
        temperature: divides the logits; 0: the most probable token.
        runtime: the device and the precision.
        context: the largest number of tokens that the model takes.
    """
    model = model.to(runtime.device)
    generator = torch.Generator().manual_seed(0)
    found = torch.tensor([list(prompt)], device=runtime.device)
    for _ in range(tokens):
        with runtime.autocast():
            logits = model(found[:, -context:])[0, -1].float().cpu()
        if temperature == 0:
            token = logits.argmax()[None]
        else:
            token = torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)
        found = torch.cat([found, token[None].to(found.device)], 1)
    return bytes(found[0, len(prompt) :].tolist())
