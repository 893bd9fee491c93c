"""Sampled functions under `vfn.jit` against the functions themselves.

A seed makes tensors of odd shapes, strides and dtypes, and a function of them: a few lines of torch, with writes into
temporaries, through views too. The function runs as it is and as a plan, on two sets of values, donated and not, and its
derivative does; with all passes, with some, and in another order. Values, strides and dtypes must be equal; results may
share memory with arguments and with each other just where the function's own do; nothing that was given or returned
before may change. On a mesh, the arguments are split somehow over simulated ranks; what the eager interpreter refuses
the plan must refuse too. The ordinary tests take a few dozen. The long run is

    python tests/sampled_plans.py --cases 5000 --seed 1       # 1:0 to 1:4999
    python tests/sampled_plans.py --cases 5000 --mesh         # the same on simulated meshes
    python tests/sampled_plans.py --cases 5000 --processes 3  # on meshes of real processes, with shards that are uneven or empty
    python tests/sampled_plans.py --case 1:17                 # one again, with its program
"""

import argparse
import functools
import json
import math
import os
import random
import re
import sys
import tempfile
import traceback
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn.errors import InPlaceError
from vescale_fn.plan.execution import donation
from vescale_fn.plan.passes.memory_order import order
from vescale_fn.plan.passes.overlap import overlap
from vescale_fn.plan.passes.under_way import under_way

FLOATS, WHOLE = (torch.float64, torch.float32, torch.bfloat16), (torch.int64, torch.bool, torch.int32)
UNEVEN = [(5, 5), (6, 7), (5, 7), (7, 4), (5,), (7,), (1, 5), (2, 5, 3), (2, 3, 4), (4, 6), (4, 6), (0, 6), ()]
SHAPES = [(4, 6), (4, 6), (6, 4), (6,), (4,), (1, 6), (4, 1), (), (2, 3, 4), (2, 4, 6), (0, 6), (3, 4, 6)]
CLOSED = torch.arange(24.0, dtype=torch.float64).view(4, 6) / 7 - 1.5

