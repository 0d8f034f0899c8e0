"""``pycomm plan``: prices of algorithms, and of compression, on a network before anything runs there."""
