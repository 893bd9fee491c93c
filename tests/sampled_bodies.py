"""Sampled `shard_map` programs against a plain loop over ranks.

A seed makes a mesh, arguments, specs, a body and its outputs; the same lines then run through `vfn.shard_map` and through
`rank_loop`. The ordinary tests take a few hundred. The long battery is

    python tests/sampled_bodies.py --cases 5000 --seed 1       # 1:0 to 1:4999, every transform of each
    python tests/sampled_bodies.py --case 1:17                 # one again, with its program

A program that the types refuse must be one that the rules of `SAME_BY_RULE` refuse, and what they let pass must be equal:
outputs, and the derivatives under every transform, with the check and without.

Source: the idea is that of JAX's `ShardMapSystematicTest`.
"""

import argparse
import linecache
import math
import random
import re
import sys
import time
import traceback
import warnings
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from rank_loop import Line, Ranks, Scaled, cut, differs, paste, step

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn._core import torch_internals
from vescale_fn._core.distributed.blocks import Blocks
from vescale_fn.errors import SpecError

MESHES = [(1,), (2,), (3,), (4,), (8,), (2, 2), (2, 3), (1, 4), (4, 2), (2, 1), (2, 2, 2), (2, 1, 3), (1, 1)]
REAL = [(4,), (2, 2), (1, 4), (2, 1, 2)]  # those of 4 ranks
MOST = 300  # elements of a value


@dataclass
class Value:
    """A value of the body: its blocks, and its type by our own reading of the rules: the axes over which it is
    varying, reduced, unreduced."""

    name: str
    blocks: list
    varying: frozenset = frozenset()
    reduced: frozenset = frozenset()
    unreduced: frozenset = frozenset()

    @property
    def shape(self):
        return tuple(self.blocks[0].shape)

    @property
    def ndim(self):
        return self.blocks[0].ndim

    @property
    def is_float(self):
        return self.blocks[0].is_floating_point()


@dataclass
class Input:
    """An input of the program: an argument of the body, or, without a spec, captured by it."""

    name: str
    whole: torch.Tensor
    spec: P | None
    lies: P | None = None  # an array that lies so, where it is not a plain tensor

    @property
    def body_spec(self):
        return P() if self.spec is None else self.spec


@dataclass
class Case:
    """One sampled program."""

    seed: str
    shape: tuple
    names: tuple
    inputs: list = field(default_factory=list)
    lines: list = field(default_factory=list)
    outputs: list = field(default_factory=list)  # (name of the value, its spec)
    as_dict: bool = False  # the first arguments, in a dict
    nested: bool = False  # the outputs, in a dict of tuples
    refused: bool = False  # an out_spec leaves out an axis over which the value is typed varying
    broken: bool = False  # and along which it differs
    typed_only: bool = False  # means something else without types

    def text(self):
        """The program, as `compiled` runs it."""
        passed = [x for x in self.inputs if x.spec is not None]
        packed = passed[: 2 * self.as_dict]
        rest = passed[len(packed) :]
        parameters = ", ".join(["p"] * bool(packed) + [x.name for x in rest])
        given = ", ".join(
            ["{" + ", ".join(f"{x.name!r}: {x.name}" for x in packed) + "}"] * bool(packed) + [x.name for x in rest]
        )
        in_specs = ["{" + ", ".join(f"{x.name!r}: {x.spec!r}" for x in packed) + "}"] * bool(packed) + [
            repr(x.spec) for x in rest
        ]
        head = [", ".join(x.name for x in packed) + " = " + ", ".join(f"p[{x.name!r}]" for x in packed)] * bool(packed)
        body = [f"{', '.join(line.targets)} = {line.text}" for line in self.lines]
        return "\n".join(
            [
                f"def program({', '.join(x.name for x in self.inputs)}):",
                f"    def body({parameters}):",
                *(f"        {line}" for line in [*head, *body]),
                f"        return {self._structure([name for name, _ in self.outputs])}",
                f"    in_specs = ({', '.join(in_specs)},)",
                f"    out_specs = {self._structure([repr(spec) for _, spec in self.outputs])}",
                "    return vfn.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check)"
                f"({given})",
            ]
        )

    def _structure(self, items):
        if self.nested:
            return f"{{'first': {items[0]}, 'rest': ({''.join(item + ', ' for item in items[1:])})}}"
        return items[0] if len(items) == 1 else f"({', '.join(items)})"

    def compiled(self, mesh, check):
        """The program through `vfn.shard_map`: from the inputs to the list of outputs."""
        name = f"<case {self.seed}>"
        text = self.text()
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        space = {"torch": torch, "F": F, "vfn": vfn, "P": P, "Scaled": Scaled, "mesh": mesh, "check": check}
        exec(compile(text, name, "exec"), space)
        program = space["program"]

        def leaves(*inputs):
            out = program(*inputs)
            out = (out["first"], *out["rest"]) if self.nested else out
            return out if isinstance(out, tuple) else (out,)

        return leaves

    def reference(self, *inputs):
        """The same through the loop over ranks."""
        ranks = Ranks(self.shape, self.names)
        values = {x.name: cut(whole, x.body_spec, ranks) for x, whole in zip(self.inputs, inputs, strict=True)}
        for line in self.lines:
            step(line, ranks, values)
        return tuple(paste(values[name], spec, ranks) for name, spec in self.outputs)

    def show(self):
        """The program with its mesh and inputs, to read and to run again."""
        inputs = "".join(
            f"\n# {x.name}: {str(x.whole.dtype)[6:]}{list(x.whole.shape)}, "
            + ("captured" if x.spec is None else "plain" if x.lies is None else f"lies as {x.lies!r}")
            for x in self.inputs
        )
        mesh = ", ".join(f"{name}={size}" for name, size in zip(self.names, self.shape))
        kind = " (to be refused)" if self.refused else ""
        return f"# case {self.seed}{kind}: mesh ({mesh}){inputs}\n{self.text()}"


