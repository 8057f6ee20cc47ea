"""Experiment trackers: what rank 0 records goes to each that the config key `tracker` names.

One file for each.
"""
