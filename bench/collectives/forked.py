"""Launcher of many ranks, which imports once, forks, and waits.

    python -m bench.collectives.forked -n 64 python worker.py

torch takes seconds to import, and private memory, in every process that does; forked ranks share what
their parent has imported. It has started nothing by then: no process group, and no thread, which would
not survive the fork.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import traceback

from bench.harness.worker import answer_driver


def main() -> None:
    size = int(sys.argv[sys.argv.index("-n") + 1])
    import torch

    import pycomm

    pycomm.attach, torch.optim.SGD([torch.zeros(1)])  # each imports more at its first use

    gc.collect()
    gc.freeze()  # a collection in a rank would otherwise write to every object, and get a copy of its page
    children = [_fork(rank, size) for rank in range(size)]
    failed = [pid for pid in children if os.waitpid(pid, 0)[1] != 0]
    sys.exit(1 if failed else 0)


def _fork(rank: int, size: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
        answer_driver()
        atexit._run_exitfuncs()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