# --- sampling ---------------------------------------------------------------------------------------------------------


class Sampler:
    """Builds a case line by line, knowing each value so far."""

    def __init__(self, seed, meshes=MESHES):
        self.rng = random.Random(seed)
        self.generator = torch.Generator().manual_seed(self.rng.randrange(2**31))
        (shape,) = self.rng.choices(meshes, [1 if math.prod(shape) == 1 else 4 for shape in meshes])
        self.case = Case(seed, shape, tuple(self.rng.sample("xyz", len(shape))))
        self.ranks = Ranks(shape, self.case.names)
        self.values = []
        self.fresh_names = 0

    # inputs

    def spec(self, ndim, chance=0.75):
        """Some axes, each at some dim, in any order."""
        rows = [[] for _ in range(ndim)]
        for axis in self.rng.sample(self.case.names, len(self.case.names)):
            if ndim and self.rng.random() < chance:
                self.rng.choice(rows).append(axis)
        return self.as_spec(rows)

    def as_spec(self, rows, **marks):
        made = [None if not row else row[0] if len(row) == 1 else tuple(row) for row in rows]
        while made and made[-1] is None and self.rng.random() < 0.7:
            made.pop()
        return P(*made, **marks)

    def input(self, name, dtype=torch.float64):
        ndim = self.rng.choice([0, 1, 1, 2, 2, 2, 3]) if dtype is torch.float64 else 1
        spec = self.spec(ndim)
        rows = [() if e is None else e if isinstance(e, tuple) else (e,) for e in spec]
        rows += [()] * (ndim - len(rows))
        shape = [self.rng.choice([1, 2, 3]) * math.prod(self.ranks.sizes[a] for a in row) for row in rows]
        if math.prod(shape) > 2 * MOST:
            return self.input(name, dtype)
        used = {axis for row in rows for axis in row}
        free = [axis for axis in self.case.names if axis not in used]
        reduced = frozenset(axis for axis in free if dtype is torch.float64 and self.rng.random() < 0.05)
        spec = P(*spec, reduced=reduced)
        lies = None
        if self.rng.random() < 0.3:
            lies = P(*spec) if self.rng.random() < 0.5 else self.spec(ndim)
        self.add_input(Input(name, self.draw(shape, dtype), spec, lies), frozenset(used), reduced)

    def draw(self, shape, dtype=torch.float64):
        if dtype is torch.float64:
            return torch.randn(shape, generator=self.generator, dtype=dtype)
        return torch.randint(0, 6, shape, generator=self.generator, dtype=dtype)

    def add_input(self, x, varying=frozenset(), reduced=frozenset()):
        self.case.inputs.append(x)
        self.values.append(Value(x.name, cut(x.whole, x.body_spec, self.ranks), varying, reduced))
        return self.values[-1]

    def captured(self, *shape):
        """A weight of this shape that the body closes over: an old one, or a new one."""
        for x in self.case.inputs:
            if x.spec is None and tuple(x.whole.shape) == shape:
                return next(value for value in self.values if value.name == x.name)
        return self.add_input(
            Input(f"w{len(self.case.inputs)}", self.draw(shape) / max(1, shape[0] if shape else 1), None)
        )

    # values

    def pick(self, *, ndim=0, floats=True, plain=False, where=lambda value: True):
        """One of the values so far, late ones more often; None if there is none of that kind."""
        found = [
            v
            for v in self.values
            if v.ndim >= ndim and v.is_float == floats and not v.unreduced and not (plain and v.reduced) and where(v)
        ]
        return self.rng.choice(found[-5:] if self.rng.random() < 0.6 else found) if found else None

    def name(self):
        self.fresh_names += 1
        return f"v{self.fresh_names}"

    def add(self, text, *operands, fresh=False):
        """A line that does not communicate. `fresh`: it makes a constant, too."""
        varying = frozenset().union(*(v.varying for v in operands))
        reduced = frozenset().union(*(v.reduced for v in operands)) - varying
        invariant = any(not axis_is_in(v, axis) for axis in reduced for v in operands) or (fresh and reduced)
        if invariant:
            return None  # reduced meets invariant
        line = Line([self.name()], text.format(*(v.name for v in operands)))
        return self.ran(line, [(varying, reduced, frozenset().union(*(v.unreduced for v in operands)))])

    def ran(self, line, types):
        """Run a line at once; it is kept if what it gives is of a moderate size."""
        values = {v.name: v.blocks for v in self.values}
        step(line, self.ranks, values)
        found = [values[target] for target in line.targets]
        for blocks in found:
            if blocks[0].numel() > MOST or any(
                not torch.isfinite(b.double()).all() or b.double().abs().amax() > 50 for b in blocks if b.numel()
            ):
                return None
        self.case.lines.append(line)
        made = [Value(target, blocks, *t) for target, blocks, t in zip(line.targets, found, types, strict=True)]
        for value in made:
            same = [axis for axis in self.case.names if axis not in value.varying | value.unreduced]
            assert not differs(value.blocks, same, self.ranks), (
                f"the rules call {value.name} the same\n{self.case.show()}"
            )
        self.values += made
        return made[0]

    def axes(self, value=None):
        """An axis or several in any order, as a tuple and as a user writes them."""
        names = list(self.case.names)
        likely = [a for a in names if value is not None and a in value.varying]
        if likely and self.rng.random() < 0.7:
            names = likely
        axes = tuple(self.rng.sample(names, 1 if self.rng.random() < 0.65 else self.rng.randint(1, len(names))))
        return axes, repr(axes[0] if len(axes) == 1 and self.rng.random() < 0.8 else axes)

    def size(self, axes):
        return math.prod(self.ranks.sizes[axis] for axis in axes)

    def collective(self, name, values, axes, said, gives="V", **parameters):
        """A line that communicates, on one value or on a tuple of them."""
        operand = "{0}" if len(values) == 1 else "(" + ", ".join(f"{{{i}}}" for i in range(len(values))) + ")"
        call = called(name, operand, said, parameters)
        elementwise = name in ("psum", "pmean", "ppermute", "pbroadcast") and len(values) == 1
        if name in ("pmax", "pmin"):
            call = call.replace("{0}", "{0}.detach()")
        elif elementwise and self.rng.random() < 0.1:
            call = f"vfn.remat(lambda t: {call.replace('{0}', 't.clone()')})({{0}})"
        elif elementwise and values[0].ndim and self.rng.random() < 0.1:
            call = f"vfn.vmap(lambda t: {call.replace('{0}', 't')})({{0}})"
        text = call.format(*(v.name for v in values))
        line = Line([self.name() for _ in values], text, name, [v.name for v in values], axes, parameters)
        types = [[v.varying - set(axes), v.reduced - set(axes), v.unreduced - set(axes)] for v in values]
        for row in types:
            if gives != "I":
                row["VRU".index(gives)] |= set(axes)
        return self.ran(line, types)

    # the whole

    def sampled(self):
        for name in "abc"[: self.rng.choice([1, 2, 2, 3])]:
            self.input(name)
        if self.rng.random() < 0.35:
            self.input("i", self.rng.choice([torch.int64, torch.int32]))
        passed = len(self.case.inputs)
        self.case.as_dict = passed >= 2 and self.rng.random() < 0.25
        wanted, tries = self.rng.randint(2, 8), 0
        while len(self.case.lines) < wanted and tries < 60:
            tries += 1
            self.rng.choices(STEPS, WEIGHTS)[0](self)
        self.choose_outputs()
        return self.case

    def choose_outputs(self):
        used = set(re.findall(r"\w+", " ".join(line.text for line in self.case.lines)))
        made = [v for v in self.values if v.name.startswith("v")] or self.values
        ends = [v for v in made if v.name not in used] or made  # what no line uses: no line is in vain
        if not any(v.is_float for v in ends):
            ends.append(next(v for v in reversed(self.values) if v.is_float and not v.unreduced))
        chosen = self.rng.sample(ends, len(ends))
        if self.rng.random() < 0.3:
            chosen.append(self.rng.choice(self.values))
        leave_out = self.rng.random() < 0.12
        for value in chosen:
            if value.varying and not value.ndim:
                value = self.add("{0}[None]", value)
            rows, reduced, unreduced = [[] for _ in range(value.ndim)], set(), set()
            for axis in self.rng.sample(self.case.names, len(self.case.names)):
                if axis in value.varying:
                    if leave_out and self.rng.random() < 0.7:
                        self.case.refused = True
                        self.case.broken |= differs(value.blocks, (axis,), self.ranks)
                    else:
                        self.rng.choice(rows).append(axis)
                elif axis in value.unreduced:
                    unreduced.add(axis)
                elif axis in value.reduced and (not rows or self.rng.random() < 0.5):
                    reduced.add(axis)
                elif rows and (axis in value.reduced or self.rng.random() < 0.2):
                    self.rng.choice(rows).append(axis)  # tiled
            self.case.outputs.append((value.name, self.as_spec(rows, reduced=reduced, unreduced=unreduced)))
        self.case.nested = len(chosen) > 1 and self.rng.random() < 0.4


