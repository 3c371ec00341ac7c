"""Model families: small Flax modules whose parameters name their axes."""
