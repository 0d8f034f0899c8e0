"""Command line: ``pycomm info``, ``pycomm demo`` and ``pycomm plan``."""
