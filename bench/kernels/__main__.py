import sys

from bench.common.arguments import plain_parser
from pycomm.cli.bench.kernels import command

if __name__ == "__main__":
    parser = plain_parser("bench.kernels", command.__doc__)
    command.add_arguments(parser)
    sys.exit(command.run(parser.parse_args()))
