"""Runs the phases of a plan and stops when it is told to."""
