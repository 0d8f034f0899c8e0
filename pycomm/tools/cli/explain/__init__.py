"""``pycomm explain``: what the flight recorders of all ranks say together."""
