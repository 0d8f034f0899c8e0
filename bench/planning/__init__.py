"""``python -m bench.planning``: what the planner predicts of steps on one host, against what is measured there."""
