"""Analysis of finished runs. Nothing here trains."""
