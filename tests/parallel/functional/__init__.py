"""Tests of pycomm.parallel.functional."""
