"""A language model on workers of which one is slow, or comes and goes, by every method of training without lockstep."""
