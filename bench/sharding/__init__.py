"""Steps that the ranks of a host take together, beside steps that each rank takes alone."""
