"""Datasets, augmentation, and which rank reads which sample. Knows how many ranks share a batch, not what they do with it."""
