"""``python -m bench.gpu``: everything about one GPU; and ``.report``, which prints its reports again."""
