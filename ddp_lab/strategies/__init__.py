"""One file for each way of spreading a training step over devices, on one base class. No training loop and no file access."""
