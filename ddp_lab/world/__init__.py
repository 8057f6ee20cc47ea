"""The distributed environment of this process: rank, device, process group, and the other processes
of this machine.
"""
