"""Networks as chains of blocks, and the cut of a chain into stages. torch.distributed is not used here."""
