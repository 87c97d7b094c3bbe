"""Engines' HTTP interfaces and command lines: one module a dialect, and tables of their differences.

Pure: requests out, replies in, argv. No sockets, no tasks, no processes.
Not here: what sends requests, and what decides when.
"""
