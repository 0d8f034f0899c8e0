"""Selected entries: the codec that sends them, and three ways to sum them over the ranks.

``sums`` has two, gathering every rank's entries and summing them among zeros; ``balanced`` has the
third, parts with an owner each; ``choice`` takes the one that sends the fewest bytes.
"""
