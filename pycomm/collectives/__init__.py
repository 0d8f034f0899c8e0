"""Collectives: communicators, transports, the backend for torch.distributed, the memory that they send."""
