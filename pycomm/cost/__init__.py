"""Cost of compression: what a method takes on a network, and which one pays.

``pricing`` rehearses methods and measures links, ``planning`` prices them on described networks before
training, ``auto`` chooses among them while it runs.
"""
