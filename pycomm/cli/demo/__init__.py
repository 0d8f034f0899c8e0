"""``pycomm demo``: one model trained several ways on local ranks, and what that changed.

``command`` reads the arguments and has the ranks started, ``train`` is what each of them does, ``live``
draws while they run, ``figures`` turns what they report into numbers, ``report`` and ``plot`` show those.
"""
