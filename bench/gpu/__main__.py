import sys

from bench.gpu.command import main

if __name__ == "__main__":
    sys.exit(main())