def called(name, operand, said, parameters):
    """The text of a collective."""
    given = [
        str(value) if key in ("split_axis", "concat_axis", "perm", "source") else f"{key}={value!r}"
        for key, value in parameters.items()
    ]
    return f"vfn.{name}({', '.join([operand, said, *given])})"


def axis_is_in(value, axis):
    return axis in value.varying or axis in value.reduced


# --- what a line can be -----------------------------------------------------------------------------------------------

UNARY = """torch.tanh({0}) | torch.sin({0}) | {0}.sigmoid() | F.gelu({0}) | F.silu({0}) | {0}.square() * 0.3 | 0.5 * {0}
| 1.0 - {0} | torch.exp(-{0}.square()) | F.softplus({0}) | {0}.clone() | -{0} | {0}.sum() | {0}.mean() | {0}.reshape(-1)
| {0}[None] | torch.where({0} > 0.137, {0}, {0} * 0.1) | vfn.remat(lambda t: torch.tanh(t).sin())({0}) | {0} + 1
| vfn.grad(lambda t: torch.sin(t).sum())({0}) | {0}.unsqueeze(-1) | torch.stack([{0}, {0}.sin()], -1)""".split("|")
FRESH = """{0} + torch.full((), 0.3, dtype=torch.float64) | torch.zeros_like({0}) + torch.ones((), dtype=torch.float64)
| {0}[..., None] * torch.linspace(0.5, 1.5, 3, dtype=torch.float64) | {0} * torch.tensor(0.7, dtype=torch.float64)
| torch.cat([{0}.reshape(-1), torch.arange(2.0, dtype=torch.float64)])""".split("|")
FROM_ONE_DIM = """{0}.sum({d}) | {0}.mean({d}, keepdim=True) | {0}.softmax({d}) | F.log_softmax({0}, {d}) | {0}.logsumexp({d})
| {0}.amax({d}) | {0}.cumsum({d}) | {0} * torch.rsqrt({0}.square().mean({d}, keepdim=True) + 0.1) | {0}.flip({d})
| {0}.select({d}, 0) | {0}.narrow({d}, 0, 1) | torch.roll({0}, 1, {d}) | {0}.movedim({d}, 0) | torch.cat([{0}, {0}.sin()], {d})
| F.layer_norm({0}, {0}.shape[-1:], eps=0.1) | F.pad({0}, (1, 0)) | {0}[..., :1] | {0}[-1] | {0}.mT if {0}.ndim > 1 else {0}
| vfn.vmap(lambda t: (t * t).sum())({0}) | torch.repeat_interleave({0}, 2, {d}) | {0}.var({d}, unbiased=False)
| torch.empty_like({0}).copy_({0})""".split("|")
BINARY = """{0} + {1} | {0} * {1} | {0} - {1} | torch.where({0} > 0.137, {1}, 0.5 * {0}) | torch.atan2({0}, {1}.square() + 1.0)
| torch.lerp({0}, {1}, 0.25) | {0} / ({1}.square() + 1.0) | torch.hypot({0}, {1} + 3.0)""".split("|")
INTEGERS = """{0} * 3 + 1 | {0} % 3 | {0} > 2 | {0}.sum() | -{0} | {0}[:1] | {0} // 2""".split("|")


