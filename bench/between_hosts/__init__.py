"""``python -m bench.between_hosts``: all_reduce between hosts against a floor and peers."""
