"""Private names of torch outside the one door: found in the sources, judged by who owns each.

A name that begins with an underscore is ours where a method of a class of ours says `self._name`, where a module of ours
is asked for it, and where `OWN` lists it. Whatever else begins so is torch's, however many files of ours store it.
"""

import ast
import importlib
import inspect
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

# What is read of a value from outside the methods of its class: the name, and the class whose files put it there.
OWN = {
    **dict.fromkeys(("_plan_node", "_plan_recorder", "_plan_row"), "Recorder"),
    **dict.fromkeys(("_begun", "_thread"), "Saving"),
    "_at_use": "Functional",
    "_donated": "Donated",
    "_key": "SimulatedMesh",
    "_mode": "running",
    "_next_key": "Keyed",
}
NAMED_TUPLES = {"_replace", "_fields", "_asdict", "_make"}

# Classes of torch whose objects come into files of ours, by the module that makes them.
TORCH = {
    "torch": "Tensor Generator UntypedStorage Size",
    "torch._C": "FunctionSchema",
    "torch._ops": "OpOverload OpOverloadPacket HigherOrderOperator",
    "torch._subclasses.fake_tensor": "FakeTensor FakeTensorMode",
    "torch.autograd.function": "Function FunctionCtx",
    "torch._functorch.pyfunctorch": "FuncTorchInterpreter GradInterpreter VmapInterpreter JvpInterpreter",
    "torch.distributed": "ProcessGroup Store Work",
    "torch.distributed.device_mesh": "DeviceMesh",
    "torch.distributed.tensor": "DTensor Placement",
    "torch.distributed.tensor._dtensor_spec": "DTensorSpec TensorMeta",
    "torch.fx.graph": "Graph",
    "torch.fx.graph_module": "GraphModule",
    "torch.fx.node": "Node",
    "torch.nn": "Module Parameter",
    "torch.optim": "Optimizer",
    "torch.overrides": "TorchFunctionMode",
    "torch.utils._python_dispatch": "TorchDispatchMode",
}


def private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


@cache
def torch_names() -> frozenset[str]:
    """Private names that torch's classes define, and that their methods store."""
    found: set[str] = set()
    for module, names in TORCH.items():
        for cls in (getattr(importlib.import_module(module), name) for name in names.split()):
            found.update(dir(cls))
            for base in cls.__mro__:
                if base.__module__.startswith("torch") and base.__module__ not in ("torch", "torch._C"):
                    found |= _stored(base.__module__)
    return frozenset(filter(private, found))


@cache
def _stored(module: str) -> set[str]:
    tree = ast.parse(inspect.getsource(importlib.import_module(module)))
    return {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}


def defined(cls: ast.ClassDef) -> set[str]:
    """What the body of a class defines, and what its methods store."""
    names = {getattr(node, "name", "") for node in cls.body}
    for node in ast.walk(cls):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.id if isinstance(node, ast.Name) else node.attr)
    for node in cls.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__":
            names |= {one.value for one in ast.walk(node.value) if isinstance(one, ast.Constant)}
    return names


def uses(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """(line, who is asked, name) of each attribute and each import; who: "torch.nn", "ours", "self", or "?"."""
    stands_for: dict[str, str] = {}  # a name in this file -> the module or function that it was imported as

    def dotted(node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return stands_for.get(node.id)
        if isinstance(node, ast.Attribute):
            base = dotted(node.value)
            return base and f"{base}.{node.attr}"
        return None

    nodes: list[tuple[ast.AST, str | None]] = [(tree, None)]  # each with the class in whose body it stands
    for node, itself in nodes:  # which grows meanwhile
        itself = node.name if isinstance(node, ast.ClassDef) else itself
        nodes += [(child, itself) for child in ast.iter_child_nodes(node)]
    for node, _ in nodes:
        if isinstance(node, ast.Import):
            for name in node.names:
                first = name.name.split(".")[0]
                stands_for[name.asname or first] = name.name if name.asname else first
                yield node.lineno, name.name, ""
        elif isinstance(node, ast.ImportFrom):
            ours = node.level or (node.module or "").startswith("vescale_fn")
            for name in node.names:
                stands_for[name.asname or name.name] = "ours" if ours else f"{node.module}.{name.name}"
                if not ours:
                    yield node.lineno, f"{node.module}.{name.name}", ""
    for node, _ in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            value = dotted(node.value) or ""
            if value.startswith("torch.ops"):  # aten = torch.ops.aten
                stands_for[node.targets[0].id] = value

    for node, itself in nodes:
        if isinstance(node, ast.Attribute):
            who = dotted(node.value)
            if who is None and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls") and itself:
                who = f"self of {itself}"
            yield node.lineno, who or "?", node.attr
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            if node.slice.value in torch_names():  # vars(x)["_name"]
                yield node.lineno, "?", str(node.slice.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _A_NAME.fullmatch(node.value):
            yield node.lineno, node.value, ""  # sys.modules["torch._name"]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in _BY_STRING:
            for name in node.args[1:2] if isinstance(node.func, ast.Name) else node.args:
                if isinstance(name, ast.Constant) and isinstance(name.value, str):
                    for part in name.value.split("."):
                        yield node.lineno, dotted(node.args[0]) or "?", part


_A_NAME = re.compile(r"torch(\.\w+)+")
_BY_STRING = ("getattr", "hasattr", "setattr", "delattr", "attrgetter")


def own_faults(trees: Iterable[ast.Module], own: dict[str, str]) -> list[str]:
    """Names of `OWN` that torch has as well, that nothing stores, or whose class is not there."""
    stored, classes = set[str](), set[str]()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            stored.add(node.attr)
        elif isinstance(node, ast.ClassDef):
            classes.add(node.name)
            stored |= defined(node)
    return [f"torch has a {name} too" for name in own if name in torch_names()] + [
        f"{name} of {owner} is nowhere" for name, owner in own.items() if owner not in classes or name not in stored
    ]


def faults(trees: dict[Path, ast.Module]) -> list[str]:
    """Private names of torch in these files. In `torch.ops.aten` a name is an operator's, however it begins."""
    classes: dict[str, list[ast.ClassDef]] = {}
    for node in (node for tree in trees.values() for node in ast.walk(tree)):
        if isinstance(node, ast.ClassDef):
            classes.setdefault(node.name, []).append(node)

    @cache
    def owned(name: str) -> set[str]:
        """What classes of this name define, with those classes of ours that they inherit from."""
        found: set[str] = set()
        for cls in classes.get(name, ()):
            found |= defined(cls).union(*(owned(ast.unparse(base).split(".")[-1]) for base in cls.bases))
        return found

    found = []
    for path, tree in trees.items():
        for line, who, name in dict.fromkeys(uses(tree)):
            full = f"{who}.{name}".rstrip(".")
            parts = full.split(".")
            if parts[0] == "torch":
                wrong = parts[1:3] != ["ops", "aten"] and any(map(private, parts))
            elif not private(name) or name in OWN or name in NAMED_TUPLES:
                wrong = False
            elif who.startswith("self of "):
                wrong = name in torch_names() and name not in owned(who.removeprefix("self of "))
            else:
                wrong, full = who == "?", f"(...).{name}"
            if wrong:
                found.append(f"{path}:{line} uses {full}; private names of torch go through _core/torch_internals")
    return found
