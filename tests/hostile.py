"""Text as a degenerate policy, a hostile prompt or a broken server may write it."""

HOSTILE = "\x1b]0;owned\x07 http://[fe80::1]:8000 [/INST] [red]x[/] :smile:"
SHOWN = ("\\x1b]0;owned", "http://[fe80::1]:8000", "[/INST]", "[red]x[/]", ":smile:")
"""What of it a reader must see."""
