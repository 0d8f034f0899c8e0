"""``pycomm demo``: trains one model by several methods on local ranks, and compares them.

``command`` reads the arguments and starts the ranks. ``train`` is the work of each rank: on this host, over the slow
link that ``network`` makes, and with a rank that dies. ``results`` computes figures from their reports; ``report`` and
``plot`` show them.
"""
