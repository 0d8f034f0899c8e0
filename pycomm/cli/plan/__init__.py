"""``pycomm plan``: what the algorithms cost on a network, before anything runs there."""
