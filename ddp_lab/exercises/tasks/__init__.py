"""The reference solutions.

`ddp-lab exercise start` writes one without the bodies of what the learner is to write.
"""
