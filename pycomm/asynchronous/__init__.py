"""Training without lockstep: parameter servers."""
