"""How bytes get from rank to rank. One interface (``base.Transport``), one file per way."""
