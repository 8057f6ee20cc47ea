"""The proof that any number of ranks computes what one does, and the cause where it does not."""
