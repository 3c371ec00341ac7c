"""Labelled data: tasks for fine-tuning."""
