"""Peak memory of training, by method."""
