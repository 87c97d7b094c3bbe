"""What is checked before a run starts: settings against files and imports, engines against the run.

Not here: rules that need no file and no import (config).
"""
