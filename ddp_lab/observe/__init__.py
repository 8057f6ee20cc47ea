"""The output of a run: log files, trackers, plots, profiles and traces.

Nothing here changes what is computed.
"""
