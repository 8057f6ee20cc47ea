"""One file for each way of distributing a training step over devices, and a base class.

No training loop, no file access.
"""
