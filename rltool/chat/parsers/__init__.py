"""How a model writes tool calls and reasoning into its text: one file per format. Pure.

Not here: requests, sessions, templates.
"""
