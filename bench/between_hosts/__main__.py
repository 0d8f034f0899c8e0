import sys

from bench.between_hosts.command import main

if __name__ == "__main__":
    sys.exit(main())
