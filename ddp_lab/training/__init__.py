"""The training loop, its step, schedule and sums. Knows strategies by their interface alone; writes no files."""