# Lines of a program: x, y, z are values, w one that may be written.
MAKING = """
x + y; x - y; x * y; x / y; x * 0.3; x / 3; x + 2; 2 - x; x ** 2; x ** 1; x ** y; -x; x.abs(); x.exp(); x.tanh(); x.sigmoid()
x.sqrt(); x.relu(); x * x; x + x; x - x; x.reciprocal(); torch.where(x > y, x, y); torch.where(x > 0, x, 0.0); x.clamp(-1, 1)
torch.maximum(x, y); x.clamp(min=y); x > y; x == y; x.isnan(); ~(x > 0); (x > 0) & (y > 0); x.floor(); x // 2; x % 3; x.round()
torch.add(x, y, alpha=0.5); torch.addcmul(x, y, z, value=0.5); torch.addcdiv(x, y, z, value=2); torch.lerp(x, y, 0.25)
x.sum(); x.sum(0); x.sum(-1, keepdim=True); x.mean(); x.mean(-1); x.amax(0); x.cumsum(0); x.sort(0)[0]; x.sort(-1)[1]; x.argmax(-1)
x.softmax(-1); x.softmax(0); x.log_softmax(-1); x.logsumexp(-1); x.norm(); x.std(); x.var(0); x.prod(); x.any(); x.all()
x.t(); x.T; x.transpose(0, -1); x.permute(1, 0); x.view(-1); x.reshape(-1); x.flatten(); x.reshape(6, 4); x.view(4, 6); x.view(2, 2, 6)
x.unsqueeze(0); x.unsqueeze(-1); x.squeeze(); x.expand(3, *x.shape); x.expand(4, 6); x.narrow(0, 1, 2); x[1:]; x[:, 1:]; x[::2]; x[0]; x[..., -1]
x[None]; x[:, None]; x.flip(0); x.roll(1, 0); torch.cat([x, y]); torch.cat([x, y], -1); torch.stack([x, y]); x.repeat(2, 1); x.tril(); x.diagonal()
x @ y; x.t() @ y; x @ y.t(); torch.matmul(x, y); F.linear(x, y); torch.addmm(x, y, z); torch.einsum('ij,kj->ik', x, y); torch.outer(x, y)
x.double(); x.float(); x.bfloat16(); x.long(); x.int(); x.bool(); x.to(y.dtype); x.type_as(y); x.to(torch.complex128); x.real; x.clone(); x.detach()
x.contiguous(); x.t().contiguous(); torch.zeros_like(x); torch.ones_like(x); torch.full_like(x, 2); x.new_zeros(4, 6); x.new_ones(x.shape)
torch.zeros(4, 6, dtype=x.dtype); torch.arange(6, dtype=x.dtype); torch.tensor([1., 2, 3, 4, 5, 6], dtype=x.dtype); torch.tensor(0.5); torch.tensor(3)
x.split(2)[0]; x.split(2)[-1]; x.chunk(2, -1)[1]; x.unbind(0)[1]; x.max(0)[0]; x.max(0).indices; torch.topk(x, 2)[0]; x.unfold(0, 2, 1)
x.gather(0, (y.long().abs() % 2)); x.index_select(0, torch.tensor([1, 0, 1])); x[torch.tensor([1, 0])]; x.take_along_dim(x.argmax(-1, True), -1)
x.masked_fill(y > 0, 0.5); x.index_add(0, torch.tensor([0, 1, 1, 0]), y); x.scatter(0, torch.zeros(1, 6, dtype=torch.long), 1.5); x.index_fill(0, torch.tensor([0]), 2)
F.layer_norm(x, (x.shape[-1],)); F.gelu(x); F.silu(x); F.leaky_relu(x, 0.1); F.softplus(x); F.mse_loss(x, y); F.pad(x, (1, 0)); F.one_hot(x.argmax(-1), 6)
torch.mul(x, y, out=torch.empty_like(x)); torch.add(x, 1, out=torch.empty(0, dtype=x.dtype)); torch.exp(x, out=x.clone()); x * s; s * x; x + s; x / s; s - x; x ** s
torch.add(x, y, alpha=s); x.clamp(min=s); torch.full_like(x, s); x * (s * 2 + 1); x.masked_fill(x > s, s); c + x; c * x; c.clone(); c[1:] ; c.t() @ x
torch._foreach_add([x, x], 1.0)[1]; torch._foreach_mul([x, y], [y, x])[0]; x.as_strided((2, 2), (1, 2)); x.movedim(0, -1); x.swapaxes(0, 1); x.rot90()
torch.complex(x, y); x.conj(); x.to(torch.complex128).conj() * y; x.view_as(y); x.expand_as(y); x.broadcast_to(4, 6); x.nan_to_num(); x.hypot(y); x.atan2(y)
torch.func.vmap(lambda r: r * 2 + r.sum())(x); vfn.vmap(lambda r: r.softmax(0))(x); x.logical_not(); x.sign(); x.erf(); x.log1p(); x.square(); x.rsqrt(); x.diff(); x.trace()
x.transpose(1, 2); x.transpose(-1, -2); x.mT @ y; x @ y.mT; (x @ y).transpose(1, 2); x.transpose(0, 1).reshape(-1, x.shape[-1]); x.transpose(1, 2).flatten(1)
x * torch.sigmoid(1.702 * x); 0.5 * x * (1 + torch.erf(x * 0.7)); 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.04 * x ** 3))); x * torch.tanh(0.5 * x) + y; x / (1 + x.abs())
(x - x.mean(-1, keepdim=True)) * (x.var(-1, keepdim=True) + 1e-5).rsqrt(); x * x.sum(-1, keepdim=True); F.linear(x, y.t()); x.unflatten(-1, (2, -1)).transpose(1, 2)
"""
WRITING = """
w.add_(y); w.mul_(y); w.sub_(0.5); w.div_(2); w.zero_(); w.fill_(2); w.copy_(y); w[1:].add_(1); w[:, 1:].mul_(2); w.t().mul_(0.5); w.t().add_(y.t())
w[0] = y[0]; w[:, 0] = 1; w[1:] = y[1:]; w[::2] += 1; w[w > 0] = 0.5; w += y; w *= 2; w -= y; w.view(-1)[:2].fill_(3); w.view(-1).add_(1); w.exp_(); w.relu_(); w.tanh_(); w.neg_()
w.index_put_((torch.tensor([0, 1]),), y[0]); w.index_add_(0, torch.tensor([0, 1]), y[:2]); w.scatter_(0, torch.zeros(1, 6, dtype=torch.long), 1.5); w.index_fill_(0, torch.tensor([0]), 2)
w.masked_fill_(y > 0, 0.5); w.clamp_(-1, 1); w.addcmul_(y, z); w.addcdiv_(y, z, value=0.5); w.lerp_(y, 0.25); w.addmm_(y, z); w.index_copy_(0, torch.tensor([1]), y[:1]); w.diagonal().zero_()
torch.mul(w, 2, out=w); torch.add(y, z, out=w); torch.sub(w, y, out=w[...]); torch.sigmoid(y, out=w); torch.sum(y, 0, out=w[0]); w.unsqueeze_(0); w.squeeze_(); w.t_(); w.transpose_(0, 1)
w.swapaxes(0, 1)[0].add_(1); w.flip(0).add_(1); w.narrow(0, 0, 1).copy_(y[:1]); w.split(2)[0].mul_(3); w.unbind(0)[1].zero_(); w[1:].copy_(w[:-1].clone()); w.select(0, 0).mul_(w.select(0, 1))
torch._foreach_add_([w, w[:1]], 1.0); torch._foreach_mul_([w], [y]); w.mul_(s); w.add_(y, alpha=s); w.fill_(s); w.cumsum_(0); w.floor_(); w.reciprocal_(); w.logical_not_(); w.detach().add_(1); w.detach_()
w[1:].t().mul_(2); w.reshape(-1)[1:].sub_(1); w.expand(2, *w.shape)[0].add_(1); w.pow_(2); w.sqrt_(); w.abs_(); w.sub_(w[0]); w.mul_(w[:, :1]); w.add_(w.t()); w.copy_(w.t()); w.tril_(); w.where(w > 0, y).add_(1); w.set_(w.clone())
"""


