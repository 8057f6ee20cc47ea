"""This process among the others: rank, device, process group, and the processes of this machine. No training here."""
