"""What ``attach`` and a step cost as ranks, parameters, bytes and buckets grow."""
