"""What a model is trained for: one file for each task, with its losses and its metrics as sums over samples."""
