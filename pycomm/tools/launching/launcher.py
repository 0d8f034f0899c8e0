"""``launch`` runs a function on ranks of this host, from a notebook or a script; ``run_ranks`` is for commands."""

from __future__ import annotations

import inspect
import math
import os
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pycomm import checks
from pycomm.collectives.transport.authentication import SECRET, SECRET_FILE
from pycomm.tools.launching import reporting
from pycomm.tools.launching.pool import OnMessage, RankPool
from pycomm.tools.launching.processes import is_being_started
from pycomm.tools.launching.serialize import Sources, add_sources, deserialize, interactive_sources, serialize
from pycomm.tools.launching.serving import UNGUARDED, RankError, send

_INSIDE = "PYCOMM_LAUNCHED"
"""Environment variable of ranks, which the processes that they start inherit."""
_MOST_RANKS = 1024
_OMP = "OMP_NUM_THREADS"


def launch(
    function: Callable[..., Any],
    ranks: int = 2,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    backend: str | None = "gloo",
    output: str | int | None = "all",
    threads: int | None = None,
    environment: Mapping[str, str] | None = None,
    patience: timedelta | float = 1800.0,
    timeout: timedelta | float | None = None,
) -> list[Any]:
    """Call ``function(*args, **kwargs)`` on ranks of this host, and return the results by rank.

    The ranks are new processes in a default process group of torch.distributed. They have ended when this returns,
    raises or is interrupted. Functions defined in a notebook or at a prompt, lambdas and nested functions require
    cloudpickle (``pip install 'pycomm-torch[notebook]'``). In a script, put the call under
    ``if __name__ == "__main__":``, as every rank imports the script.

    Args:
        function: called on every rank. RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE are in its environment, as
            under torchrun.
        ranks: number of ranks, which may exceed the number of cores.
        args, kwargs: arguments of ``function``, the same on all ranks; each rank gets a copy.
        backend: of the process group: "gloo", "pycomm", "nccl" (each rank then takes the GPU of its number), or one
            for each kind of device, "cpu:gloo,cuda:nccl". ``None``: there is no group; ``function`` calls
            ``torch.distributed.init_process_group`` itself, without naming ranks or addresses.
        output: which output of the ranks is shown. "all": every line, with its rank's number; the number of a rank:
            the output of that rank, unchanged (progress bars too); ``None``: nothing.
        threads: torch's threads in each rank, and OMP_NUM_THREADS there; ``None``: OMP_NUM_THREADS of ``environment``
            if it has one, else cores // ranks, at least 1.
        environment: variables that are added to this process's. The ranks also get a new PYCOMM_SECRET, with which
            they authenticate each other, unless PYCOMM_SECRET or PYCOMM_SECRET_FILE is set.
        patience: timeout of the process group, in seconds or as a ``timedelta``: limit of every wait of a rank for
            another. A rank that dies is noticed at once.
        timeout: limit of the whole call, or ``None``.

    Returns:
        Copies of the results of ``function`` by rank; they must be picklable. ``sys.exit()`` and ``sys.exit(0)``
        return ``None``. The ranks' threads have ended, and their exit handlers have run.

    Raises:
        TypeError, ValueError: an argument is wrong, or cannot be sent to another process. No rank was started.
        RuntimeError: this process is itself a rank, of ``launch`` or of torchrun.
        RankError: a rank raised an exception, was killed, ended without a result, or returned something that cannot
            be pickled; or the ranks took longer than ``timeout``. The message has the traceback of the rank that
            failed first, or shows where each rank was. ``__cause__`` is the rank's exception if it can be pickled.
            The other ranks were ended.
    """
    _refuse_in_rank()
    _check_function(function)
    pool_settings = _pool_settings(ranks, backend, output, threads, environment, patience, timeout)
    call = serialize("function, with args and kwargs,", (function, _arguments(args), _strings("kwargs", kwargs)))
    try:
        with reporting.display() as show, RankPool(**pool_settings) as pool:
            results = pool.run(_call, call, interactive_sources(), on_message=show, leaves=True)
            pool.finish()
    except RankError as error:
        # Only the rank's traceback matters. Notebooks would show this process's in full.
        raise error.with_traceback(None) from error.__cause__
    return results


def _pool_settings(
    ranks: Any, backend: Any, output: Any, threads: Any, environment: Any, patience: Any, timeout: Any
) -> dict[str, Any]:
    """Return the pool's arguments from checked ones of ``launch``; with a new secret if there is none."""
    size = checks.count("ranks", ranks, 1)
    if size > _MOST_RANKS:
        raise ValueError(f"ranks is {size}, wanted at most {_MOST_RANKS} on one host")
    if output is not None and output != "all":
        output = _rank_of("output", output, size)
    _check_backend(backend, size)
    variables = _strings("environment", environment, of_strings=True)
    threads = _threads(threads, size, variables)
    variables.setdefault(_OMP, str(threads))
    if not any(os.environ.get(name) or variables.get(name) for name in (SECRET, SECRET_FILE)):
        variables[SECRET] = secrets.token_hex(32)
    return {
        "size": size,
        "backend": backend,
        "output": output,
        "threads": threads,
        "environment": variables,
        "patience": timedelta(seconds=checks.seconds_of(patience, "patience")),
        "limit": math.inf if timeout is None else checks.seconds_of(timeout),
    }


