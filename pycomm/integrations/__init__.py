"""Faces of pycomm for scripts that train through other libraries; each module wants its own, and is imported by name.

:mod:`pycomm.integrations.transformers` (Trainer), :mod:`pycomm.integrations.accelerate`,
:mod:`pycomm.integrations.lightning` (Trainer and Fabric). Other libraries, such as Ray Train, need none: see
``docs/trainers.md``.
"""
