"""Membership of a group that ranks may leave: who is left, and what all of them go on from."""
