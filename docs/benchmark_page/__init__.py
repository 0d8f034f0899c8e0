"""Parts of docs/benchmarks.py: reports and their origin, tables, a section per bench, the README's table.

Needs neither pycomm nor torch.
"""
