"""``pycomm plan``: estimates of algorithms, compression and splits on a network, before anything runs there."""
