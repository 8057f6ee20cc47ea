"""The distributed environment of this process: rank, device, process group, and its neighbours."""
