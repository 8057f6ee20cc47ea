"""Predictions of memory and time, made from shapes without a GPU. It trains nothing and does not read the config."""
