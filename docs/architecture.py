"""Draws who imports whom, and writes the table of components into docs/architecture.md, both read from the code.

    python docs/architecture.py                # rewrites layers.svg and what stands between the markers
    python docs/architecture.py --check        # changes nothing; exits with 1 and says what is stale

A component is a package or module that the layers of `[tool.importlinter]` name; in C++ a folder of csrc. The table has
the first sentence of each package's docstring; modules are only named. Markers: <!-- components --> and <!-- end -->.
Needs neither pycomm nor torch.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from graphlib import TopologicalSorter
from pathlib import Path

from rewriting import rewrite

ROOT = Path(__file__).resolve().parent.parent
PAGE = Path(__file__).with_name("architecture.md")
PICTURE = Path(__file__).with_name("layers.svg")

Imports = Mapping[str, frozenset[str]]

_LAYERS = re.compile(r"^layers = (\[.*?^\])", re.DOTALL | re.MULTILINE)
_TABLE = re.compile(r"(<!-- components -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_ROLE = re.compile(r":\w+:`~?([\w.]+)`|``(.+?)``")
_LONGEST_CELL = 130

_CELL, _LABEL, _EDGE = 18, 150, 12  # pixels: of a square, of the longest name, around everything
_INK, _LINE, _BAND, _DIRECT, _IMPLIED, _UPWARDS = "#333333", "#dddddd", "#f2f2f2", "#2f5f9f", "#b3cde8", "#c02020"


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite the picture and the table, or say what is stale; return the exit code."""
    return rewrite("the layers in docs/architecture.md", "architecture.py", _pages, arguments)


