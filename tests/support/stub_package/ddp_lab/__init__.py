"""Stands in for ddp_lab on a host, where nothing is trained."""
