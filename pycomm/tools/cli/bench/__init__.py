"""``pycomm bench``: verifies collectives and times them against other libraries."""
