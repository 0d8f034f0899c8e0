"""Execution of schedules: which program a rank runs, and how it runs over each transport."""
