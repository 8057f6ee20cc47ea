"""Checkpoints of a run: what they hold, how they are written and verified, and which one a launch
resumes from.
"""
