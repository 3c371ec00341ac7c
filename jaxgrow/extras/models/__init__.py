"""Model families that a reader of the methods may skip."""
