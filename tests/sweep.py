"""Every op of torch's operator database, on sharded values against one device: the longer run.

    python tests/sweep.py                      # all of it: prints tables, exits 1 if anything is wrong or raises
    python tests/sweep.py --ops '^nn\\.' --samples 1 --kinds values,inplace --layouts 'over 3' --dtypes float64
    python tests/sweep.py --part 1/2           # every second op
    python tests/sweep.py --prove              # writes the list of ops in vescale_fn/_core/arrays/rules/proved.py anew

Each op runs on a few of its samples in each dtype of `DTYPES` that it takes, forward and backward, in inference mode, in
place, into ``out=``, and with a write through the view that it gives; every tensor argument that has the dims is laid out
in each of `LAYOUTS`, over even and uneven sizes. A run is right, or refused for a reason listed in
`vescale_fn/_core/arrays/refusals.py`, or its fault is torch's own and listed in `BEYOND`; else it is wrong, or raises. The database is
torch's own test code, and needs the `expecttest` package. All of it takes about ten minutes of one core.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import re
import sys
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import optree
import torch
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn._core.arrays import decide, dtensor_rules, gathered, interpreter, refusals
from vescale_fn._core.distributed import blocks
from vescale_fn.errors import VfnError

DTYPES = ("float32", "bfloat16", "int64")
VERDICTS = RIGHT, REFUSED, TORCHS, RAISES, WRONG = "right", "refused", "torch's", "raises", "wrong"
NO_VALUES = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}

# What torch's C++ does before any op reaches an array. (the op, the kind of run) -> what it does
BEYOND = {
    ("tensor_split", "values"): "reads the memory of indices given as an array: give a list, or a plain tensor",
    ("tensor_split", "view"): "reads the memory of indices given as an array: give a list, or a plain tensor",
    ("matmul", "out"): "writes into out= through a view that it takes for a copy, for any subclass of tensors",
    ("linalg.matrix_rank", "out"): "does not write into out=, for any subclass of tensors",
    ("linalg.matrix_rank.hermitian", "out"): "does not write into out=, for any subclass of tensors",
}

# name -> (the mesh, the spec of a value of n dims); None: partial sums
LAYOUTS: dict[str, tuple[tuple[int, ...], Callable[[int], P | None]]] = {
    "first over 2": ((2,), lambda n: P("a")),
    "first over 3": ((3,), lambda n: P("a")),
    "last over 2": ((2,), lambda n: P(*[None] * (n - 1), "a")),
    "last over 3": ((3,), lambda n: P(*[None] * (n - 1), "a")),
    "last over 4 as (a, b)": ((2, 2), lambda n: P(*[None] * (n - 1), ("a", "b"))),
    "first over 2, last over 2": ((2, 2), lambda n: P("a", *[None] * (n - 2), "b") if n > 1 else P("b")),
    "first over 4 as (b, a)": ((2, 2), lambda n: P(("b", "a"))),
    "partial over 2": ((2,), lambda n: None),
}


# Of even shards, for most sizes of the database are 5 and 10: what DTensor's own propagator is to be proved on.
PROVING: dict[str, tuple[tuple[int, ...], Callable[[int], P | None]]] = {
    **{
        f"dim {d} over {n}": ((n,), lambda ndim, d=d: P(*[None] * d, "a") if d < ndim else P())
        for n in (5, 2)
        for d in (0, 1, 2)
    },
    "last over 5": ((5,), lambda ndim: P(*[None] * (ndim - 1), "a")),
    "last two over 5 and 2": ((5, 2), lambda ndim: P(*[None] * (ndim - 2), "a", "b") if ndim > 1 else P("b")),
    "first over 2, last over 5": ((2, 5), lambda ndim: P("a", *[None] * (ndim - 2), "b") if ndim > 1 else P("b")),
}


def database() -> list[Any]:
    """The ops; imported here because it takes seconds, and is torch's test code."""
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


def widest(op: Any) -> torch.dtype | None:
    """The dtype that shows a wrong sum best."""
    for dtype in (torch.float64, torch.float32, torch.complex128, torch.int64, torch.bool):
        if dtype in op.dtypes:
            return dtype
    return None


def dtypes_of(op: Any, names: Iterable[str]) -> list[torch.dtype]:
    """Those of the named dtypes that an op takes; of an op that takes none of them, the widest."""
    taken = [dtype for dtype in (getattr(torch, name) for name in names) if dtype in op.dtypes]
    return taken or [dtype for dtype in (widest(op),) if dtype is not None]


