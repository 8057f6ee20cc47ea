"""Exercises that check themselves: the mechanisms of distributed training, written by the learner,
run on a few processes.
"""
