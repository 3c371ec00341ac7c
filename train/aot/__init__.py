"""Ahead-of-time compilation: does a plan fit a machine that is absent?"""
