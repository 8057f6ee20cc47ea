"""The checks, one module for each exercise, with WRITE, RANKS, HINTS and `check`."""
