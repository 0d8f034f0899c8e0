"""The command line: ``pycomm info`` and ``pycomm demo``."""
