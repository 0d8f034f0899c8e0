"""Cost of compression: the time a method takes on a network, and which method is worthwhile.

``pricing`` measures methods and links, ``planning`` prices methods on described networks before training,
and ``auto`` chooses among them during training. ``calibration`` measures a network, to be described.
"""
