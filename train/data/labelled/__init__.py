"""Labelled data: tasks that models are fine-tuned on."""
