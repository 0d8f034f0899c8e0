"""Parts that all benches share: groups of ranks, durations, tables, the file with the figures."""
