"""The output of a run: log files, TensorBoard, plots, profiles and traces. Nothing here changes what is computed."""
