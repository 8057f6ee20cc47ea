"""Exercises that check themselves.

The learner writes the mechanisms of distributed training, which run on a few processes.
"""
