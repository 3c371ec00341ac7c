"""Configs: which settings does a run have?"""
