"""Runs of other trainers and libraries: their checkpoints are grown together with the optimizer state."""
