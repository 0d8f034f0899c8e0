import sys

from bench.slow_network.command import main

if __name__ == "__main__":
    sys.exit(main())