def lay(x: torch.Tensor, mesh: Any, spec: Callable[[int], P | None]) -> torch.Tensor:
    """`x` as an array on the mesh; too few dims or a layout that is not strided: `x` itself."""
    if x.layout is not torch.strided or x.is_quantized:
        return x.detach().clone().requires_grad_(x.requires_grad)
    value = x.detach().clone(memory_format=torch.contiguous_format)
    target = spec(x.ndim)
    if target is None and x.dtype not in (torch.bool, torch.uint16, torch.uint32, torch.uint64):
        with torch.no_grad():  # parts that differ and add up exactly: 2x and -x
            parts = torch.stack(
                [torch.where(torch.isfinite(value), 2 * value, value), torch.where(torch.isfinite(value), -value, 0)]
            ).to(x.dtype)
            out = vfn.shard(parts, mesh, P("a")).sum(0, dtype=x.dtype)
    else:
        out = vfn.shard(value, mesh, P() if target is None or x.ndim == 0 else target)
    return out.requires_grad_(x.requires_grad)


def tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in optree.tree_leaves(tree, none_is_leaf=True) if isinstance(x, torch.Tensor)]


def fresh(tree: Any, make: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return optree.tree_map(lambda x: make(x) if isinstance(x, torch.Tensor) else x, tree, none_is_leaf=True)


def plain(x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone().requires_grad_(x.requires_grad)


def difference(want: Any, got: Any, values: bool = True) -> str:
    """What is first seen to differ, or nothing."""
    a, b = (optree.tree_leaves(tree, none_is_leaf=True) for tree in (want, got))
    if len(a) != len(b):
        return f"{len(b)} results for {len(a)}"
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        if isinstance(x, torch.Tensor) != isinstance(y, torch.Tensor):
            return f"result {i} is {type(y).__name__} for {type(x).__name__}"
        if not isinstance(x, torch.Tensor):
            if x != y and x == x:
                return f"result {i} is {y!r} for {x!r}"
            continue
        told = tuple(y.shape)
        y = vfn.unshard(y.detach())
        x = x.detach()
        if x.shape != y.shape or tuple(x.shape) != told:
            return f"result {i} has shape {told}, its values {tuple(y.shape)}, for {tuple(x.shape)}"
        if x.dtype != y.dtype:
            return f"result {i} has dtype {y.dtype} for {x.dtype}"
        if values and x.layout is torch.strided and not close(x, y):
            return f"result {i} has other values: {y.flatten()[:4].tolist()} for {x.flatten()[:4].tolist()}"
    return ""


def close(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Equal; floats up to what other sums round: a part of the largest value, since terms may cancel in a small one."""
    if not (x.dtype.is_floating_point or x.dtype.is_complex):
        return torch.equal(x, y)
    part = torch.finfo(x.dtype).eps ** 0.6  # 4e-10 of float64, 7e-5 of float32, 0.05 of bfloat16
    finite = x[torch.isfinite(x)].abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(x, y, rtol=part, atol=part * max(1.0, largest), equal_nan=True)


def as_near(op: Any, sample: Any, want: Any, got: Any) -> bool:
    """Whether halves are as near to what float32 gives as those of one device are, up to a factor: both may be noise."""
    halves = (torch.bfloat16, torch.float16)
    if not any(isinstance(x, torch.Tensor) and x.dtype in halves for x in tensors(want)):
        return False
    widened = lambda x: x.detach().float().requires_grad_(x.requires_grad) if x.dtype in halves else plain(x)
    torch.manual_seed(0)
    try:
        exact = run_values(op, sample, widened)
    except Exception:
        return False
    for x, y, z in zip(*(optree.tree_leaves(tree, none_is_leaf=True) for tree in (want, got, exact)), strict=True):
        if isinstance(x, torch.Tensor) and not close(x.detach(), y := vfn.unshard(y.detach())):
            if x.dtype not in halves or z.shape != x.shape:
                return False
            here, there = ((v.detach().float() - z.detach().float()).abs().max() for v in (x, y))
            if not there <= 2 * here + 2 * torch.finfo(x.dtype).eps * z.detach().abs().max():
                return False
    return True


def gradients(outs: Any, leaves: list[torch.Tensor]) -> Any:
    """The gradients of a sum of all results' squares, each with a weight of its own, or None where there are none."""
    wanted = [x for x in leaves if x.requires_grad]
    loss = [weighted_sum(o) for o in tensors(outs) if o.requires_grad and o.layout is torch.strided]
    if not wanted or not loss:
        return None
    return torch.autograd.grad(functools.reduce(torch.add, loss), wanted, allow_unused=True)


def weighted_sum(o: torch.Tensor) -> torch.Tensor:
    """Weights that differ: of equal ones the gradient of a normalised value is nothing but rounding."""
    squares = (o * o.conj()).real if o.is_complex() else o * o
    weights = torch.linspace(0.5, 1.5, o.numel(), dtype=torch.float64).to(squares.dtype).reshape(o.shape)
    return (squares * weights).sum()


# --- the kinds of runs: each gives what is to be compared, from a function that makes an argument -----------------


def run_values(op: Any, sample: Any, make: Any) -> Any:
    """Results, and the gradients of all arguments."""
    args = fresh((sample.input, sample.args, sample.kwargs), make)
    out = op(args[0], *args[1], **args[2])
    try:
        return out, gradients(out, tensors(args))
    except (RuntimeError, NotImplementedError) as error:
        return out, error


def run_inference(op: Any, sample: Any, make: Any) -> Any:
    """Results in inference mode, where composite ops come as they are."""
    with torch.inference_mode():
        args = fresh((sample.input, sample.args, sample.kwargs), make)
        return op(args[0], *args[1], **args[2])


def run_inplace(op: Any, sample: Any, make: Any) -> Any:
    """What an in-place op leaves in its argument, in the value that it was a view of, and what it returns."""
    variant = op.get_inplace()
    if variant is None or not isinstance(sample.input, torch.Tensor):
        return None
    with torch.no_grad():
        first, args, kwargs = fresh((sample.input, sample.args, sample.kwargs), make)
        alias = first.detach()
        out = variant(first, *args, **kwargs)
    return out, first, alias


def run_out(op: Any, sample: Any, make: Any) -> Any:
    """What is written into ``out=``."""
    if not op.supports_out:
        return None
    with torch.no_grad():
        first, args, kwargs = fresh((sample.input, sample.args, sample.kwargs), make)
        like = op(*fresh((sample.input, *sample.args), plain), **fresh(sample.kwargs, plain))
        if not tensors(like):
            return None
        target = fresh(like, lambda x: make(torch.zeros_like(x)))
        op(first, *args, **kwargs, out=target)
    return target


def run_view(op: Any, sample: Any, make: Any) -> Any:
    """The argument after a write into what the op gave, and what it gave after a write into the argument."""
    if not isinstance(sample.input, torch.Tensor) or op.name.startswith("unsafe_"):
        return None  # writes through unsafe_split are undefined
    with torch.no_grad():
        if not any(
            aliases(o, x)
            for x in [plain(sample.input)]
            for o in tensors(op(x, *fresh(sample.args, plain), **fresh(sample.kwargs, plain)))
        ):
            return None
        first, args, kwargs = fresh((sample.input, sample.args, sample.kwargs), make)
        outs = tensors(op(first, *args, **kwargs))
        first.mul_(3) if first.dtype is not torch.bool else first.logical_not_()
        after = [o + 0 if o.dtype is not torch.bool else ~o for o in outs]
        for o in outs[:1]:
            o.add_(1) if o.dtype is not torch.bool else o.logical_not_()
    return first, after


def aliases(a: torch.Tensor, b: torch.Tensor) -> bool:
    strided = a.layout is torch.strided and b.layout is torch.strided and a.numel() and b.numel()
    return bool(strided) and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


KINDS = {"values": run_values, "inference": run_inference, "inplace": run_inplace, "out": run_out, "view": run_view}


def samples_of(op: Any, dtype: torch.dtype | None, count: int) -> list[Any]:
    """`count` of an op's samples, the first and others evenly spaced: the database begins with the simplest ones."""
    torch.manual_seed(0)
    found: list[Any] = []
    if dtype is not None:
        with contextlib.suppress(Exception):  # a few need a GPU, or what is not built in
            grads = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
            for sample in op.sample_inputs("cpu", dtype, requires_grad=grads):
                if sum(t.numel() for t in tensors((sample.input, sample.args, sample.kwargs))) < 20000:
                    found.append(sample)
                if len(found) == 60:
                    break
    return [found[k * len(found) // count] for k in range(min(count, len(found)))]


def verdicts(
    op: Any, dtype: torch.dtype, count: int, layouts: dict[str, Any], kinds: Any
) -> Iterator[tuple[str, str, str, str]]:
    """(kind, layout, verdict, what was seen) for each run of an op."""
    for sample in samples_of(op, dtype, count):
        for kind in kinds:
            torch.manual_seed(0)
            try:
                want = KINDS[kind](op, sample, plain)
            except Exception:
                continue  # the sample does not fit this kind
            if want is not None:
                for layout, (mesh_shape, spec) in layouts.items():
                    with vfn.simulate(math.prod(mesh_shape)):
                        mesh = vfn.make_mesh(mesh_shape, ("a", "b")[: len(mesh_shape)])
                        yield (
                            kind,
                            layout,
                            *verdict(op, sample, kind, want, functools.partial(lay, mesh=mesh, spec=spec)),
                        )


def verdict(op: Any, sample: Any, kind: str, want: Any, make: Any) -> tuple[str, str]:
    """One run against what one device gives."""
    torch.manual_seed(0)
    try:
        got = KINDS[kind](op, sample, make)
        if kind == "values" and isinstance(want[1], Exception):  # one device has no gradient: nothing to compare with
            want, got = (want[0], None), (got[0], None)
        elif kind == "values" and isinstance(got[1], Exception):
            raise got[1]
        seen = difference(want, got, op.name.split(".")[-1] not in NO_VALUES)
        if seen and kind == "values" and as_near(op, sample, want, got):
            seen = ""
        return (WRONG if seen else RIGHT), seen
    except VfnError as error:
        why = next((reason for reason in refusals.REASONS if reason in str(error)), None)
        return (REFUSED, why) if why else (RAISES, f"{type(error).__name__} that is not listed: {error}")
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return RAISES, f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"


def sweep(
    ops: Iterable[Any], dtypes: Iterable[str], samples: int, layouts: dict[str, Any], kinds: Any
) -> dict[Any, Any]:
    """{(op, kind, dtype): {verdict: [(layout, what was seen)]}}"""
    table: dict[Any, Any] = defaultdict(lambda: defaultdict(list))
    for op in ops:
        name = name_of(op)
        for dtype in dtypes_of(op, dtypes):
            for kind, layout, found, seen in verdicts(op, dtype, samples, layouts, kinds):
                if found in (RAISES, WRONG) and (name, kind) in BEYOND:
                    found, seen = TORCHS, BEYOND[name, kind]
                table[name, kind, str(dtype).removeprefix("torch.")][found].append((layout, seen))
    return table


def name_of(op: Any) -> str:
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


@contextlib.contextmanager
def noting_gathers(where: dict[str, set[str]], ops: list[Any]) -> Iterator[Iterator[Any]]:
    """Gives the ops again; what each of them computes whole on gathered arguments is put into `where`."""
    plainly, current = interpreter.decide, [""]

    def noted(func: Any, args: Any, kwargs: Any, *lies: Any) -> Any:
        decision = plainly(func, args, kwargs, *lies)
        arrays = [x for x in tensors((args, kwargs)) if isinstance(x, DTensor)]
        one = getattr(decision, "then", decision)
        if isinstance(one, gathered.Gathered) and not blocks.written(func) and any(vfn.spec_of(x) for x in arrays):
            where[str(func)].add(current[0])
        return decision

    def named() -> Iterator[Any]:
        for op in ops:
            current[0] = name_of(op)
            interpreter.clear_cache()  # so that each op is decided on anew
            yield op

    interpreter.decide = noted
    try:
        yield named()
    finally:
        interpreter.decide = plainly


class Everything:
    """In place of the list of proved ops: all of them."""

    def __contains__(self, name: str) -> bool:
        return True


def prove(ops: list[Any], samples: int) -> tuple[list[str], dict[str, str]]:
    """The aten ops that DTensor's propagator ran right in every run of every op in which it was asked, and the others."""
    asked: set[str] = set()

    def recorded(func: Any, *args: Any) -> Any:
        answer = dtensor_rules.propagated(func, *args)
        if answer is not None:
            asked.add(str(func))
        return answer

    right: Counter[str] = Counter()
    others: dict[str, str] = {}
    before = dtensor_rules.PROVED, decide.propagated
    dtensor_rules.PROVED, decide.propagated = Everything(), recorded
    try:
        for op in ops:
            ever: set[str] = set()
            for i, sample in enumerate(samples_of(op, widest(op), samples)):
                torch.manual_seed(0)
                try:
                    want = run_values(op, sample, plain)
                except Exception:
                    continue  # the sample does not fit
                for layout, (mesh_shape, spec) in PROVING.items():
                    with vfn.simulate(math.prod(mesh_shape)):
                        mesh = vfn.make_mesh(mesh_shape, ("a", "b")[: len(mesh_shape)])
                        asked.clear()
                        interpreter.clear_cache()  # so that every op is asked about again
                        found, seen = verdict(op, sample, "values", want, functools.partial(lay, mesh=mesh, spec=spec))
                    if found in (WRONG, RAISES):
                        others.update(dict.fromkeys(asked, f"{op.name}, {layout}: {seen}"))
                    else:
                        right.update(asked)
                    ever |= asked
                if not ever and i > 0:
                    break  # the table has a rule for all of it
    finally:
        dtensor_rules.PROVED, decide.propagated = before
        interpreter.clear_cache()
    return sorted(name for name in right if name not in others and right[name] > 3), others


def write_proved(names: list[str]) -> None:
    path = Path(dtensor_rules.__file__).parent / "rules" / "proved.py"
    head = path.read_text().split("PROVED:")[0]
    rows = "".join(f'        "{name}",\n' for name in names)
    path.write_text(f"{head}PROVED: frozenset[str] = frozenset(\n    {{\n{rows}    }}\n)\n")


def worst(row: Any) -> str:
    return next(v for v in reversed(VERDICTS) if row.get(v))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default="", help="a regular expression on the ops' names")
    parser.add_argument("--layouts", default="", help="a regular expression on the layouts' names")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--part", default="1/1")
    parser.add_argument("--prove", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    part, parts = map(int, args.part.split("/"))
    ops = [op for op in database() if re.search(args.ops, op.name)][part - 1 :: parts]
    if args.prove:
        names, others = prove(ops, args.samples)
        write_proved(names)
        print(
            f"{len(names)} proved; not: " + "".join(f"\n  {name}: {why[:200]}" for name, why in sorted(others.items()))
        )
        return 0
    layouts = {name: layout for name, layout in LAYOUTS.items() if re.search(args.layouts, name)}
    begin, gathered = time.time(), defaultdict(set)
    with noting_gathers(gathered, ops) as named:
        table = sweep(named, args.dtypes.split(","), args.samples, layouts, args.kinds.split(","))
    print(report(table, gathered))
    print(f"\n{len(ops)} ops, {time.time() - begin:.0f} s")
    return int(any(row[WRONG] or row[RAISES] for row in table.values()))


def report(table: dict[Any, Any], gathered: dict[str, set[str]]) -> str:
    """What is wrong; why ops are refused; which are computed whole; and the counts."""
    lines, reasons = [], defaultdict(set)
    for (name, kind, dtype), row in sorted(table.items()):
        for verdict in (WRONG, RAISES):
            if row[verdict]:
                at, seen = row[verdict][0]
                lines.append(f"{verdict:8} {kind:9} {dtype:8} {name}: {len(row[verdict])} runs; {at}: {seen[:300]}")
        for verdict in (REFUSED, TORCHS):
            for _, why in row[verdict]:
                reasons[verdict, why].add(name if kind == "values" else f"{name} ({kind})")
    for (verdict, why), names in sorted(reasons.items()):
        lines.append(f"\n{verdict}: {why}\n    {', '.join(sorted(names))}")
    lines.append("\ncomputed whole, on gathered arguments:")
    lines += [f"    {op}: {', '.join(sorted(names)[:6])}" for op, names in sorted(gathered.items())]

    def count(title: str, rows: dict[Any, list[str]]) -> None:
        lines.append(f"\n{title:48}" + "".join(f"{v:>9}" for v in VERDICTS))
        for key, worsts in rows.items():
            found = Counter(worsts)
            lines.append(f"{key:48}" + "".join(f"{found[v]:>9}" for v in VERDICTS))

    kinds, layouts = defaultdict(list), defaultdict(list)
    for (_, kind, dtype), row in table.items():
        kinds[kind].append(worst(row))
        by_layout = defaultdict(lambda: defaultdict(list))
        for verdict, runs in row.items():
            for at, seen in runs:
                by_layout[at][verdict].append(seen)
        for at, seen in by_layout.items() if kind == "values" else ():
            layouts[f"{dtype}, {at}"].append(worst(seen))
    count("ops and dtypes, by their worst run", kinds)
    count("forward and backward: ops, by their worst run", dict(sorted(layouts.items())))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
