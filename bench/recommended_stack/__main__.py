import sys

from bench.recommended_stack.command import main

if __name__ == "__main__":
    sys.exit(main())
