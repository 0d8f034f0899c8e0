"""Tests of pycomm.horovod: what scripts for Horovod ask of it, by ranks that are real processes."""
