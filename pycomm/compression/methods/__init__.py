"""Compression methods, a file each: the configuration, and the codec if no other method shares it."""
