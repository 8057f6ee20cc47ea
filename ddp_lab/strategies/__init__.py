"""One file for each way of spreading a training step over devices, over one base class. No loop and no files here."""
