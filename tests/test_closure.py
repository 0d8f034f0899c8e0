"""What ``attach`` imports: all modules of pycomm that are loaded after its steps have a budget of lines."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

from tests.ranks import free_port
from tests.test_shape import FUNCTIONS, imported, parsed, python_files

BUDGET = 17_500
"""Lines of Python that a change may not exceed without saying why in its message."""

THREE_STEPS = """
import sys
import torch, torch.distributed as dist
import pycomm

dist.init_process_group("gloo")
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
reducer = pycomm.attach(optimizer, model)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
assert reducer.stats()["steps"] == 3
print(*(name for name in sys.modules if name.partition(".")[0] == "pycomm"))
dist.barrier()
"""

IN_FUNCTIONS = {
    "pycomm.collectives.backend._make": "for users of the backend",
    "pycomm.collectives.backend.make_group": "for users of the backend",
    "pycomm.collectives.backend.stats": "for users of the backend",
    "pycomm.collectives.recorder.watch._failed": "writes a file after a failure",
    "pycomm.collectives.recorder.watch._on_signal": "writes a file on SIGUSR2",
    "pycomm.collectives.channel._make_nccl": "for arrays on a GPU",
    "pycomm.collectives.channel.gpu": "for arrays on a GPU",
    "pycomm.collectives.communicator.empty": "for memory on a GPU",
    "pycomm.collectives.transport.algorithms._schedules": "for algorithms other than the transport's own",
    "pycomm.collectives.transport.choice._make": "between hosts",
    "pycomm.collectives.transport.choice.choose_transport": 'for transport="torch"',
    "pycomm.training.reducer.attach._second_average": "for PYCOMM_COMPARE",
    "pycomm.training.reducer.attach._sharded": "for `shard=`",
    "pycomm.training.reducer.attach._surviving": "for `survive=`",
    "pycomm.training.cost.named._auto": 'for compression="auto"',
    "pycomm.training.reducer.statistics.trace_of": "for `pycomm trace`",
    "pycomm.training.reductions.replicas._report": "for replicas that differ",
    "pycomm.tools.cli.bench.command._measure": "torch, after the arguments have been read",
    "pycomm.tools.cli.bench.command.why_not": "torch, after the arguments have been read",
    "pycomm.tools.cli.demo.command._run_and_report": "rich and matplotlib, after the arguments have been read",
    "pycomm.tools.cli.demo.command._train": "torch, after the arguments have been read",
    "pycomm.tools.cli.demo.command._run_ranks": "torch, after the arguments have been read",
    "pycomm.tools.cli.plan.calibrate._measure": "torch, which no plan of given networks needs",
    "pycomm.tools.cli.plan.command._networks": "numpy, for the list of networks in the help",
    "pycomm.tools.cli.trace.command.run": "matplotlib, after the arguments have been read",
    "pycomm.tools.monitoring.monitor._live_table": "rich, an extra",
}
"""Functions that import parts of pycomm when they are called, and why."""


def lines_of(name: str) -> int:
    """Return the lines of a loaded module; 0 for the compiled one."""
    path = python_files().get(name)
    return 0 if path is None else len(path.read_text().splitlines())


def test_three_steps_load_no_more_than_the_budget() -> None:
    """In new processes, two ranks of one host: the one that loads more counts."""
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", THREE_STEPS],
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
            env={**os.environ, **shared, "RANK": rank, "LOCAL_RANK": rank},
        )
        for rank in ("0", "1")
    ]
    try:
        loaded = [rank.communicate(timeout=100)[0].split() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert all("pycomm.training.reducer.attach" in names for names in loaded)
    lines = max(sum(map(lines_of, names)) for names in loaded)
    assert lines <= BUDGET, f"{lines} lines in {max(map(len, loaded))} modules"


def functions_that_import(module: str, path: Path, modules: dict[str, Path]) -> set[str]:
    """Return the functions and methods of a file in which some of ``modules`` are imported."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return {
        f"{module}.{node.name}"
        for node in ast.walk(parsed(path))
        if isinstance(node, FUNCTIONS) and any(imported(node, package, modules))
    }


def test_imports_inside_functions_have_a_reason() -> None:
    files = python_files()
    found = set().union(*(functions_that_import(module, path, files) for module, path in files.items()))
    assert found == IN_FUNCTIONS.keys()


def test_imports_inside_functions_are_found(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("import b\n\nclass A:\n    def f(self):\n        from b import c\n\ndef g():\n    import d\n")
    assert functions_that_import("a", path, {"b": path}) == {"a.f"}
