"""``pycomm demo``: one model trained several ways on local ranks, and what that changed.

``command`` reads the arguments, ``launch`` starts the ranks and watches over them, ``train`` is what
each rank does, ``live`` draws while they run, ``figures`` turns what they report into numbers,
``report`` and ``plot`` show those.
"""
