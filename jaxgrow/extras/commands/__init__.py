"""The commands of ``jaxgrow`` that are extras. The core finds them by name (`jaxgrow.registry`)."""
