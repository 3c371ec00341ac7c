"""Optimizers: how are the parameters updated?"""
