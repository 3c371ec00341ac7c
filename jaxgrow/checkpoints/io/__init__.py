"""Files: how are checkpoints read from and written to disk safely?"""
