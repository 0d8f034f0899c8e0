"""Compression methods: the configuration of each, and its codec unless that is in ``sparse``."""
