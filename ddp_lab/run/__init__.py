"""The construction of a run from its config (build.py), its execution (train.py), and what is done
with a trained run.
"""
