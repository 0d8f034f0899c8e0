"""``python -m bench.gpu``: tests and measurements on one GPU; and ``.report``, which prints its reports again."""
