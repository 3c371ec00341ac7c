"""Finished runs, read and compared. Nothing here trains."""