def _pages() -> dict[Path, str]:
    layers = layers_in((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    includes = includes_in(ROOT / "csrc")
    cpp = [[name] for name in reversed(tuple(TopologicalSorter(includes).static_order()))]
    page = PAGE.read_text(encoding="utf-8")
    if not _TABLE.search(page):
        raise ValueError(f"{PAGE.name} has no <!-- components --> ... <!-- end -->")
    filled = _TABLE.sub(lambda match: match[1] + table(ROOT, layers) + match[3], page)
    return {PAGE: filled, PICTURE: picture(layers, imports_in(ROOT, layers), cpp, includes)}


def layers_in(pyproject: str) -> list[list[str]]:
    """Return the modules of each layer of import-linter's first contract, highest first."""
    found = _LAYERS.search(pyproject)
    if found is None:
        raise ValueError("pyproject.toml has no layers = [...]")
    return [layer.split(" | ") for layer in ast.literal_eval(found[1])]


def imports_in(root: Path, layers: Sequence[Sequence[str]]) -> Imports:
    """Return which components each component imports, wherever in its code.

    Raises:
        ValueError: a module is in no layer.
    """
    components = [component for layer in layers for component in layer]
    found: dict[str, set[str]] = {component: set() for component in components}
    for path in sorted((root / "pycomm").rglob("*.py")):
        module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        own = _component_of(module, components)
        if own is not None:
            others = (_component_of(name, components) for name in _imported(path))
            found[own] |= {other for other in others if other not in (None, own)}
        elif not any(component.startswith(f"{module}.") for component in components):  # else a package of components
            raise ValueError(f"{module} is in no layer of pyproject.toml")
    return {component: frozenset(others) for component, others in found.items()}


def _component_of(name: str, components: Sequence[str]) -> str | None:
    while name and name not in components:
        name = name.rpartition(".")[0]
    return name or None


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def includes_in(folder: Path) -> Imports:
    """Return which folders of ``csrc`` each of them includes files of."""
    found: dict[str, set[str]] = {}
    for path in sorted(folder.rglob("*.[hc]*")):
        own = path.relative_to(folder).parts[0]
        others = re.findall(r'^#include "(\w+)/', path.read_text(encoding="utf-8"), re.MULTILINE)
        found.setdefault(own, set()).update(other for other in others if other != own)
    return {own: frozenset(others) for own, others in sorted(found.items())}


def table(root: Path, layers: Sequence[Sequence[str]]) -> str:
    """Return a row for each package: its name, and the first sentence of its docstring; then the names of modules.

    Raises:
        ValueError: that sentence is missing, or does not fit into a line of the table.
    """
    rows = ["| package | what it is |\n", "|---|---|\n"]
    modules = []
    for name in (name for layer in layers for name in layer):
        file = root.joinpath(*name.split("."), "__init__.py")
        if not file.exists():
            modules.append(f"`{_short(name)}`")
            continue
        first = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[0]
        said = _ROLE.sub(lambda match: f"`{match[1] or match[2]}`", first.partition(". ")[0].rstrip("."))
        if not 0 < len(said) <= _LONGEST_CELL:
            where = file.relative_to(root)
            raise ValueError(f"first line of {where} has {len(said)} characters, wanted 1 to {_LONGEST_CELL}")
        rows.append(f"| `{_short(name)}` | {said} |\n")
    return "".join([*rows, "\n", textwrap.fill(f"Single modules: {', '.join(modules)}.", 120), "\n"])


def picture(layers: Sequence[Sequence[str]], imports: Imports, cpp: Sequence[Sequence[str]], includes: Imports) -> str:
    """Return the drawing: a staircase of names, in each one's row a dot over every component that it imports."""
    count = sum(map(len, layers))
    width, height = 2 * _EDGE + _LABEL + count * _CELL, 2 * _EDGE + count * _CELL
    low = height - _EDGE - sum(map(len, cpp)) * _CELL
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">\n'
        "<title>Who imports whom in pycomm</title>\n"
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>\n',
        *_staircase(layers, imports, _EDGE + _LABEL, _EDGE),
        *_legend(_EDGE, low - 4 * _CELL),
        *_staircase(cpp, includes, _EDGE + _LABEL // 2, low),
        "</svg>\n",
    ]
    return "".join(parts)


def _staircase(layers: Sequence[Sequence[str]], imports: Imports, left: int, top: int) -> Iterator[str]:
    components = [component for layer in layers for component in layer]
    place = {component: number for number, component in enumerate(components)}
    for layer in layers:
        first, size = place[layer[0]] * _CELL, len(layer) * _CELL
        fill = f'fill="{_BAND}" stroke="{_LINE}"'
        yield f'<rect x="{left + first}" y="{top + first}" width="{size}" height="{size}" {fill}/>\n'
    for component, number in place.items():
        corner, middle = number * _CELL, number * _CELL + _CELL // 2
        end = max((place[other] for other in imports[component]), default=number) * _CELL + _CELL // 2
        yield f'<path d="M{left + corner} {top + middle}H{left + max(end, corner)}" stroke="{_LINE}"/>\n'
        importers = [place[other] for other in components if component in imports[other]]
        if importers:
            begin = min(importers) * _CELL + _CELL // 2
            yield f'<path d="M{left + middle} {top + begin}V{top + corner}" stroke="{_LINE}"/>\n'
        yield f'<rect x="{left + corner + 5}" y="{top + corner + 5}" width="8" height="8" fill="{_INK}"/>\n'
        yield (
            f'<text x="{left + corner - 5}" y="{top + middle + 4}" text-anchor="end" fill="{_INK}">'
            f"{_short(component)}</text>\n"
        )
    reachable = _reachable(imports)
    for component, number in place.items():
        implied = frozenset().union(*(reachable[other] for other in imports[component]))
        for other in sorted(imports[component], key=lambda name: place[name]):
            color = _UPWARDS if place[other] < number else _IMPLIED if other in implied else _DIRECT
            x, y = (left + place[other] * _CELL + _CELL // 2, top + number * _CELL + _CELL // 2)
            title = f"{_short(component)} imports {_short(other)}"
            yield f'<circle cx="{x}" cy="{y}" r="5" fill="{color}"><title>{title}</title></circle>\n'


def _legend(left: int, top: int) -> Iterator[str]:
    lines = ((_DIRECT, "imports"), (_IMPLIED, "imports, also through another component"))
    for number, (color, text) in enumerate(lines):
        y = top + number * _CELL
        yield f'<circle cx="{left + 6}" cy="{y}" r="5" fill="{color}"/>\n'
        yield f'<text x="{left + 18}" y="{y + 4}" fill="{_INK}">{text}</text>\n'
    yield f'<text x="{left}" y="{top + 3 * _CELL}" fill="{_INK}">C++, the folders of csrc:</text>\n'


def _reachable(imports: Imports) -> Imports:
    """Return what each component imports, and what that imports, and so on."""
    found = dict(imports)
    while True:
        wider = {component: others.union(*(found[other] for other in others)) for component, others in found.items()}
        if wider == found:
            return found
        found = wider


def _short(component: str) -> str:
    return component.removeprefix("pycomm.")


if __name__ == "__main__":
    sys.exit(main())
