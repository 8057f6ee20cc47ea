"""The check of the machines of a launch: `ddp-lab doctor --fabric`.

Every pair of ranks exchanges data in child processes, and eight faults that make a launch hang or
slow are looked for: one file each. examine.py is the sequence.
"""
