"""The training loop, its step, schedule and sums.

It uses strategies through their interface only, and writes no files.
"""
