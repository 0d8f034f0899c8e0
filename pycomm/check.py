"""``torchrun ... -m pycomm.check``: a check of the hosts before a job, started as the job would be."""

import os
import sys

from pycomm.tools.check.command import main

if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a thread of torch's process group may wait for ranks that have failed
