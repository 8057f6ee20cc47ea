"""Networks as chains of blocks, and how a chain is cut into stages. No torch.distributed here."""
