"""Selected entries: the codec that sends them, and three ways to sum them over the ranks.

``sums`` gathers every rank's entries, or sums dense arrays; ``balanced`` sums by parts, each with an owner.
``codec`` chooses the way that sends the fewest bytes.
"""
