"""What a run would need, from the real strategy on fake tensors, and what it takes, measured.

It trains no model.
"""
