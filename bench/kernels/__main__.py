import sys

from bench.kernels.command import main

if __name__ == "__main__":
    sys.exit(main())
