"""Tools around training: the command line, launching ranks, monitoring."""
