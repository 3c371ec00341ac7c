"""Integrations: how do models and runs of other frameworks use the library?"""
