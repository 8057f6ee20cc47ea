"""Datasets, augmentation, and which rank reads which sample. It knows how many ranks share a batch, not what they compute."""
