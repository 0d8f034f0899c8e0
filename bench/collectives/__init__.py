"""``python -m bench.collectives``: all_reduce on one host; and ``.choices`` of "auto", and ``.scale`` to many ranks."""
