"""The construction of a run from its config, its execution, and what follows training.

These are build.py, train.py, and the other files.
"""
