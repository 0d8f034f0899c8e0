"""``python -m bench.slow_network``: training over slow links; and ``.link``, all_reduce against simulation."""
