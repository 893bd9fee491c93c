"""What holds the house: where state is kept, how long and how branched a function may be, one public class of a name."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1] / "vescale_fn"

LONGEST, BRANCHES = 60, 20  # lines of code of a function, its docstring aside; its cyclomatic complexity
_BRANCH = ast.If | ast.IfExp | ast.For | ast.While | ast.ExceptHandler | ast.comprehension | ast.Assert | ast.match_case

# Today's exceptions, all of them: what is mended leaves its list.
STATE = {"_core/torch_internals/interception.py"}  # below `base`: a flag between two callbacks of torch's
NOTED = {
    "_core/base/array_notes.py",
    "_core/base/tables.py",
    "_core/local_types/tensor_types.py",
}
NOTED_IN_A_HURRY = {"_core/shard_map/untyped_mode.py"}  # at each op of a body
LONG = {
    "_core/arrays/lazy_layout.py:settle",
    "_core/arrays/placement.py:_check",
    "_core/arrays/placement.py:with_sharding",
    "_core/arrays/view_writes.py:write_pieces",
    "_core/distributed/divergence.py:compare",
    "_core/distributed/launcher.py:hear",
    "_core/local_types/replica_check.py:body_alike",
    "_core/local_types/types.py:_over_one_axis",
    "_core/shard_map/collective_maps.py:__call__",
    "_core/shard_map/shard_map.py:__call__",
    "_core/shard_map/vmap_collectives.py:runs",
    "_core/shard_map/vmap_collectives.py:sent",
    "_core/transforms/vmap.py:vmap",
    "debugging/parity/first_difference.py:_compare",
    "plan/passes/buckets.py:_chosen",
    "plan/passes/list_calls.py:call_of",
    "plan/passes/functionalize_writes.py:_write_rows",
    "plan/passes/functionalize_writes.py:writes",
    "plan/passes/pointwise_before_views.py:_put_off",
    "plan/tracing/rank_consensus.py:agree",
}
# Operators of aten's that are named outside of the rules and of plans, all of them.
OPERATORS = {
    "_core/arrays/decide.py": {"as_strided.default"},  # the one view that speaks of memory, not of dims
    # what is asked of a wrapper, and families that write several tensors
    "_core/distributed/blocks.py": {
        *("numel", "size", "sym_numel", "sym_size", "sym_storage_offset", "sym_stride"),
        *("_amp_foreach_", "_foreach_", "_fused_"),
    },
    "_core/torch_internals/fake_tensors.py": {"add"},
    "_core/torch_internals/tensor_memory.py": {"set_"},
    "_core/transforms/kept_values.py": {"detach"},  # which autograd calls by itself
}
# Names that several files give to a public class because it is one thing in each: the sizes of a recipe's model.
SHARED = {"Config"}


def complexity(function):
    nodes = list(ast.walk(function))
    operators = sum(len(node.values) - 1 for node in nodes if isinstance(node, ast.BoolOp))
    return 1 + operators + sum(isinstance(node, _BRANCH) for node in nodes)


def length(function):
    documented = ast.get_docstring(function) is not None
    return (
        function.end_lineno
        - function.lineno
        + 1
        - (function.body[0].end_lineno - function.body[0].lineno + 1 if documented else 0)
    )


def state(nodes):
    """The files that keep state of a thread or of the process by `threading.local` or a `global` statement."""
    return {
        path
        for path, found in nodes.items()
        if path != "_core/base/state.py"
        and any(
            isinstance(n, ast.Global) or (isinstance(n, ast.Attribute) and ast.unparse(n) == "threading.local")
            for n in found
        )
    }


def long(nodes):
    return {
        f"{path}:{node.name}"
        for path, found in nodes.items()
        for node in found
        if isinstance(node, ast.FunctionDef) and (length(node) > LONGEST or complexity(node) > BRANCHES)
    }


def shared(nodes):
    """Names of public classes that several files define."""
    names = Counter(
        name
        for found in nodes.values()
        for name in {n.name for n in found if isinstance(n, ast.ClassDef) and not n.name.startswith("_")}
    )
    return {name for name, files in names.items() if files > 1}


_OVERLOAD = re.compile(r"(?:aten(?:\.|::))?([a-z_]\w*(?:\.(?:default|Tensor|Scalar|int|dim|out))?)")


def operators(nodes):
    """For each file outside of the rules and of plans, the operators of aten's that it names, as attributes or as text."""
    found = {}
    for path, inside in nodes.items():
        if not path.startswith(("_core/arrays/rules/", "plan/")):
            named = {
                n.attr for n in inside if isinstance(n, ast.Attribute) and re.search(r"\b_?aten$", ast.unparse(n.value))
            }
            texts = [n.value for n in inside if isinstance(n, ast.Constant) and isinstance(n.value, str)]
            spelt = [(text, _OVERLOAD.fullmatch(text)) for text in texts]
            named |= {m[1] for text, m in spelt if m and (text.startswith("aten") or "." in m[1])}
            if named - {"aten"}:
                found[path] = named - {"aten"}
    return found


@pytest.fixture(scope="module")
def nodes():
    """Every node of each file."""
    paths = sorted(ROOT.rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): list(ast.walk(ast.parse(path.read_text()))) for path in paths}


def test_operators_are_named_in_rules_and_plans_alone(nodes):
    assert operators(nodes) == OPERATORS


def test_state_is_kept_in_one_place(nodes):
    assert state(nodes) == STATE


def test_functions_are_short_and_have_few_branches(nodes):
    assert long(nodes) == LONG


def test_a_public_class_has_a_name_of_its_own(nodes):
    assert shared(nodes) == SHARED


def noted(nodes):
    """Files that set an attribute of ours on tensors."""
    return {
        path
        for path, found in nodes.items()
        if any(
            isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store) and n.attr.startswith("vfn_") for n in found
        )
    }


def test_what_is_known_of_a_tensor_is_noted_in_one_place(nodes):
    """What begins with `_` is no way around it: `private_names.OWN` lists those that tensors may have."""
    assert noted(nodes) == NOTED | NOTED_IN_A_HURRY


def test_the_checks_find_a_planted_fault():
    branches = "\n".join(f"    if x == {i}: x += 1" for i in range(BRANCHES))
    source = f"import threading\nclass A: ...\ns = threading.local()\ndef f(x):\n{branches}\ndef g():\n    a = 1\n"
    planted = {"one.py": list(ast.walk(ast.parse(source))), "two.py": list(ast.walk(ast.parse("class A: ...")))}
    assert state(planted) == {"one.py"}
    assert long(planted) == {"one.py:f"}
    assert shared(planted) == {"A"}
    named = "f(torch.ops.aten.mm.default); g(_aten.add); h('aten::sin'); i('exp.default'); j('aten::', 'some text.')"
    planted = list(ast.walk(ast.parse(named)))
    found = operators({"one.py": planted, "plan/two.py": planted, "_core/arrays/rules/three.py": planted})
    assert found == {"one.py": {"mm", "add", "sin", "exp.default"}}
    assert noted({"three.py": list(ast.walk(ast.parse("x.vfn_note = x.vfn_notes")))}) == {"three.py"}
    assert noted({"four.py": list(ast.walk(ast.parse("x.vfn_notes.sums = x.vfn_type")))}) == set()
