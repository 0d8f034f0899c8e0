"""Monitoring: figures of a Reducer, every so many steps, written where one looks at them."""

from pycomm.tools.monitoring.monitor import FIELDS, Monitor, monitor

__all__ = ["FIELDS", "Monitor", "monitor"]
