"""A run on disk: its folder, its checkpoints, its log, and what it has cost."""
