"""Selected entries: the codec that sends them, and two ways to sum them over the ranks.

``sums`` gathers every rank's entries, or sums dense arrays. ``codec`` chooses the way that sends the fewest bytes.
"""
