"""Command line: ``pycomm info``, ``demo``, ``plan``, ``bench``, ``trace`` and ``explain``."""
