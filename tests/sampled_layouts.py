"""Sampled layouts of recorded steps, carried out, against the steps themselves on one device.

A step is a program of `programs.py`, or one of `sampled_plans`, with its derivative. Each axis of a mesh is given, at random,
to a label of each call's rule, to what the call is linear in, or to nothing, in any order of axes; arguments and results lie
anyhow, and everything moves between. Values, dtypes and layouts must be equal: eagerly and as a plan, donated. The long run is

    python tests/sampled_layouts.py --cases 200 --seed 1      # on 8 simulated ranks
    python tests/sampled_layouts.py --case 1:17               # one again, with its graph
"""

import argparse
import itertools
import random
import sys
import traceback
import warnings

import torch
from programs import PROGRAMS
from sampled_plans import UNEVEN, _derivative, differs, spec
from sampled_plans import Program as Sampled

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn._core.arrays.layout_solver import solved
from vescale_fn._core.arrays.rules.rule import Call, Parts, T
from vescale_fn._core.arrays.rules.table import find
from vescale_fn._core.arrays.stated_layout import NotAllowed, stated
from vescale_fn._core.base.op_arguments import bind, with_tensors
from vescale_fn._core.sharding.placements import normal
from vescale_fn.choice.apply import applied
from vescale_fn.choice.apply_calls import filled, operands, results
from vescale_fn.choice.recording import record
from vescale_fn.choice.search.layouts import CallLayout, Layouts
from vescale_fn.plan.ir.graph import calls, changed, is_aten, value, written

MESHES = [((8,), "a"), ((2, 4), "ab"), ((4, 2), "ab"), ((1, 8), "ab"), ((2, 1, 4), "abc"), ((2, 2, 2), "abc")]
SMALL = [((4,), "a"), ((2, 2), "ab"), ((4, 1), "ab")]  # of four ranks


def rule_of(node):
    """The rule of a call, with the shapes of its arguments and results; None where there is none."""
    make = find(node.target) if is_aten(node) else None
    nodes = operands(node)
    if make is None or not nodes or written(node):
        return None
    ts = tuple(T(i, tuple(value(x).shape), value(x).dtype) for i, x in enumerate(nodes))
    bound = bind(node.target, filled(node.args, value), filled(node.kwargs, value))
    each = iter(ts)
    by_name = {name: with_tensors(x, each) for name, x in bound.items()}
    val = value(node)
    outs = list(val) if isinstance(val, (list, tuple)) else [val]
    shapes = tuple(tuple(o.shape) if isinstance(o, torch.Tensor) else None for o in outs)
    dtypes = tuple(o.dtype if isinstance(o, torch.Tensor) else None for o in outs)
    name = node.target.name().removeprefix("aten::").partition(".")[0]
    rule = make(Call(name, by_name, ts, shapes, dtypes))
    return None if rule is None else (rule, [t.shape for t in ts], shapes)


def split(row, shape, taken):
    return P(*(taken.get(label, ()) if label is not None and type(label) is not Parts else () for label in row))


def sampled_call(rng, node, axes):
    """A layout of a call that its rule allows; None for as the rules vote."""
    found = rule_of(node)
    if found is None:
        one = lambda x: spec(rng, x.ndim, list(axes)) if rng.random() < 0.5 else P()
        return CallLayout(tuple(P() for _ in operands(node)), tuple(map(one, results(node))))
    rule, shapes, outs = found
    labels = sorted(
        {label for row in (*rule.ins, *rule.outs) for label in row if label is not None and type(label) is not Parts},
        key=repr,
    )
    for _ in range(8):
        taken, kept = {}, set()
        for axis in rng.sample(list(axes), len(axes)):
            ways = [*labels, None, *(["kept"] if rule.linear else [])]
            way = rng.choice(ways)
            if way == "kept":
                kept.add(axis)
            elif way is not None:
                taken[way] = (*taken.get(way, ()), axis)
        missing = {a for label in rule.sums if label in taken and label not in rule.outs[0] for a in taken[label]}
        ins = []
        for i, (row, shape) in enumerate(zip(rule.ins, shapes)):
            free = [a for a in axes if not any(a in names for names in taken.values()) and a not in kept]
            base = split(row, shape, taken)
            if (
                any(type(label) is Parts for label in row) and free and rng.random() < 0.7
            ):  # what is merged may lie anyhow
                dims = [d for d, label in enumerate(row) if type(label) is Parts]
                entries = [*base, *[()] * (len(row) - len(base))]
                entries[rng.choice(dims)] = tuple(free[: rng.randrange(1, len(free) + 1)])
                base = P(*entries)
            partial = (kept if i in rule.linear else set()) | (missing if i in rule.joins else set())
            ins.append(normal(P(*base, unreduced=partial), axes, shape))
        lying = list(zip(ins, shapes))
        add = rule.fold == "sum"
        wanted = []
        for n, (row, shape) in enumerate(zip(rule.outs, outs)):
            gone = {
                a
                for label in rule.sums
                if label in taken and label not in row and (not rule.per_result or label[0] == n)
                for a in taken[label]
            }
            wanted.append(
                None
                if shape is None
                else normal(P(*split(row, shape, taken), unreduced=kept | (gone if add else set())), axes, shape)
            )
        try:
            if rng.random() < 0.3 or any(type(label) is Parts for row in (*rule.ins, *rule.outs) for label in row):
                voted = solved(rule, lying, outs, dict(axes), ())
                again = solved(rule, list(zip(voted.targets, shapes)), outs, dict(axes), ())
                if again.targets != voted.targets:
                    continue
                return CallLayout(tuple(again.targets), tuple(o for o, s in zip(again.outs, outs) if s is not None))
            stated(rule, lying, outs, axes, wanted)
        except NotAllowed:
            continue
        if rule.blocks and not all_ranges(rule, [*ins, *wanted], axes):
            continue
        return CallLayout(tuple(ins), tuple(w for w in wanted if w is not None))
    return None


