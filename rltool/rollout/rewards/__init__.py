"""Rewards: the shipped ones, users' own, judges and reward models, and the processes that run them.

Not here: advantages (algorithms).
"""