def unary(s):
    text = s.rng.choice(UNARY).strip()
    if (a := s.pick(plain="vfn.grad" in text)) is not None:  # the gradient of what is reduced is unreduced
        s.add(text, a)


def fresh(s):
    if (a := s.pick(plain=s.rng.random() < 0.8)) is not None:
        s.add(s.rng.choice(FRESH).strip(), a, fresh=True)


def one_dim(s):
    if (a := s.pick(ndim=1)) is not None:
        text = s.rng.choice(FROM_ONE_DIM).strip().replace("{d}", str(s.rng.randrange(-a.ndim, a.ndim)))
        s.add(text, a)


def binary(s):
    a = s.pick()
    b = s.pick(where=lambda v: fits(a.shape, v.shape))
    if b is not None:
        s.add(s.rng.choice(BINARY).strip(), *s.rng.sample([a, b], 2))


def fits(one, other):
    return all(m == n or 1 in (m, n) for m, n in zip(reversed(one), reversed(other)))


def with_weight(s):
    """A captured weight is used."""
    a = s.pick(ndim=1, plain=True)
    if a is not None:
        if s.rng.random() < 0.6:
            s.add("{0} @ {1}", a, s.captured(a.shape[-1], s.rng.choice([2, 3])))
        else:
            s.add(
                s.rng.choice(["{0} * {1}", "{0} + {1}.tanh()", "F.layer_norm({0}, {1}.shape, {1}, eps=0.1)"]),
                a,
                s.captured(a.shape[-1]),
            )


def matmul(s):
    a = s.pick(ndim=1)
    if a is None:
        return
    b = s.pick(ndim=2, where=lambda v: v.shape[-2] == a.shape[-1] and fits(a.shape[:-2], v.shape[:-2]))
    if b is not None:
        s.add("{0} @ {1}", a, b)
    else:
        s.add(
            s.rng.choice(
                ["torch.einsum('...i,...i->...', {0}, {0}.sin())", "torch.einsum('...i,...j->...ij', {0}, {0})"]
            ),
            a,
        )


def own_function(s):
    a = s.pick()
    b = s.pick(where=lambda v: v.shape == a.shape)
    s.add("Scaled.apply({0}, {1})", a, b)


