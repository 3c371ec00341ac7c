"""The engine: how does a phase run, and what does it leave on disk?"""
