"""Analysis: what did the runs show? Nothing here trains."""
