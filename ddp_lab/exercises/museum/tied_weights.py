"""Gradients of a language model on two stages: the first embeds, the last has the body and head.

The head multiplies by the table of the embedding, so both stages hold the table. Ranks between the
first and the last have no layers and only return.
"""

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

TOKENS = 7
WIDTH = 5


def make_batch() -> torch.Tensor:
    return torch.randint(TOKENS, (6, 4), generator=torch.Generator().manual_seed(5))


def loss_of(
    hidden: torch.Tensor, body: torch.Tensor, table: torch.Tensor, tokens: torch.Tensor
) -> torch.Tensor:
    """Return the mean loss of the next tokens."""
    outputs = torch.tanh(hidden @ body) @ table.T
    return cross_entropy(outputs[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def step(rank: int, world_size: int, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()
    body = torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()
    last = world_size - 1
    if world_size == 1:
        loss_of(table[batch], body, table, batch).backward()
        return {"table": table.grad, "body": body.grad}

    pair = dist.new_group([0, last])
    if rank == 0:
        embedded = table[batch]
        dist.send(embedded.detach(), last)
        gradient = torch.empty_like(embedded)
        dist.recv(gradient, last)
        embedded.backward(gradient)
        gradients = {"table": table.grad}
    elif rank == last:
        hidden = torch.empty(*batch.shape, WIDTH, dtype=torch.float64)
        dist.recv(hidden, 0)
        loss_of(hidden.requires_grad_(), body, table, batch).backward()
        dist.send(hidden.grad, 0)
        gradients = {"table": table.grad, "body": body.grad}
    else:
        return {}
    dist.barrier(group=pair)
    return gradients


if __name__ == "__main__":
    from ddp_lab.proof.foreign import verify

    print(verify(step, make_batch()))
