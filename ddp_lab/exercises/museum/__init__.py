"""Programs that train wrongly on several ranks, each with one error, and rightly on one.

`step(rank, world_size, batch)` is what `ddp_lab.verify` calls. `python FILE` shows what it finds.
"""