def position(s):
    """The rank's position, as a number, a condition, or an index."""
    a = s.pick()
    axes, said = s.axes()
    k = s.ran(Line([s.name()], f"vfn.axis_index({said})", "axis_index", axes=axes), [(frozenset(axes),)])
    if k is None or (a.reduced - set(axes)):
        return
    kinds = ["torch.where({1} == 1, {0}, {0} * 0.5)", "{0} * ({1} + 1)", "torch.where({1} % 2 == 0, {0}.sin(), {0})"]
    if a.ndim:
        size = a.shape[0]
        rest = "".join(f", {n}" for n in a.shape[1:])
        kinds += [
            f"{{0}}[{{1}}[None] % {size}]",
            f"vfn.dynamic_slice({{0}}, ({{1}}{', 0' * (a.ndim - 1)}), ({min(size, 2)}{rest},))".replace(
                "({1})", "({1},)"
            ),
        ]
    s.add(s.rng.choice(kinds), a, k, fresh=bool(a.ndim and a.reduced))


def by_index(s):
    """An integer value is an index, a number, a class."""
    i = s.pick(floats=False, where=lambda v: v.blocks[0].dtype is torch.int64 or v.blocks[0].dtype is torch.int32)
    a = s.pick(ndim=1, plain=True)
    if i is None or a is None:
        return
    kinds = [
        f"{{0}}[{{1}}.reshape(-1).abs().long() % {a.shape[0]}]",
        "{0}.sum() * {1}",
        "{0}.sum() + {1}.double().sin()",
    ]
    if i.ndim == 1:
        kinds += [
            f"{{0}}.index_select(0, {{1}}.abs() % {a.shape[0]})",
            "({1}[:, None] % 3 == torch.arange(3)) * {0}.mean()",
            "{0}.mean() * ({1} > 1).double()",
        ]
        if i.shape[0] <= a.shape[0]:
            kinds += [f"torch.zeros_like({{0}}).index_add(0, {{1}}.abs() % {a.shape[0]}, {{0}}[:{i.shape[0]}])"]
    s.add(s.rng.choice(kinds), a, i)


def integers(s):
    if (a := s.pick(floats=False, ndim=1, where=lambda v: v.blocks[0].dtype is not torch.bool)) is not None:
        s.add(s.rng.choice(INTEGERS).strip(), a)


def any_value(s, **limits):
    return s.pick(floats=s.rng.random() < 0.85, **limits) or s.pick(**limits)


def reduction(s):
    a = any_value(s)
    axes, said = s.axes(a)
    name = s.rng.choice(["psum", "psum", "psum", "pmean", "pmax", "pmin"])
    if (name in ("pmax", "pmin") and a.blocks[0].dtype is torch.bool) or (name == "pmean" and not a.is_float):
        name = "psum"  # the mean of integers is of 32 bits: nothing for a tolerance of 1e-10
    values = [a]
    if name in ("psum", "pmean") and s.rng.random() < 0.25:
        values.append(any_value(s) if name == "psum" else s.pick() or a)
    s.collective(name, values, axes, said, gives="I")


def gather(s):
    a = any_value(s)
    axes, said = s.axes(a)
    tiled = a.ndim > 0 and s.rng.random() < 0.5
    axis = s.rng.randrange(a.ndim + (not tiled))
    to = s.rng.choice(
        ["varying", "varying", "invarying", "invarying", "reduced"] if a.is_float else ["varying", "invarying"]
    )
    gives = {"varying": "V", "invarying": "I", "reduced": "R"}[to]
    s.collective("all_gather", [a], axes, said, gives, axis=axis, tiled=tiled, to=to)


def divisible(s, axes, tiled):
    """A value, and a dim of it that can be cut along these axes; made if there is none."""
    n = s.size(axes)

    def dims(v):
        return [d for d, size in enumerate(v.shape) if (size % n == 0 if tiled else size == n)]

    a = any_value(s, where=lambda v: bool(dims(v)) and v.blocks[0].dtype is not torch.bool)
    if a is None or s.rng.random() < 0.3:
        a = s.pick(plain=True)
        if a is None:
            return None, 0
        a = s.add(f"{{0}}[..., None] * torch.linspace(0.5, 1.5, {n}, dtype=torch.float64)", a, fresh=True)
    return (a, s.rng.choice(dims(a))) if a is not None else (None, 0)


def scatter(s):
    axes, said = s.axes()
    tiled = s.rng.random() < 0.5
    a, dim = divisible(s, axes, tiled)
    if a is not None:
        s.collective("psum_scatter", [a], axes, said, scatter_dimension=dim, tiled=tiled)


def exchange(s):
    axes, said = s.axes()
    tiled = s.rng.random() < 0.5
    a, dim = divisible(s, axes, tiled)
    if a is not None:
        other = s.rng.randrange(a.ndim)
        s.collective("all_to_all", [a], axes, said, split_axis=dim, concat_axis=other, tiled=tiled)


