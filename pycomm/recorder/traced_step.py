"""Environment variables by which ``pycomm trace`` tells the ranks that it starts which step to trace, and where to."""

FOLDER, STEP = "PYCOMM_TRACE", "PYCOMM_TRACE_STEP"
DEFAULT_STEP = 10
