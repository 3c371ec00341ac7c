"""The scripts that people run, and what they share. Effects live here; the mathematics is in `jaxgrow`."""
