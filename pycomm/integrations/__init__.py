"""Integrations of pycomm with training libraries; each module requires its library, and is imported by name.

:mod:`pycomm.integrations.transformers` (Trainer), :mod:`pycomm.integrations.accelerate`,
:mod:`pycomm.integrations.lightning` (Trainer and Fabric). Other libraries, such as Ray Train, need none: see
``docs/trainers.md``.
"""
