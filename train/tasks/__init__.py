"""Tasks that models are judged by."""
