import sys

from bench.common.arguments import plain_parser
from pycomm.cli.bench.kernels.arguments import DESCRIPTION, add_arguments

if __name__ == "__main__":
    parser = plain_parser("bench.kernels", DESCRIPTION)
    add_arguments(parser)
    arguments = parser.parse_args()
    sys.exit(arguments.run(arguments))
