"""A check of hosts, their links and their settings before a job, which ``python -m pycomm.check`` runs."""
