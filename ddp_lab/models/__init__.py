"""Networks as chains of blocks, models of users and of torchvision, weights, and the cut of a chain into stages.

torch.distributed is not used here.
"""