def pairs(s, n):
    """What `ppermute` sends: a rotation, or some pairs."""
    if s.rng.random() < 0.5:
        shift = s.rng.randint(1, n)
        return [(k, (k + shift) % n) for k in range(n)]
    k = s.rng.randint(n // 2, n)
    return list(zip(s.rng.sample(range(n), k), s.rng.sample(range(n), k)))


def permute(s):
    a = any_value(s)
    axes, said = s.axes(a)
    perm = pairs(s, s.size(axes))
    values = [a, any_value(s)] if s.rng.random() < 0.2 else [a]
    s.collective("ppermute", values, axes, said, perm=perm)


def broadcast(s):
    a = any_value(s)
    axes, said = s.axes(a)
    s.collective("pbroadcast", [a], axes, said, source=s.rng.randrange(s.size(axes)))


def cast(s):
    a = s.pick(where=lambda v: len(v.varying) < len(s.case.names))
    if a is not None:
        to = s.rng.choice(["varying", "reduced"])
        have = s.case.names if to == "varying" else [axis for axis in s.case.names if axis not in a.reduced]
        free = [axis for axis in have if axis not in a.varying]
        if free:
            axes = tuple(s.rng.sample(free, s.rng.randint(1, len(free))))
            s.collective("pcast", [a], axes, repr(axes), {"varying": "V", "reduced": "R"}[to], to=to)


def held_back(s):
    """A sum that is held back, through what is linear, and taken at last, here or by out_specs."""
    a = s.pick(plain=True, where=lambda v: bool(v.varying))
    if a is not None:
        axes = tuple(s.rng.sample(sorted(a.varying), s.rng.randint(1, len(a.varying))))
        u = s.collective("pcast", [a], axes, repr(axes), "U", to="unreduced")
        linear = s.rng.choice(
            ["{0} * 2.0", "-{0}", "{0} + {0}", "{0}.sum()", "{0}[None]", "{0} / 2", "{0}.reshape(-1)"]
        )
        u = s.add(linear, u) or u
        if s.rng.random() < 0.7:
            s.collective("psum", [u], axes, repr(axes), "I")


def elementwise(s, axes, names):
    """A collective that keeps the shape, and its parameters."""
    name = s.rng.choice(names)
    n = s.size(axes)
    return name, {"ppermute": {"perm": pairs(s, n)}, "pbroadcast": {"source": s.rng.randrange(n)}}.get(name, {})


def gradient_inside(s):
    """A gradient in the body, of the sum over the ranks of what each has, maybe through a collective: summed where the
    operand is the same on all."""
    a = s.pick(plain=True)
    b = s.pick(plain=True, where=lambda v: v is not a and fits(a.shape, v.shape))
    if b is None:
        return
    lines, loss = [Line(["h"], "torch.sin(t)")], "torch.sin(t)"
    if a.varying and s.rng.random() < 0.6:
        axes = tuple(s.rng.sample(sorted(a.varying), s.rng.randint(1, len(a.varying))))
        name, parameters = elementwise(s, axes, ["ppermute", "pbroadcast", "all_gather"])
        lines.append(Line(["h"], "", name, ["h"], axes, parameters))
        loss = called(name, loss, repr(axes), parameters)
        if name == "all_gather":
            lines.append(Line(["h"], "h.cos().sum(0)"))
            loss += ".cos().sum(0)"
    lines.append(Line(["loss"], f"(h * {b.name}).sum()"))
    axes = tuple(axis for axis in s.case.names if axis in b.varying - a.varying)
    text = f"vfn.grad(lambda t: ({loss} * {b.name}).sum())({a.name})"
    line = Line([s.name()], text, "gradient", [a.name, b.name], axes, {"lines": lines})
    if s.ran(line, [(a.varying, frozenset(), frozenset())]) is not None:
        s.case.typed_only |= bool(axes)


def of_a_function(s):
    """A function with a collective in it, which closes over a value: made again, mapped over, or both."""
    a = s.pick(ndim=1, plain=True)
    b = s.pick(plain=True, where=lambda v: a is not None and v.ndim < a.ndim and fits(a.shape[1:], v.shape))
    if b is None:
        return
    axes, said = s.axes(a)
    name, parameters = elementwise(s, axes, ["psum", "pmean", "ppermute", "pbroadcast"])
    target = s.name()
    lines = [
        Line(["h"], f"torch.tanh({a.name}) * {b.name}"),
        Line(["h"], "", name, ["h"], axes, parameters),
        Line([target], "h.sin()"),
    ]
    function = f"lambda t: {called(name, f'torch.tanh(t) * {b.name}', said, parameters)}.sin()"
    wrapped = s.rng.choice(["vfn.remat({})", "vfn.vmap({})", "vfn.vmap(vfn.remat({}))", "vfn.remat(vfn.vmap({}))"])
    varying = a.varying | b.varying
    varying = varying - set(axes) if name in ("psum", "pmean") else varying | set(axes)
    line = Line([target], f"{wrapped.format(function)}({a.name})", "sequence", [a.name, b.name], axes, {"lines": lines})
    s.ran(line, [(varying, frozenset(), frozenset())])


STEPS, WEIGHTS = zip(
    *{
        unary: 5,
        fresh: 2,
        one_dim: 6,
        binary: 5,
        with_weight: 3,
        matmul: 2,
        own_function: 1,
        position: 2,
        by_index: 2,
        integers: 1,
        reduction: 6,
        gather: 4,
        scatter: 3,
        exchange: 3,
        permute: 3,
        broadcast: 1,
        cast: 1,
        held_back: 1,
        gradient_inside: 2,
        of_a_function: 5,
    }.items()
)


# --- examining --------------------------------------------------------------------------------------------------------


def sampled(seed, meshes=MESHES):
    """The case of a seed such as "1:17"."""
    return Sampler(seed, meshes).sampled()


def scalar(outs):
    """A number that depends on every floating-point output, unevenly."""
    total = torch.zeros((), dtype=torch.float64)
    for j, x in enumerate(outs):
        if x.is_floating_point():
            weights = torch.sin(torch.arange(x.numel(), dtype=torch.float64) + j + 0.5).view(x.shape)
            total = total + (x * weights).sum() + 0.1 * x.square().sum()
    return total


def bumpy(grads):
    return sum((g.sin() * (1 + k)).sum() for k, g in enumerate(grads))


class Wanted:
    """What the loop over ranks says, by plain autograd; each answer is worked out when it is asked for."""

    def __init__(self, case):
        self.case = case
        self.inputs = [x.whole for x in case.inputs]
        self.moving = tuple(k for k, x in enumerate(self.inputs) if x.is_floating_point())
        self.tangents = [
            torch.cos(torch.arange(x.numel(), dtype=torch.float64) * (k + 1)).view(x.shape)
            if x.is_floating_point()
            else None
            for k, x in enumerate(self.inputs)
        ]

    def forward(self):
        return self.case.reference(*self.inputs)

    def _differentiated(self, inputs, then=None):
        inputs = [x.clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
        leaves = [inputs[k] for k in self.moving]

        def gradient(y):
            if not y.requires_grad:
                return [torch.zeros_like(x) for x in leaves]
            return torch.autograd.grad(
                y, leaves, create_graph=then is not None, allow_unused=True, materialize_grads=True
            )

        grads = gradient(scalar(self.case.reference(*inputs)))
        return [g.detach() for g in (grads if then is None else gradient(then(grads)))]

    def grad(self):
        return self._differentiated(self.inputs)

    def second(self):
        return self._differentiated(self.inputs, bumpy)

    def jvp_of_grad(self):  # a Hessian is symmetric
        along = [self.tangents[k] for k in self.moving]
        return self._differentiated(self.inputs, lambda grads: sum((g * t).sum() for g, t in zip(grads, along)))

    def jvp(self):
        def f(*moving):
            inputs = list(self.inputs)
            for k, x in zip(self.moving, moving):
                inputs[k] = x
            return tuple(x for x in self.case.reference(*inputs) if x.is_floating_point())

        along = tuple(self.tangents[k] for k in self.moving)
        return torch.func.jvp(f, tuple(self.inputs[k] for k in self.moving), along)[1]

    def entries(self):
        """Three sets of inputs, for `vmap`; every second input is the same in all."""
        return [
            [
                x + 0.1 * n * self.tangents[k] if k in self.moving and k % 2 == 0 else x
                for k, x in enumerate(self.inputs)
            ]
            for n in range(3)
        ]

    def vmap(self):
        return [torch.stack(row) for row in zip(*(self.case.reference(*inputs) for inputs in self.entries()))]

    def vmap_of_grad(self):
        return [torch.stack(row) for row in zip(*(self._differentiated(inputs) for inputs in self.entries()))]


def _forward(f, w, given):
    return f(*given)


def _grad(f, w, given):
    return vfn.grad(lambda *xs: scalar(f(*xs)), w.moving)(*given)


def _plainly(f):
    return lambda *xs: vfn.unshard(f(*xs))


def _func_grad(f, w, given):
    return torch.func.grad(lambda *xs: scalar(_plainly(f)(*xs)), w.moving)(*given)


def _remat(f, w, given):
    return vfn.grad(lambda *xs: scalar(vfn.remat(f)(*xs)), w.moving)(*given)


def _tangents(w, given):
    return [
        t if t is None or type(x) is torch.Tensor else vfn.shard(t, x.device_mesh, vfn.spec_of(x))
        for t, x in zip(w.tangents, given)
    ]


def _jvp(f, w, given):
    out, slopes = vfn.jvp(f, given, _tangents(w, given))
    return [slope for x, slope in zip(out, slopes) if x.is_floating_point()]


def _vmap(f, w, given):
    return vfn.vmap(_plainly(f))(*(torch.stack(row) for row in zip(*w.entries())))


def _vmap_of_grad(f, w, given):
    axes = tuple(0 if k in w.moving and k % 2 == 0 else None for k in range(len(given)))
    rows = list(zip(*w.entries()))
    args = [row[0] if axis is None else torch.stack(row) for row, axis in zip(rows, axes)]
    if not any(axis == 0 for axis in axes):
        return [torch.stack([g] * 3) for g in _grad(f, w, given)]
    return vfn.vmap(lambda *xs: _grad(_plainly(f), w, xs), in_axes=axes)(*args)


def _second(f, w, given):
    return vfn.grad(lambda *xs: bumpy(_grad(f, w, xs)), w.moving)(*given)


def _func_second(f, w, given):
    return torch.func.grad(lambda *xs: bumpy(_func_grad(f, w, xs)), w.moving)(*given)


def _jvp_of_grad(f, w, given):
    _, slopes = vfn.jvp(lambda *xs: tuple(_grad(f, w, xs)), given, _tangents(w, given))
    return slopes


# name -> (the answer through the library, the answer of the loop)
WAYS = {
    "forward": (_forward, Wanted.forward),
    "vfn.grad": (_grad, Wanted.grad),
    "torch.func.grad": (_func_grad, Wanted.grad),
    "vfn.jvp": (_jvp, Wanted.jvp),
    "vfn.vmap": (_vmap, Wanted.vmap),
    "vfn.vmap of vfn.grad": (_vmap_of_grad, Wanted.vmap_of_grad),
    "vfn.grad of vfn.grad": (_second, Wanted.second),
    "torch.func.grad twice": (_func_second, Wanted.second),
    "vfn.jvp of vfn.grad": (_jvp_of_grad, Wanted.jvp_of_grad),
    "vfn.grad of vfn.remat": (_remat, Wanted.grad),
}


def given_inputs(case, mesh):
    return [x.whole if x.lies is None else vfn.shard(x.whole, mesh, x.lies) for x in case.inputs]


def checks(case):
    """With which `check_vma` the program means what the loop says."""
    return [True] * (not case.refused) + [False] * (not case.broken and not case.typed_only)


def difference(got, want):
    """What is wrong with these answers; None if nothing is."""
    if any(type(torch_internals.peel(x)) is Blocks for x in got):
        return "an answer is a value of one rank, outside of the body"
    got = [vfn.unshard(x) for x in got]
    if len(got) != len(want):
        return f"{len(got)} answers for {len(want)}"
    for k, (x, y) in enumerate(zip(got, want)):
        if x.shape != y.shape or x.dtype != y.dtype:
            return f"answer {k} is {x.dtype}{list(x.shape)} for {y.dtype}{list(y.shape)}"
        scale = 1 + (y.abs().amax().item() if y.is_floating_point() and y.numel() else 0)
        error = (x.double() - y.double()).abs().amax().item() / scale if x.numel() else 0
        if not error <= (1e-10 if y.is_floating_point() else 0):  # fp64; what differs is the order of sums
            return f"answer {k} is {x.detach()!s:.300} for {y!s:.300}, off by {error:.1e} of its size"
    return None


def examine(case, ways=tuple(WAYS), with_check=None):
    """What is wrong with a case on a simulated mesh: a list of lines, empty if nothing is. `with_check`: a list of values of
    `check_vma`; by default all with which it means what the loop says."""
    found, wanted, answers = [], Wanted(case), {}
    with vfn.simulate(math.prod(case.shape)):
        mesh = vfn.make_mesh(case.shape, case.names)
        given = given_inputs(case, mesh)
        if case.refused:
            try:
                case.compiled(mesh, True)(*given)
                found.append("the types let an output pass that is typed varying over an axis that its spec leaves out")
            except SpecError as error:
                if "it varies over" not in str(error):
                    found.append(f"refused, but not for what it returns: {error}")
            except Exception:
                found.append(f"refused, but not by a SpecError\n{traceback.format_exc(limit=-8)}")
        for check in checks(case) if with_check is None else with_check:
            f = case.compiled(mesh, check)
            for name in ways:
                try:
                    through, by_loop = WAYS[name]
                    if by_loop not in answers:
                        answers[by_loop] = by_loop(wanted)
                    wrong = difference(through(f, wanted, given), answers[by_loop])
                except Exception:
                    wrong = f"raised\n{traceback.format_exc(limit=-8)}"
                if wrong:
                    found.append(f"{name}, check_vma={check}: {wrong}")
    return found


def smaller(case):
    """Cases with one output, line, argument or layout less."""
    for k in range(len(case.outputs) * (len(case.outputs) > 1)):
        yield replace(case, outputs=case.outputs[:k] + case.outputs[k + 1 :], nested=False)
    for k in reversed(range(len(case.lines))):
        yield replace(case, lines=case.lines[:k] + case.lines[k + 1 :])
    for k, x in enumerate(case.inputs):
        yield replace(case, inputs=case.inputs[:k] + case.inputs[k + 1 :], as_dict=False)
        if x.lies is not None:
            yield replace(case, inputs=[*case.inputs[:k], replace(x, lies=None), *case.inputs[k + 1 :]])
    if case.as_dict:
        yield replace(case, as_dict=False)


def shrunk(case, ways=tuple(WAYS)):
    """A smallest case that is wrong as this one is."""

    def first(case):
        try:
            case.reference(*(x.whole for x in case.inputs))
            return [line.split(":")[0] for line in examine(case, ways)][:1]
        except Exception:
            return []

    wrong = first(case)
    ways = [name for name in ways if wrong and wrong[0].startswith(f"{name}, ")] or ways
    while found := next((c for c in smaller(case) if first(c) == wrong), None):
        case = found
    return case


def main():
    parser = argparse.ArgumentParser(description="Sampled shard_map programs against a plain loop over ranks.")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--case", help="one case, such as 1:17")
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if asked.case:
        case = sampled(asked.case)
        print(case.show())
        found = examine(case)
        print("\n".join(found) or "right")
        if found:
            print(f"\nand as small as it gets:\n{shrunk(case).show()}")
        return int(bool(found))
    failures, refused, start = 0, 0, time.time()
    for k in range(asked.cases):
        case = sampled(f"{asked.seed}:{k}")
        found = examine(case)
        refused += case.refused
        if found:
            failures += 1
            print(f"{case.show()}\n" + "\n".join(found) + "\n", flush=True)
    print(f"{asked.cases} cases, of which {refused} refused; {failures} wrong; {time.time() - start:.0f} s")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
