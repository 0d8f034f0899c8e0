"""Input of ``pycomm plan model``: a Python file with the model, and the shapes of a sample."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pycomm.parallel.planning.profile import in_a_line

_INPUT = re.compile(r"(\d+(?:x\d+)*)?(?::(\w+))?")
_MOST_DIMENSIONS = 8


@dataclass(frozen=True)
class Source:
    """Functions of the user's file.

    Attributes:
        make_model: returns the model. make_batch: returns the model's arguments for a number of samples.
        loss: maps the model's output to a scalar; ``None`` if the file has none.
    """

    make_model: Callable[[], Any]
    make_batch: Callable[[int], Any]
    loss: Callable[[Any], Any] | None


def load_source(text: str, given_input: str | None) -> Source:
    """Import the file of ``FILE.py:make_model``, and find its functions.

    The file may have ``make_batch(samples)``, unless there is a ``given_input``, and ``loss(output)``.
    """
    path, _, name = text.rpartition(":")
    if not path or not name.isidentifier():
        raise ValueError(f"the model is {text!r}, wanted FILE.py:FUNCTION, such as train.py:make_model")
    module = _imported(Path(path))
    make_model = _function(module, path, name)
    if given_input is not None:
        make_batch = batches_of(given_input)
    elif hasattr(module, "make_batch"):
        make_batch = _function(module, path, "make_batch")
    else:
        raise ValueError(
            f"the model's input is not known: {path} has no make_batch(samples), and --input is missing, "
            "such as --input 3x224x224, or --input 512:int64"
        )
    loss = _function(module, path, "loss") if hasattr(module, "loss") else None
    return Source(_quiet(make_model), _quiet(make_batch), None if loss is None else _quiet(loss))


def batches_of(text: str) -> Callable[[int], tuple[torch.Tensor, ...]]:
    """Return a function that makes zeros of the shapes in ``text`` for a number of samples.

    ``text`` has the shape of one sample of each argument, separated by commas: ``3x224x224,512:int64``.
    """
    made: list[tuple[tuple[int, ...], torch.dtype]] = []
    for word in text.split(","):
        match = _INPUT.fullmatch(word.strip())
        dtype = getattr(torch, (match[2] if match and match[2] else "float32"), None)
        if match is None or not word.strip() or not isinstance(dtype, torch.dtype):
            raise ValueError(f"--input has {word!r}, wanted the shape of one sample, such as 3x224x224 or 512:int64")
        shape = tuple(map(int, match[1].split("x"))) if match[1] else ()
        if 0 in shape or len(shape) > _MOST_DIMENSIONS or any(size >= 1 << 31 for size in shape):
            raise ValueError(f"--input has {word!r}, wanted up to {_MOST_DIMENSIONS} sizes from 1 to 2**31")
        made.append((shape, dtype))
    return lambda samples: tuple(torch.zeros(samples, *shape, dtype=dtype) for shape, dtype in made)


def _imported(path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"the model names the file {path}, which is not there")
    spec = importlib.util.spec_from_file_location("_pycomm_planned_model", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"the model names the file {path}, wanted a Python file, *.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module there
    beside = str(path.resolve().parent)
    sys.path.insert(0, beside)  # as for a script
    try:
        with contextlib.redirect_stdout(sys.stderr):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise ValueError(f"{path} cannot be imported: {in_a_line(error)}") from error
    finally:
        sys.path.remove(beside)
    return module


def _function(module: Any, path: str, name: str) -> Callable[..., Any]:
    found = getattr(module, name, None)
    if found is None:
        raise ValueError(f"{path} has no {name}")
    if not callable(found):
        raise ValueError(f"{name} in {path} is a {type(found).__name__}, wanted a function")
    function: Callable[..., Any] = found
    return function


def _quiet(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` with its prints sent to stderr: stdout is for the plan."""

    def quiet(*arguments: Any) -> Any:
        with contextlib.redirect_stdout(sys.stderr):
            return function(*arguments)

    return quiet
