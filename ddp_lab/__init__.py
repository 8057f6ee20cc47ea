"""ddp_lab: one training loop, every way of spreading it over devices, provably the same."""
