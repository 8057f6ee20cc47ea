"""The library: a loop of the user's own, or a function of a notebook, on any number of ranks."""
