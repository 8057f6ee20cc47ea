"""What a run shows: log files, TensorBoard, plots, profiles and traces. Nothing here changes what is computed."""