def run_ranks(
    program: Callable[..., None],
    size: int,
    arguments: Sequence[Any],
    on_message: OnMessage,
    *,
    mortal: Collection[int] = (),
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run ``program(*arguments, send)`` on ``size`` ranks in a default process group; return when all have ended.

    Args:
        on_message: called with what ranks ``send``.
        mortal: ranks that may be killed. The others continue, and only these are waited for.
        environment: variables that are added to this process's.

    Raises:
        RankError: a rank raised an exception, or one that is not ``mortal`` was killed.
    """
    with RankPool(size, environment=environment, mortal=mortal) as pool:
        pool.run(_run_program, program, *arguments, on_message=on_message, leaves=True)
        pool.finish()


def _run_program(program: Callable[..., None], *arguments: Any) -> None:
    program(*arguments, send)


def _call(call: bytes, sources: Sources) -> Any:
    """Call the function, in a rank."""
    os.environ[_INSIDE] = "1"
    add_sources(sources)
    first = os.environ["RANK"] == "0"
    reporting.send_by(send if first else lambda _: None)
    function, args, kwargs = deserialize(call)
    return function(*args, **kwargs)


def _refuse_in_rank() -> None:
    if is_being_started():
        # The starter of this process reports the error. A script might catch another exception and continue.
        raise SystemExit(UNGUARDED)
    for variable, whose in ((_INSIDE, "pycomm.launch"), ("TORCHELASTIC_RUN_ID", "torchrun")):
        if variable in os.environ:
            raise RuntimeError(
                f"launch was called in a rank of {whose} (rank {os.environ.get('RANK')} of "
                f"{os.environ.get('WORLD_SIZE')}): ranks cannot start ranks; call the function itself"
            )


def _check_function(function: Any) -> None:
    if not callable(function):
        raise TypeError(f"function is {checks.shown(function)}, wanted something that can be called")
    for is_kind, kind in (
        (inspect.isgeneratorfunction, "a generator"),
        (inspect.iscoroutinefunction, "a coroutine"),
        (inspect.isasyncgenfunction, "an asynchronous generator"),
    ):
        if is_kind(function):
            raise TypeError(f"function is {kind} function, whose call runs nothing; wanted one that does the work")


def _rank_of(name: str, value: Any, ranks: int) -> int:
    if isinstance(value, str):
        raise ValueError(f'{name} is {value!r}, wanted "all", the number of a rank, or None')
    rank = checks.count(name, value, 0)
    if rank >= ranks:
        raise ValueError(f"{name} is {rank}, wanted a rank below {ranks}")
    return rank


def _check_backend(backend: Any, ranks: int) -> None:
    if backend is None:
        return
    checks.instance("backend", backend, str)
    for part in backend.split(","):
        name = part.rpartition(":")[2]
        if not name or not dist.is_backend_available(name):
            raise ValueError(f"backend is {backend!r}: this torch has no backend {name!r}")
        if name == "nccl" and torch.cuda.device_count() < ranks:
            raise ValueError(f"ranks is {ranks}, wanted at most one for each of {torch.cuda.device_count()} GPUs")


def _arguments(args: Any) -> tuple[Any, ...]:
    if not isinstance(args, tuple | list):
        raise TypeError(f"args is a {type(args).__name__}, wanted a tuple or a list, such as args=(x,)")
    return tuple(args)


def _threads(threads: Any, ranks: int, variables: Mapping[str, str]) -> int:
    """Return torch's threads in each rank: ``threads``, or the number in ``variables``, or a fair share of cores."""
    if _OMP in variables:
        first = variables[_OMP].split(",")[0].strip()  # of a list for nested regions
        if threads is not None:
            raise ValueError(f"environment has {_OMP} {variables[_OMP]!r}, and threads is {threads}: pass one of them")
        if not first.isdecimal() or int(first) < 1:
            raise ValueError(f"environment has {_OMP} {variables[_OMP]!r}, wanted a number of threads, at least 1")
        return int(first)
    return max(1, len(os.sched_getaffinity(0)) // ranks) if threads is None else checks.count("threads", threads, 1)


def _strings(name: str, value: Any, of_strings: bool = False) -> dict[str, Any]:
    """Return a mapping with string keys (and values, ``of_strings``) or ``None`` as a dict; else raise TypeError."""
    if value is None:
        return {}
    checks.instance(name, value, Mapping)
    for key, item in value.items():
        if not isinstance(key, str) or (of_strings and not isinstance(item, str)):
            raise TypeError(f"{name} has {key!r}: {checks.shown(item)}, wanted strings")
    return dict(value)
