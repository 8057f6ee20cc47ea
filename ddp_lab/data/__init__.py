"""Datasets, augmentation, and the shard of samples that each rank reads.

Nothing here depends on what the ranks compute.
"""