def all_ranges(rule, specs, axes):
    """Whether blocks along what needs ranges are ranges: no uneven dim in an order that is not the mesh's."""
    for row, one in zip((*rule.ins, *rule.outs), specs):
        for dim, label in enumerate(row):
            names = (() if one is None or dim >= len(one) else one[dim]) or ()
            names = (names,) if isinstance(names, str) else names
            if label in rule.blocks and list(names) != [a for a in axes if a in names]:
                return False
    return True


def sampled_layouts(rng, recorded, axes):
    """A layout of a recording."""
    hot, chosen = changed(recorded.graph), {}
    anyhow = lambda x: spec(rng, x.ndim, list(axes)) if isinstance(x, torch.Tensor) else None
    for node in calls(recorded.graph):
        if node in hot or written(node) or any(x in hot for x in node.all_input_nodes) or rng.random() < 0.1:
            continue
        if is_aten(node):
            if (call := sampled_call(rng, node, axes)) is not None:
                chosen[node.name] = call
    inputs = tuple(anyhow(value(node)) for node in recorded.placeholders)
    outputs = tuple(None if node is None else anyhow(value(node)) for node in recorded.results)
    return Layouts(axes, inputs, chosen, outputs)


def case(name):
    """A step and what it is called with."""
    rng = random.Random(name)
    if rng.random() < 0.5:
        program = PROGRAMS[rng.choice(sorted(PROGRAMS))]
        params, data = program.inputs()

        def f(params, data):
            return program.f(params, data, None, None)

        def derivative(params, data):
            total = lambda p: sum(
                (i + 1) * x.sum()
                for i, x in enumerate(vfn.tree.leaves(program.f(p, data, None, None)))
                if isinstance(x, torch.Tensor) and x.dtype is torch.float64
            )
            return vfn.value_and_grad(total)(params)

        both = program.name != "mixed_dtypes"  # whose sums of halves round otherwise in another order
        return (derivative if both and rng.random() < 0.7 else f), (params, data), program.name
    program = Sampled(name, UNEVEN)
    f = program.function()
    args = program.arguments(0)
    args = [x.contiguous() if isinstance(x, torch.Tensor) else x for x in args]
    if "bfloat16" in program.source or any(getattr(x, "dtype", None) in (torch.bfloat16, torch.float32) for x in args):
        return None
    return (_derivative(program, f) if rng.random() < 0.5 else None) or f, tuple(args), program.source


def fault(name, meshes=MESHES, show=False):
    """What is wrong with a layout of a case; None where nothing is; "" where it is no case."""
    rng, found = random.Random(f"layout {name}"), case(name)
    if found is None:
        return ""
    step, args, text = found
    sizes, names = rng.choice(meshes)
    axes = dict(zip(names, sizes))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            wanted = step(*args)
            recorded = record(step, *args)
        except Exception:
            return ""  # no program, or not one that can be recorded
        layouts = sampled_layouts(rng, recorded, axes)
        if show:
            print(text, axes)
            for node in recorded.graph.nodes:
                print(
                    node.name,
                    node.target if node.op == "call_function" else "",
                    node.args,
                    layouts.calls.get(node.name),
                )
            print(layouts.inputs, layouts.outputs)
        mesh = vfn.make_mesh(tuple(sizes), tuple(names))
        with vfn.use_mesh(mesh):
            f = applied(recorded, layouts)
            for how, g in (("eager", f), ("plan", vfn.jit(f))):
                if (wrong := _compared(g(*args), wanted, layouts, axes)) is not None:
                    return f"{how} on {axes}: {wrong}"
    return None


def _compared(found, wanted, layouts, axes):
    for i, (a, b, stated_) in enumerate(
        zip(vfn.tree.leaves(wanted), vfn.tree.leaves(found), layouts.outputs, strict=True)
    ):
        if stated_ is not None and isinstance(b, torch.Tensor):
            lies = vfn.spec_of(b)
            if normal(lies, axes, b.shape) != normal(stated_, axes, b.shape):
                return f"result {i} lies as {lies}, not as {stated_}"
        b = vfn.unshard(b) if isinstance(b, vfn.Array) else b
        if (wrong := differs(a, b, strides=False)) is not None:
            return f"result {i}: {wrong}"
    return None


def faults_on_ranks(names):
    """What is wrong with layouts of these cases on four real processes."""
    return {name: wrong for name in names if (wrong := fault(name, SMALL))}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", help="one case, as seed:number")
    options = parser.parse_args()
    torch.set_num_threads(1)
    left, wrong = options.cases, 0
    names = [options.case] if options.case else (f"{options.seed}:{i}" for i in itertools.count())
    for name in names:
        if left == 0:
            break
        with vfn.simulate(8):
            try:
                found = fault(name, show=bool(options.case))
            except Exception as error:
                found = f"raised {type(error).__name__}: {error}"
                if options.case:
                    traceback.print_exc()
        left -= found != ""
        if found:
            wrong += 1
            print(f"--- {name}: {found}", flush=True)
    print(f"{options.cases} cases, {wrong} wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
