"""What ``pycomm bench`` compares, a file each: the libraries' collectives, under one face."""
