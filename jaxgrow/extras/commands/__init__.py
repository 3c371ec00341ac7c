"""Commands of ``jaxgrow`` beside those of the core, which find them by `jaxgrow.registry`."""
