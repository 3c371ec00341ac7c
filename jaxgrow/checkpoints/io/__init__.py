"""How are the files of checkpoints read from disk, and written to it safely?"""
