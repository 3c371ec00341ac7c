"""Configs: what did the user ask for?"""
