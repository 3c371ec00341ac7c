"""Tasks for the evaluation of models."""
