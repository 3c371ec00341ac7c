"""Growths: how does a parameter tree change size?"""
