"""A GPT on the bytes of a text.

python examples/gpt.py README.md, or torchrun --nproc_per_node=2 examples/gpt.py README.md fsdp.
"""

import sys
from functools import partial
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from ddp_lab import Lab, tasks
from ddp_lab.models.gpt import gpt

CONTEXT = 64
STEPS = 60
text = torch.tensor(list(Path(sys.argv[1]).read_bytes()))
end = (len(text) - 1) // CONTEXT * CONTEXT
# tokens, and those that follow
data = TensorDataset(text[:end].view(-1, CONTEXT), text[1 : end + 1].view(-1, CONTEXT))

with Lab(strategy=sys.argv[2] if len(sys.argv) > 2 else "single", seed=0) as lab:
    model = gpt(vocabulary=256, context=CONTEXT, depth=2, width=64, heads=4)
    trainer = lab.trainer(
        model,
        tasks.Tokens(),
        partial(torch.optim.AdamW, lr=3e-3),
        batch_size=16,
        max_grad_norm=1.0,
        schedule=lambda step: min(1.0, (step + 1) / 10),
    )
    while trainer.progress.step < STEPS:
        for tokens, following in trainer.batches(data, trainer.progress.epoch):
            loss = trainer.step(tokens, following)
        lab.log(step=trainer.progress.step, loss=loss)
    lab.log(**trainer.evaluate(data))
    written = text[:CONTEXT].tolist()
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        logits = trainer.predict(torch.tensor([written[-CONTEXT:]]))[0, -1].cpu()
        written.append(int(logits.softmax(0).multinomial(1, generator=generator)))
    lab.print(bytes(written[CONTEXT:]).decode(errors="replace"))
