"""data=text"""

import numpy as np
import torch
from settings import CONTEXT, ROOT
from torch import Tensor


def load_data() -> dict[str, tuple[Tensor, Tensor]]:
    """Return the bytes of a text, uint8 [n, context], and the bytes that follow each."""
    text = torch.from_numpy(np.fromfile(ROOT, np.uint8))
    end = (len(text) - 1) // CONTEXT * CONTEXT
    return {"train": (text[:end].view(-1, CONTEXT), text[1 : end + 1].view(-1, CONTEXT))}
