"""``pycomm demo``: trains one model in several ways on local ranks, and shows what that changed.

``command`` reads the arguments and starts the ranks, ``train`` is the work of each rank on this host and over the slow
link that ``network`` makes, ``kill`` that in which one of them dies, ``results`` turns their reports into numbers,
``report`` and ``plot`` show those.
"""
