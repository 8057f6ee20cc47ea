"""Performance options: how a training step is executed, never what it computes."""
