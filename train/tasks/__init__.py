"""Tasks that models are fine-tuned for: their files, how a model reads them, and how its answers are judged."""
