"""The config: the schema of every key, its validation, and the error messages."""
