"""Ahead-of-time (AOT) compilation: does a plan fit on a machine that is not present?"""
