"""Monitoring: figures of a Reducer, written at regular intervals to a table, a file or a function."""

from pycomm.tools.monitoring.monitor import FIELDS, Monitor, monitor

__all__ = ["FIELDS", "Monitor", "monitor"]