# What torch refuses of a block that has one row, and does, unordered, for more: of some ranks alone. And what looks at the
# memory of an argument, which is another one when it has been sharded.
BY_MEMORY = ("w.sub_(w[0])", "w.mul_(w[:, :1])", "w.add_(w.t())", "x.as_strided((2, 2), (1, 2))")

# On ranks, values also move, each to a layout for its number of dims.
MOVING = [
    "move0(x)",
    "move1(x)",
    "move2(x)",
    "move0(x) * 2",
    "move1(x * y)",
    "move2(x.t())",
    "move0(x).exp() + move1(x)",
    "move0(x @ y)",
]

# What some programs begin with a product of: a batch and the weight of a layer.
LAYERS = [((2, 3, 4), (4, 6)), ((2, 4, 6), (6, 4))]
LAYERS_UNEVEN = [((2, 5, 7), (7, 5)), ((3, 2, 4), (4, 5))]


def lines_of(text):
    return [line.strip() for line in re.split(r"[;\n]", text) if line.strip()]


MAKING, WRITING = lines_of(MAKING), lines_of(WRITING)
STAYING = {f"move{i}": lambda x: x for i in range(3)}


class Program:
    """A function and what it is called with.

    Args:
        name: ``seed:number``, of which everything follows.
        shapes: of the arguments.
    """

    def __init__(self, name, shapes=SHAPES):
        self.name, self.rng = name, random.Random(name)
        rng = self.rng
        self.left_out, self.on_ranks = (BY_MEMORY, True) if shapes is UNEVEN else ((), False)
        kind = rng.choice((FLOATS[:1], FLOATS[:1], FLOATS, FLOATS + WHOLE))
        self.makers = [(rng.choice(shapes), rng.choice(kind), rng.randrange(5)) for _ in range(rng.randrange(1, 4))]
        self.lines, self.returned, self.size = [], [], rng.randrange(2, 14)
        if rng.random() < 0.2:
            pair = rng.choice(LAYERS_UNEVEN if shapes is UNEVEN else LAYERS)
            self.makers[:2] = [(shape, torch.float64, rng.randrange(4)) for shape in pair]
            self.lines = ["v0 = a0 @ a1"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._grow()

    def arguments(self, which):
        """The arguments, with the values of their `which`-th set; ``s``, a float, last."""
        g = torch.Generator().manual_seed(sum(map(ord, self.name)) * 7 + which)
        return [*(tensor(*maker, g) for maker in self.makers), (0.7, -1.3, 2.0)[which]]

    def _names(self):
        return [f"a{i}" for i in range(len(self.makers))]

    def _grow(self):
        env = dict(zip((*self._names(), "s"), self.arguments(0)), torch=torch, F=F, vfn=vfn, c=CLOSED, **STAYING)
        given = {env[n].untyped_storage().data_ptr() for n in self._names()} | {CLOSED.untyped_storage().data_ptr()}
        values, tries = self._names(), 0
        for line in self.lines:
            exec(line, env)
            values.append(line.split()[0])
        while len(self.lines) < self.size and tries < 200:
            tries += 1
            mine = [n for n in values if env[n].untyped_storage().data_ptr() not in given]
            write = mine and self.rng.random() < 0.35
            recent = values[-4:] if self.rng.random() < 0.6 else values
            moves = self.on_ranks and not write and self.rng.random() < 0.15
            text = self.rng.choice(WRITING if write else MOVING if moves else MAKING)
            if text in self.left_out:
                continue
            picked = {letter: self.rng.choice(recent) for letter in "xyz"}
            if write:
                picked["w"] = self.rng.choice(mine)
            text = re.sub(r"\b([xyzw])\b(?!=)", lambda m: picked.get(m[1], m[1]), text)
            name = f"v{len(self.lines)}"
            line = text if write else f"{name} = {text}"
            try:
                exec(line, env)
            except (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError, AttributeError):
                continue
            if not write:
                if not isinstance(env[name], torch.Tensor) or env[name].numel() > 400:
                    continue
                values.append(name)
            self.lines.append(line)
        count = self.rng.randrange(1, 5)
        self.returned = [self.rng.choice(values[-6:]) for _ in range(count)]
        if self.rng.random() < 0.5:
            self.returned.append(values[-1])

    @property
    def source(self):
        body = "".join(f"    {line}\n" for line in self.lines)
        return f"def f({', '.join(self._names())}, s):\n{body}    return {', '.join(self.returned)},\n"

    def function(self, moves=None):
        """The program; `moves` are the functions by which values move."""
        scope = dict(torch=torch, F=F, vfn=vfn, c=CLOSED, **(moves or STAYING))
        exec(compile(self.source, f"<program {self.name}>", "exec"), scope)
        return scope["f"]


def tensor(shape, dtype, how, generator):
    """A tensor of a shape: contiguous, transposed, a part of a larger one, every second entry of one, or expanded."""

    def filled(size):
        x = torch.rand(size, generator=generator, dtype=torch.float64) * 4 - 1.5
        return (x > 0) if dtype == torch.bool else x.to(dtype)

    if how == 1 and len(shape) > 1:
        return filled(tuple(reversed(shape))).permute(*reversed(range(len(shape))))
    if how == 2 and shape:
        return filled((shape[0] + 2, *shape[1:]))[1:-1]
    if how == 3 and shape:
        return filled((*shape[:-1], shape[-1] * 2))[..., ::2]
    if how == 4 and len(shape) > 1:
        return filled((1, *shape[1:])).expand(shape)
    return filled(shape)


def fault(program):
    """What is wrong with the plans of a program; None where nothing is."""
    f = program.function()
    try:
        for which in range(3):
            f(*program.arguments(which))
    except Exception:
        return None  # which shapes there are depends on values
    rng = random.Random(program.name)
    passes = list(vfn.plan.PASSES)
    if rng.random() < 0.2:
        passes = [p for p in passes if rng.random() < 0.6]
    elif rng.random() < 0.25:
        head = passes[: passes.index(order)]  # those behind it know what comes before them
        rng.shuffle(head)
        passes[: len(head)] = head
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return (
            _fault_of_calls(program, f, passes, False)
            or _fault_of_calls(program, f, passes, True)
            or _fault_of_derivative(program, f, passes)
        )


def _fault_of_calls(program, f, passes, donated):
    fast = vfn.jit(f, donate_argnums=tuple(range(len(program.makers))) if donated else (), passes=passes)
    before, how = [], "donated: " if donated else ""
    for which in range(3):
        given, same = program.arguments(which), program.arguments(which)
        if donated:
            given = [copy_of(x) for x in given]
        reference = program.arguments(which)
        wanted = f(*reference)
        got = fast(*given)
        for i, (a, b) in enumerate(zip(wanted, got, strict=True)):
            if (wrong := differs(a, b)) is not None:
                return f"{how}call {which}, result {i}: {wrong}"
        if not donated:
            for i, (a, b) in enumerate(zip(same, given)):
                if isinstance(a, torch.Tensor) and not equal(a, b):
                    return f"call {which}: argument {i} has changed"
            if shared(wanted, reference) != shared(got, given):
                return f"call {which}: results share {shared(got, given)}, not {shared(wanted, reference)}"
        elif shared(wanted, ()) != shared(got, ()):
            return f"{how}call {which}: results share {shared(got, ())}, not {shared(wanted, ())}"
        before.append((got, [x.clone() for x in got], wanted))
    for which, (got, kept, _) in enumerate(before):
        if not all(map(equal, got, kept)):
            return f"{how}a result of call {which} has changed since"
    return None


def _derivative(program, f):
    """Gradients and results of a sum of what a program returns; None where it is given what has no derivative."""
    if not all(dtype in FLOATS for _, dtype, _ in program.makers):
        return None

    def loss(*args):
        outs = [x for x in f(*args) if x.is_floating_point()]
        return sum((x.double().nan_to_num(0, 1, -1) * (i + 1)).sum() for i, x in enumerate(outs)), outs

    def derivative(*args):
        (grads, outs) = vfn.grad(loss, argnums=tuple(range(len(program.makers))), has_aux=True)(*args)
        return *grads, *outs

    return derivative


def _fault_of_derivative(program, f, passes):
    derivative = _derivative(program, f)
    if derivative is None:
        return None
    fast = vfn.jit(derivative, passes=passes)
    for which in range(2):
        try:
            wanted = derivative(*program.arguments(which))
        except Exception:
            return None
        got = fast(*program.arguments(which))
        for i, (a, b) in enumerate(zip(wanted, got, strict=True)):
            if (wrong := differs(a, b, strides=False)) is not None:
                return f"derivative, call {which}, result {i}: {wrong}"
    return None


MESHES = [((2,), "a"), ((3,), "a"), ((2, 2), "ab"), ((1, 3), "ab"), ((2, 1), "ab"), ((4,), "a")]


def fault_on_a_mesh(program):
    """What is wrong with the plans of a program whose arguments are split over ranks; None where nothing is."""
    f, rng = program.function(), random.Random(f"mesh {program.name}")
    sizes, axes = rng.choice(MESHES)
    specs = [spec(rng, len(shape), axes) for shape, _, _ in program.makers]
    with warnings.catch_warnings(), vfn.simulate(math.prod(sizes)):
        warnings.simplefilter("ignore")
        mesh = vfn.make_mesh(sizes, tuple(axes))
        for how, g in (("", f), ("donated: ", f), ("derivative: ", _derivative(program, f))):
            if g is None:
                continue
            fast = vfn.jit(g, donate_argnums=tuple(range(len(specs))) if how == "donated: " else ())
            for which in range(2):
                given = [[vfn.shard(x.clone(), mesh, p) for x, p in zip(program.arguments(which), specs)] for _ in "12"]
                number = program.arguments(which)[-1]
                try:
                    wanted = g(*contiguous(program.arguments(which)))
                    eager = [vfn.unshard(x) for x in g(*given[0], number)]
                except Exception:
                    continue  # it is no program; or it is refused: sweep.py looks at what is
                try:
                    found = [vfn.unshard(x) for x in fast(*given[1], number)]
                except InPlaceError:
                    continue  # an argument may be changed in place in eager mode alone
                if torch.bfloat16 in (x.dtype for x in given[0]) or "bfloat16" in program.source:
                    wanted = eager  # sums in another order differ by too much
                for i, row in enumerate(zip(wanted, eager, found, strict=True)):
                    for mode, one in zip(("eager", "plan"), row[1:]):
                        if (wrong := differs(row[0], one, strides=False)) is not None:
                            return f"{how}mesh {sizes}, {specs}: call {which}, result {i}, {mode}: {wrong}"
    return None


def contiguous(arguments):
    """Arguments as `shard` lays them out, which decides what `reshape` copies."""
    return [x.clone(memory_format=torch.contiguous_format) if isinstance(x, torch.Tensor) else x for x in arguments]


def _laid(mesh, specs, x):
    return vfn.with_sharding(x, specs[x.ndim]) if isinstance(x, DTensor) else vfn.shard(x, mesh, specs[x.ndim])


BATCH = 100  # programs to one start of the processes
PROCESSES = {3: [((3,), "a")], 6: [((6,), "a"), ((2, 3), "ab"), ((3, 2), "ab")]}


def faults_on_ranks(processes, names, journal=None):
    """What is wrong with the plans of programs, by name, on a mesh of real processes; to be called on each of them.

    A plan is wrong, too, where ranks had to leave out a pass to agree on it. To the file `journal` goes the name of each
    program before it runs, and what is wrong with it afterwards.
    """
    wrong = {}
    for name in names:
        dist.barrier()
        _note(journal, name, None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = _fault_on_ranks(Program(name, UNEVEN), processes)
        if found:
            wrong[name] = found
            _note(journal, name, found)
    return wrong


def _note(journal, *row):
    if journal is not None:
        with open(journal, "a") as file:
            file.write(json.dumps(row) + "\n")


def _fault_on_ranks(program, processes):
    rng, plain = random.Random(f"ranks {program.name}"), program.function()
    sizes, axes = rng.choice(PROCESSES[processes])
    mesh = vfn.make_mesh(sizes, tuple(axes))
    specs = [spec(rng, len(shape), axes) for shape, _, _ in program.makers]
    rows = [[spec(rng, ndim, axes) for ndim in range(6)] for _ in STAYING]
    f = program.function({name: functools.partial(_laid, mesh, row) for name, row in zip(STAYING, rows)})
    for how, g, on_one in (
        ("", f, plain),
        ("donated: ", f, plain),
        ("derivative: ", _derivative(program, f), _derivative(program, plain)),
    ):
        if g is None:
            continue
        where = f"{how}mesh {sizes}, {specs}"
        passes = vfn.plan.PASSES
        if rng.random() < 0.4:  # as on GPUs
            passes = [functools.partial(p, on_cpu=True) if p in (overlap, under_way) else p for p in passes]
        fast = vfn.jit(g, passes=passes, donate_argnums=tuple(range(len(specs))) if how == "donated: " else ())
        given = [[vfn.shard(x.clone(), mesh, p) for x, p in zip(program.arguments(0), specs)] for _ in "12"]
        number = program.arguments(0)[-1]
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                wanted = on_one(*contiguous(program.arguments(0)))
            except Exception:
                continue
            try:
                eager = [vfn.unshard(x) for x in g(*given[0], number)]
                if any(x.dtype in FLOATS[1:] for x in given[0]) or "float" in program.source:
                    wanted = eager  # sums in another order differ by too much
                found = [vfn.unshard(x) for x in fast(*given[1], number)]
            except (vfn.errors.VfnError, RuntimeError, IndexError, TypeError, ValueError) as error:
                if isinstance(error, InPlaceError) or not fast.cache_info().records:
                    continue
                return f"{where}: {type(error).__name__}: {error}"
        for i, row in enumerate(zip(wanted, eager, found, strict=True)):
            for mode, one in zip(("eager", "plan"), row[1:]):
                if (wrong := differs(row[0], one, strides=False)) is not None:
                    return f"{where}: result {i}, {mode}: {wrong}"
        parted = [str(w.message) for w in said if "differ between ranks" in str(w.message)]
        if parted:
            return f"{where}: {parted[0]}"
    return None


def spec(rng, ndim, axes):
    """A spec for so many dims, each split over none, one or two of the axes, in any order."""
    left = rng.sample(axes, len(axes))
    return P(*(tuple(left.pop() for _ in range(min(rng.choice((0, 0, 1, 1, 2)), len(left)))) for _ in range(ndim)))


def copy_of(x):
    return donation.copied(x) if _may_copy(x) else x


def _may_copy(x):
    return isinstance(x, torch.Tensor) and 0 not in x.stride()


def equal(a, b):
    return torch.equal(a.resolve_conj(), b.resolve_conj()) or torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def differs(a, b, strides=True):
    if not isinstance(a, torch.Tensor):
        return None if a == b else f"{b}, not {a}"
    facts = [(x.dtype, tuple(x.shape), lie(x) if strides else None, x.requires_grad, type(x)) for x in (a, b)]
    if facts[0] != facts[1]:
        return f"{facts[1]}, not {facts[0]}"
    rough = a.dtype in (torch.float32, torch.bfloat16)
    if a.dtype.is_floating_point or a.dtype.is_complex:
        if not torch.allclose(
            a,
            b,
            rtol=1e-2 if a.dtype == torch.bfloat16 else 1e-5 if rough else 1e-12,
            atol=1e-5 if rough else 1e-12,
            equal_nan=True,
        ):
            return f"{b}\nnot\n{a}"
        return None
    return None if torch.equal(a, b) else f"{b}\nnot\n{a}"


def lie(x):
    return [stride for stride, size in zip(x.stride(), x.shape) if size > 1] if x.numel() else None


def shared(outs, given):
    """Which results lie in the memory of which others, and of which arguments."""
    places = [(x.untyped_storage().data_ptr() if x.numel() else (n,)) for n, x in enumerate(outs)]
    args = [x.untyped_storage().data_ptr() for x in given if isinstance(x, torch.Tensor) and x.numel()]
    closed = CLOSED.untyped_storage().data_ptr()
    return [(places.index(p), args.index(p) if p in args else None, p == closed) for p in places]


def launched_faults(processes, names):
    """What is wrong with the plans of programs, by name, on processes that are started for it; ranks that fail or hang are
    started again for the programs after the one that they were at."""
    wrong = {}
    while names:
        with tempfile.TemporaryDirectory() as folder:
            journal, error = os.path.join(folder, "journal"), None
            try:
                vfn.launch(faults_on_ranks, processes, processes, names, journal, timeout=30.0)
            except vfn.errors.RankError as raised:
                error = str(raised)
            with open(journal) as file:
                rows = list(map(json.loads, file))
            wrong |= {name: found for name, found in rows if found}
            at = names[-1] if error is None else rows[-1][0]
            if error is not None:
                wrong[at] = error
            names = names[names.index(at) + 1 :]
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", help="one case, as seed:number")
    parser.add_argument("--mesh", action="store_true", help="on simulated meshes")
    parser.add_argument("--processes", type=int, choices=tuple(PROCESSES), help="on meshes of so many real processes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = [options.case] if options.case else [f"{options.seed}:{i}" for i in range(options.cases)]
    wrong = 0
    if options.processes:
        for start in range(0, len(names), BATCH):
            found = launched_faults(options.processes, names[start : start + BATCH])
            for name, text in found.items():
                print(f"--- {name}\n{Program(name, UNEVEN).source}{text}", flush=True)
            wrong += len(found)
        print(f"{len(names)} cases, {wrong} wrong")
        sys.exit(bool(wrong))
    for name in names:
        program = Program(name)
        if options.case:
            print(program.source)
        try:
            found = fault_on_a_mesh(program) if options.mesh else fault(program)
        except Exception as error:
            found = f"raised {type(error).__name__}: {error}"
            if options.case:
                traceback.print_exc()
        if found:
            wrong += 1
            print(f"--- {name}\n{program.source}{found}", flush=True)
    print(f"{len(names)} cases, {wrong} wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
