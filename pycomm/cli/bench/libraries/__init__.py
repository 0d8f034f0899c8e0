"""What ``pycomm bench`` compares, a file each: the libraries' collectives, under one face."""

COMMUNICATOR = "communicator"
"""``--backend`` and ``--peers`` call :class:`pycomm.Communicator` by this name."""
