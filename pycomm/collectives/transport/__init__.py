"""Transports, which move bytes between ranks. One interface (``base.Transport``), one file per transport."""

TRANSPORTS = ("auto", "shared_memory", "tcp", "hierarchical", "torch")
