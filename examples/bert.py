"""A model of transformers as it is: samples, batches and outputs are dicts.

python examples/bert.py, or torchrun --nproc_per_node=2 examples/bert.py ddp.
It needs `pip install transformers`, and downloads nothing: the weights are random.
"""

import sys
from functools import partial

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification

from ddp_lab import Lab, tasks

LONGEST = 12


class Brackets(Dataset):
    """Texts of two words, "(" and ")", of different lengths, and whether "(" is more frequent."""

    def __init__(self, samples: int, seed: int):
        self.samples = samples
        self.seed = seed

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict:
        draw = torch.Generator().manual_seed(self.seed + index)
        length = int(torch.randint(3, LONGEST, [], generator=draw))
        words = torch.randint(1, 3, [length], generator=draw)
        return {"input_ids": words, "labels": int(2 * (words == 1).sum() > length)}


def collate(samples: list[dict]) -> dict[str, torch.Tensor]:
    """Pad the texts to the longest one of the local batch, with a mask of what is no padding."""
    words = pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    labels = torch.tensor([sample["labels"] for sample in samples])
    return {"input_ids": words, "attention_mask": (words > 0).long(), "labels": labels}


with Lab(strategy=sys.argv[1] if len(sys.argv) > 1 else "single", seed=0) as lab:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=3, num_attention_heads=2, **sizes, **no_dropout)
    training = Brackets(400, seed=0)
    validation = Brackets(200, seed=10**6)
    trainer = lab.trainer(
        BertForSequenceClassification(config),
        tasks.Classification(),
        partial(torch.optim.AdamW, lr=3e-3),
        batch_size=20,
        targets="labels",
        collate_fn=collate,
        example=training[0],
    )
    for epoch in range(2):
        for inputs, labels in trainer.batches(training, epoch):
            loss = trainer.step(inputs, labels)
        lab.log(epoch=epoch + 1, train_loss=loss, **trainer.evaluate(validation))
