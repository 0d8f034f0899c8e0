"""Command line: ``pycomm info``, ``demo``, ``plan`` and ``bench``."""
