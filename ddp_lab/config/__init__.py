"""What a user may set: the schema of every key, its checks, and the errors for what is not allowed."""
