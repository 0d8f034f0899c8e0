"""``pycomm bench``: collectives against their peers, and kernels against torch, for whoever has the package."""
