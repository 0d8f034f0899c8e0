"""Parts that all benches share: arguments, groups of ranks, MPI, busy processes, durations, the file with figures."""
