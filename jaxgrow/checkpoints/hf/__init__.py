"""Hugging Face: how do its names, layouts and settings correspond to the models here? One file for each family."""
