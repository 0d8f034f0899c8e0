"""``pycomm demo``: trains one model in several ways on local ranks, and shows what that changed.

``command`` reads the arguments and starts the ranks, ``train`` is the work of each rank, ``live`` draws
while they run, ``figures`` turns their reports into numbers, ``report`` and ``plot`` show those.
"""
