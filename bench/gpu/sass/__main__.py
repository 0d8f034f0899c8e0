import sys

from bench.gpu.sass.command import main

if __name__ == "__main__":
    sys.exit(main())
