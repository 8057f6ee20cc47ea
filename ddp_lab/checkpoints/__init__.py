"""Checkpoints of a run: what they hold, how they are written and verified, which one is resumed."""
