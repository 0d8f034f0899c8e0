"""``launch``: a function on ranks of this host, from a notebook, a prompt or a script; ``run_ranks`` for commands."""

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
from pycomm.tools.launching.failures import UNGUARDED, RankError
from pycomm.tools.launching.pool import OnMessage, RankPool
from pycomm.tools.launching.processes import is_being_started
from pycomm.tools.launching.serialize import Sources, add_sources, deserialize, interactive_sources, serialize
from pycomm.tools.launching.serving import send

_INSIDE = "PYCOMM_LAUNCHED"
"""In the environment that ranks give to what they start."""
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
    """Call ``function(*args, **kwargs)`` on ranks of this host, and return what each returned.

    The ranks are new processes, in a default process group of torch.distributed, and are gone when this returns,
    raises or is interrupted. Functions that were defined in a notebook or at a prompt work where cloudpickle is
    installed (``pip install 'pycomm-torch[notebook]'``), and so do lambdas and functions inside functions; a script's
    own need no more than that the call stands under ``if __name__ == "__main__":``, as every rank imports the script.

    Args:
        function: called on every rank. It finds RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE in its environment,
            as under torchrun.
        ranks: how many; there may be more than cores.
        args, kwargs: what ``function`` is given, the same on all ranks. Each rank has a copy.
        backend: of the process group: "gloo", "pycomm", "nccl" (each rank then takes the GPU of its number), or one
            for each kind of device, "cpu:gloo,cuda:nccl". ``None``: there is no group; ``function`` calls
            ``torch.distributed.init_process_group`` itself, without naming ranks or addresses.
        output: what is shown of what ranks write. "all": line by line, each behind its rank's number; the number of a
            rank: what that one writes, as it is (progress bars too); ``None``: nothing.
        threads: that torch uses in each rank, also OMP_NUM_THREADS there; ``None``: OMP_NUM_THREADS of
            ``environment``, if it is there, else cores // ranks, at least 1.
        environment: variables that the ranks have besides this process's. They get a PYCOMM_SECRET of their own, by
            which they know each other, unless there is one (or PYCOMM_SECRET_FILE) already.
        patience: limit of every wait of a rank for another, in seconds or as a ``timedelta``: of the process group. A
            rank that dies is noticed at once.
        timeout: limit of the whole call, or ``None``.

    Returns:
        What ``function`` returned, by rank, as a copy: it must be possible to pickle it. ``sys.exit()`` and
        ``sys.exit(0)`` return ``None``. Threads of the ranks have ended by then, and exit handlers have run.

    Raises:
        TypeError, ValueError: an argument is wrong, or cannot be sent to another process. No rank was started.
        RuntimeError: this process is itself a rank: of ``launch``, or of torchrun.
        RankError: a rank raised an exception, was killed, ended without a result, or returned what cannot be pickled;
            or they were not done within ``timeout``. The message names the rank that began it, with its traceback, or
            where each was; ``__cause__`` is the rank's exception, if it can be pickled. The other ranks were ended.
    """
    _refuse_in_rank()
    ranks = checks.count("ranks", ranks, 1)
    if ranks > _MOST_RANKS:
        raise ValueError(f"ranks is {ranks}, wanted at most {_MOST_RANKS} on one host")
    _check_function(function)
    if output is not None and output != "all":
        output = _rank_of("output", output, ranks)
    _check_backend(backend, ranks)
    variables = _variables(environment)
    threads = _threads(threads, ranks, variables)
    variables.setdefault(_OMP, str(threads))
    seconds = math.inf if timeout is None else checks.seconds_of(timeout)
    call = serialize("function, with args and kwargs,", (function, _arguments(args), _keywords(kwargs)))
    waits = timedelta(seconds=checks.seconds_of(patience, "patience"))
    if not any(os.environ.get(name) or variables.get(name) for name in (SECRET, SECRET_FILE)):
        variables[SECRET] = secrets.token_hex(32)
    how: dict[str, Any] = {"backend": backend, "patience": waits, "threads": threads, "environment": variables}
    try:
        with reporting.display() as show, RankPool(ranks, output=output, limit=seconds, **how) as pool:
            results = pool.run(_call, call, interactive_sources(), on_message=show, leaves=True)
            pool.finish()
    except RankError as error:
        # What counts is where the rank was. Notebooks show every line of the way from here to where that was noticed.
        raise error.with_traceback(None) from error.__cause__
    return results


def run_ranks(
    program: Callable[..., None],
    size: int,
    arguments: Sequence[Any],
    on_message: OnMessage,
    *,
    mortal: Collection[int] = (),
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run ``program(*arguments, send)`` on ``size`` ranks, in a default process group, until all have ended well.

    They are gone when this returns. What they ``send`` is passed on to ``on_message``.

    Args:
        mortal: ranks that may be killed: the others go on, and are all that is waited for.
        environment: variables that the ranks have besides this process's.

    Raises:
        RankError: a rank raised an exception, or one that is not ``mortal`` was killed.
    """
    with RankPool(size, environment=environment, mortal=mortal) as pool:
        pool.run(_run_program, program, *arguments, on_message=on_message, leaves=True)
        pool.finish()


def _run_program(program: Callable[..., None], *arguments: Any) -> None:
    program(*arguments, send)


def _call(call: bytes, sources: Sources) -> Any:
    """Call the function in a rank."""
    os.environ[_INSIDE] = "1"
    add_sources(sources)
    first = os.environ["RANK"] == "0"
    reporting.send_by(send if first else lambda _: None)
    function, args, kwargs = deserialize(call)
    return function(*args, **kwargs)


def _refuse_in_rank() -> None:
    if is_being_started():
        # Not an exception, which the script could catch and go on: whoever started this process says what is wrong.
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


def _keywords(kwargs: Any) -> dict[str, Any]:
    return {} if kwargs is None else _strings("kwargs", kwargs, of_strings=False)


def _variables(environment: Any) -> dict[str, str]:
    return {} if environment is None else _strings("environment", environment, of_strings=True)


def _threads(threads: Any, ranks: int, variables: Mapping[str, str]) -> int:
    """Return how many threads torch has in each rank: ``threads``, or as the ranks' variables say, or a fair share."""
    if _OMP in variables:
        first = variables[_OMP].split(",")[0].strip()  # of a list for nested regions
        if threads is not None:
            raise ValueError(f"environment has {_OMP} {variables[_OMP]!r}, and threads is {threads}: give one of them")
        if not first.isdecimal() or int(first) < 1:
            raise ValueError(f"environment has {_OMP} {variables[_OMP]!r}, wanted a number of threads, at least 1")
        return int(first)
    return max(1, len(os.sched_getaffinity(0)) // ranks) if threads is None else checks.count("threads", threads, 1)


def _strings(name: str, value: Any, of_strings: bool) -> dict[str, Any]:
    """Return a mapping by strings as a dict; raise TypeError, with ``name``, if it is none."""
    checks.instance(name, value, Mapping)
    for key, item in value.items():
        if not isinstance(key, str) or (of_strings and not isinstance(item, str)):
            raise TypeError(f"{name} has {key!r}: {checks.shown(item)}, wanted strings")
    return dict(value)
