"""Shows names and docstrings on the site as they are meant.

``pycomm.kernels.pack`` is a function for whoever imports pycomm, and the module that defines it for whoever reads the
sources: the reference wants the function. A role becomes a link where its target has an entry in the reference, code
elsewhere; the name of a page of the documentation becomes a link to it. A line of a section that does not begin an item
continues the one before, however it is indented. The arguments of ``attach`` are shown in groups. Rows of Horovod's
table of functions are shown as the functions that they are. What Python makes public for the rest of pycomm, and users
do not call, is not shown: :data:`HIDDEN`, members whose docstring begins with "Internal", and catch-alls of wrong
arguments.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from griffe import (
    Alias,
    Attribute,
    Class,
    Docstring,
    DocstringSectionKind,
    DocstringSectionParameters,
    ExprCall,
    ExprKeyword,
    ExprName,
    Extension,
    Function,
    Module,
    Object,
    Parameter,
    ParameterKind,
    Parameters,
)

_ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc):`~?([\w.]+)`")
_ENTRY = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)
_SECTION = re.compile(r"( *)(Args|Attributes|Raises):$")
_ITEM = re.compile(r"[\w*.]+(?:, [\w*.]+)*: ")
_PAGE = re.compile(r"(?:``)?docs/(\w+)\.md(?:``)?")
_DOCS = Path(__file__).resolve().parent.parent
_REFERENCE = _DOCS / "reference"

GROUPS = {
    "pycomm.training.reducer.attach.attach": {
        "What is averaged": "optimizer model process_group average buffers",
        "Batches, precision and clipping": "accumulate loss_scaler",
        "Compression and tuning": "compression tuning",
        "Sharded optimizer": "shard",
        "Lost ranks": "survive",
    }
}
"""Arguments of functions that have too many for one list: names by the title of their group."""

HIDDEN = {
    "collectives.communicator.Communicator": "move refuse",
    "collectives.transport.gpu.GpuWork": "__init__ ends_within",
    "compression.methods.dgc.DGC": "density",
    "ddp.HookHandle": "__init__",
    "ddp.HsdpHandle": "__init__",
    "errors.CommError": "__init__ during",
    "horovod.sync_batch_norm.SyncBatchNorm": "forward",
    "integrations.averaging.Averaging": "__init__ optimizer carries_state",
    "integrations.lightning.PycommFabricStrategy": "setup_module setup_optimizer save_checkpoint load_checkpoint",
    "integrations.lightning.PycommStrategy": "configure_ddp setup block_backward_sync optimizer_step save_checkpoint "
    "remove_checkpoint load_checkpoint load_optimizer_state_dict teardown",
    "integrations.transformers.PycommCallback": "on_train_begin on_step_begin on_step_end on_save on_train_end",
    "kernels.Moments": "fill",
    "optim.LossScaler": "is_unscaled",
    "optim.WarmupLR": "get_lr",
    "optim.masters.MasterWeights": "__init__ masters unscale whole_steps",
    "optim.pending_factor.FactorStep": "__init__",
    "parallel.Branches": "forward extra_repr",
    "parallel.Experts": "forward extra_repr",
    "schedule.Network": "with_hosts_of",
    "tools.launching.serving.RankError": "__init__",
    "tools.monitoring.Monitor": "__init__",
    "training.asynchronous.fragment.Nesterov": "step optimizer",
    "training.asynchronous.gossip.Gossip": "__init__",
    "training.asynchronous.local_averager.LocalAverager": "__init__ share_state",
    "training.asynchronous.parameter_server.ParameterServer": "__init__",
    "training.checkpoint.PendingSave": "__init__ settle unreported start fail",
    "training.cost.auto.Auto": "sparse methods costs",
    "training.reducer.reducer.Reducer": "__init__ reduce_now stay_absent knows covers settle name_of_not_finite",
    "training.reducer.settings.Tuning": "bucket_bytes",
    "worker.Work": "__init__ run ends_within when_done forget_trace",
}
"""Members that are not for users: names by their class, below ``pycomm``. ``__init__``: the class is only returned."""


def entries() -> set[str]:
    """Return the names that have an entry of their own in the reference."""
    return {name for page in _REFERENCE.glob("*.md") for name in _ENTRY.findall(page.read_text(encoding="utf-8"))}


def without_roles(text: str, known: set[str]) -> str:
    """Return ``text`` with a link, or code, for every role."""

    def shown(match: re.Match[str]) -> str:
        name = match[1]
        for full in (name, f"pycomm.{name}"):
            if full in known:
                return f"[`{name}`][{full}]"
        return f"`{name}`"

    return _ROLE.sub(shown, text)


def with_pages(text: str) -> str:
    """Return ``text`` with a link for every page of the documentation that it names."""

    def shown(match: re.Match[str]) -> str:
        page = (_DOCS / f"{match[1]}.md").read_text(encoding="utf-8")
        title = page.partition("\n")[0].removeprefix("# ")
        return f"[{title}](../{match[1]}.md)"  # as seen from a page of the reference

    return _PAGE.sub(shown, text)


def in_groups(sections: list[Any], groups: dict[str, str]) -> list[Any]:
    """Return a docstring's sections with one of arguments for each group.

    Raises:
        ValueError: an argument is in no group, or a group names none.
    """
    (whole,) = (section for section in sections if section.kind is DocstringSectionKind.parameters)
    found = {parameter.name: parameter for parameter in whole.value}
    named = [name for names in groups.values() for name in names.split()]
    if sorted(named) != sorted(found):
        raise ValueError(f"groups name {sorted(named)}, wanted {sorted(found)}")
    parts = [
        DocstringSectionParameters([found[name] for name in names.split()], title=title)
        for title, names in groups.items()
    ]
    at = sections.index(whole)
    return [*sections[:at], *parts, *sections[at + 1 :]]


def with_hanging_lines(text: str) -> str:
    """Return ``text`` with the lines of a section indented that continue an item."""
    return "\n".join(_hanging_lines(text.splitlines()))


def _hanging_lines(lines: list[str]) -> Iterator[str]:
    indent: str | None = None  # of the items of the section that this line is in
    kind = ""
    for line in lines:
        section = _SECTION.match(line)
        if section is not None:
            indent, kind = section[1] + "    ", section[2]
        elif line.strip() and (indent is None or not line.startswith(indent)):
            indent = None
        elif indent is not None and line.strip() and line[len(indent)] != " " and not _ITEM.match(line[len(indent) :]):
            line = f"    {line}"
        elif indent is not None and kind == "Attributes" and (item := _ITEM.match(line.strip())):
            names = item[0].replace(", ", ",\N{NO-BREAK SPACE}")  # griffe takes what follows a space for a type
            line = f"{indent}{names}{line.strip().removeprefix(item[0])}"
        yield line


def shadow_modules(package: Module) -> None:
    """Let a name that a package exports be what it imports, where a module beside it has that name, too."""
    moved: dict[str, str] = {}
    for module in _modules_in(package):
        for name, inner in _own_modules(module).items():
            exported = name in (module.exports or ()) or module.imports.get(name) == f"{inner.path}.{name}"
            if exported and name in inner.members:
                hidden = f"_{name}"
                module.members[hidden] = inner
                module.members[name] = Alias(name, inner.members[name], parent=module)
                moved[f"{module.path}.{name}."] = f"{module.path}.{hidden}."
    for module in _modules_in(package):
        for name, member in list(module.members.items()):
            if isinstance(member, Alias) and (path := _moved(member.target_path, moved)) != member.target_path:
                module.members[name] = Alias(name, path, parent=module)


def _own_modules(module: Module) -> dict[str, Module]:
    return {name: member for name, member in module.members.items() if isinstance(member, Module)}


def _modules_in(module: Module) -> Iterator[Module]:
    yield module
    for inner in _own_modules(module).values():
        yield from _modules_in(inner)


def _moved(path: str, moved: dict[str, str]) -> str:
    for old, new in moved.items():
        if path.startswith(old):
            return new + path.removeprefix(old)
        if path == old.removesuffix("."):  # the name that shadows the module
            return f"{new}{path.rpartition('.')[2]}"
    return path


def functions_of_table(module: Module) -> list[Function]:
    """Put a function in the place of each row ``name = _function("name", form, way, doc)``, and return them."""
    made = []
    for name, member in list(module.members.items()):
        value = member.value if isinstance(member, Attribute) else None
        if isinstance(value, ExprCall) and str(value.function) in ("_function", "_grouped"):
            _, form, way, doc = map(str, value.arguments)
            first, *others = module[form].parameters
            if str(value.function) == "_grouped":
                first = Parameter("tensors", annotation="Tensors", kind=first.kind)
            arguments, returns = Parameters(first, *others), module[way].returns
            function = Function(name, parameters=arguments, returns=returns, lineno=member.lineno, parent=module)
            function.docstring = Docstring(inspect.cleandoc(ast.literal_eval(doc)), parent=function)
            module.members[name] = function
            made.append(function)
    return made


def as_called(function: Function) -> None:
    """Remove ``**unknown: NoReturn``; show values of private constants, and bounds of private type variables."""
    for parameter in list(function.parameters):
        if parameter.kind is ParameterKind.var_keyword and str(parameter.annotation) == "NoReturn":
            del function.parameters[parameter.name]
            continue
        constant = _private(function, parameter.default)
        parameter.default = parameter.default if constant is None else constant
        parameter.annotation = _bound(function, parameter.annotation)
    function.returns = _bound(function, function.returns)


def _private(function: Function, name: object) -> Any:
    if not isinstance(name, ExprName) or not name.name.startswith("_"):
        return None
    constant = function.module.members.get(name.name)
    return constant.value if isinstance(constant, Attribute) else None


def _bound(function: Function, name: Any) -> Any:
    value = _private(function, name)
    if isinstance(value, ExprCall) and str(value.function) == "TypeVar":
        bounds = [each.value for each in value.arguments if isinstance(each, ExprKeyword) and each.name == "bound"]
        return bounds[0] if bounds else name
    return name


def hide(package: Module, hidden: dict[str, str]) -> None:
    """Remove the members that ``hidden`` names from the classes of ``package``, and those that say "Internal".

    Raises:
        KeyError: a class or a member does not exist.
    """
    for path, names in hidden.items():
        found = package[path]
        members = (found.final_target if isinstance(found, Alias) else found).members
        for name in names.split():
            del members[name]
    for module in _modules_in(package):
        for cls in [member for member in module.members.values() if isinstance(member, Class)]:
            for name, member in list(cls.members.items()):
                if not isinstance(member, Alias) and member.docstring and member.docstring.value.startswith("Internal"):
                    del cls.members[name]


class Docstrings(Extension):
    """Rewrites every docstring that is read, and what names mean once a package is."""

    def __init__(self) -> None:
        self._known = entries()

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrite the docstring of one object."""
        if isinstance(obj, Function):
            as_called(obj)
        if obj.docstring is not None:
            text = with_pages(without_roles(obj.docstring.value, self._known))
            obj.docstring.value = with_hanging_lines(text)
            if obj.path in GROUPS:
                sections = obj.docstring.parse("google", warn_unknown_params=False, warn_missing_types=False)
                obj.docstring.parsed = in_groups(sections, GROUPS[obj.path])

    def on_module_members(self, *, mod: Module, **_: Any) -> None:
        """Show the functions of a table, before anything refers to them."""
        if mod.path == "pycomm.horovod.operations":
            for function in functions_of_table(mod):
                self.on_object(obj=function)

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        """Rewrite the names of one package."""
        if pkg.path == "pycomm":
            hide(pkg, HIDDEN)
        shadow_modules(pkg)
