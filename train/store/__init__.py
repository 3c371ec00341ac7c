"""A run on disk: its folder, checkpoints and log, and the ledger of its cost."""
