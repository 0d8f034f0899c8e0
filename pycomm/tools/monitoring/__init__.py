"""Monitoring: figures of a Reducer, every so many steps, written where one looks at them."""

from pycomm.tools.monitoring.monitor import Monitor, monitor
from pycomm.tools.monitoring.writers import FIELDS

__all__ = ["FIELDS", "Monitor", "monitor"]
