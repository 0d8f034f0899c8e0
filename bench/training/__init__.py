"""``python -m bench.training``: whole training steps on one host, in time and in memory."""
