"""Ahead-of-time (AOT) compilation: check whether a plan fits a machine that is not present."""
