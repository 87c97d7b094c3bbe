"""Engines' HTTP interfaces and command lines: one module a dialect, and the tables of what differs between them.

Pure: requests out, replies in, argv. No sockets, no tasks, no processes.
"""
