"""Monitoring: figures of a Reducer, every so many steps, written where one looks at them."""

from pycomm.monitoring.monitor import Monitor, monitor
from pycomm.monitoring.writers import FIELDS

__all__ = ["FIELDS", "Monitor", "monitor"]
