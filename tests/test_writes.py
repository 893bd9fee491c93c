"""Sampled programs of views, moves and writes in place: each step is right on every value that is known, or raises.

One device is the oracle: there a view shares memory with what it is a view of, and `with_sharding` is the identity, so a
write through one name shows under all others.
"""

import random

import pytest
import torch
from test_spec import all_specs

import vescale_fn as vfn
from vescale_fn.errors import InPlaceError

AXES = {"a": 2, "b": 3}
LAYOUTS = all_specs(AXES, 2, unreduced=True)


class Program:
    """A list of values and a source of choices; the same choices give the same program on plain tensors and on arrays."""

    def __init__(self, values: list[torch.Tensor]) -> None:
        self.values = values

    def pick(self, choose: random.Random, fits) -> torch.Tensor | None:
        places = [i for i, x in enumerate(self.values) if fits(x)]
        return self.values[choose.choice(places)] if places else None

    def step(self, name: str, choose: random.Random) -> None:
        needs, run = STEPS[name]
        x = self.pick(choose, needs)
        if x is None:
            return
        other = self.pick(choose, lambda y: y.shape == x.shape)
        out = run(x, other, choose)
        if out is not None:
            self.values.append(out)


def matrix(x: torch.Tensor) -> bool:
    return x.ndim == 2 and min(x.shape) > 2


def anything(x: torch.Tensor) -> bool:
    return True


STEPS = {
    "add": (anything, lambda x, y, c: x + y),
    "relu": (anything, lambda x, y, c: x.relu() - 0.1),
    "matmul": (matrix, lambda x, y, c: x @ x.t() / 10),
    "softmax": (matrix, lambda x, y, c: x.softmax(c.choice((0, 1)))),
    "sum": (matrix, lambda x, y, c: x.sum(0) / 10),
    "clone": (anything, lambda x, y, c: x.clone()),
    "cat": (matrix, lambda x, y, c: torch.cat([x, y])[:7]),
    "move": (matrix, lambda x, y, c: vfn.with_sharding(x, c.choice(LAYOUTS))),
    "view": (anything, lambda x, y, c: x.view(-1) if x.is_contiguous() else x.t()),
    "reshape": (anything, lambda x, y, c: x.reshape(-1)),
    "t": (matrix, lambda x, y, c: x.t()),
    "rows": (matrix, lambda x, y, c: x[c.choice((0, 1)) :][:2]),
    "row": (matrix, lambda x, y, c: x[c.choice((0, 1))]),
    "columns": (matrix, lambda x, y, c: x[:, 1:3]),
    "write add": (anything, lambda x, y, c: (x.add_(1.5), None)[1]),
    "write mul": (anything, lambda x, y, c: (x.mul_(y), None)[1]),
    "write copy": (anything, lambda x, y, c: (x.copy_(y), None)[1]),
    "write row": (matrix, lambda x, y, c: x.__setitem__(0, 2.0)),
    "write columns": (matrix, lambda x, y, c: (x[:, :1].zero_(), None)[1]),
    "write through a view": (matrix, lambda x, y, c: (x.t().mul_(2), None)[1]),
}


def run(seed: int, mesh) -> str:
    choose = random.Random(seed)
    sources = [torch.arange(35.0).double().view(7, 5) / 7 - 2, torch.arange(24.0).double().view(4, 6) * 5 % 7 - 3]
    layouts = [choose.choice(LAYOUTS) for _ in sources]
    plain = Program([x.clone() for x in sources])
    arrays = Program([vfn.shard(x, mesh, s).clone() for x, s in zip(sources, layouts)])
    done = [str(layouts)]
    for _ in range(14):
        name, before = choose.choice(list(STEPS)), choose.getstate()
        try:
            plain.step(name, choose)
        except RuntimeError:  # torch refuses it on one device too
            return "refused"
        choose.setstate(before)
        done.append(name)
        try:
            arrays.step(name, choose)
        except InPlaceError:
            return "refused"
        assert len(plain.values) == len(arrays.values)
        for want, x in zip(plain.values, arrays.values):
            try:
                got = vfn.unshard(x)
            except InPlaceError:  # it was left behind by a write, and says so
                continue
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9, equal_nan=True, msg=lambda m: f"{done}: {m}")
    return "right"


@pytest.mark.parametrize("part", range(4))
def test_sampled_programs(part: int) -> None:
    with vfn.simulate(6):
        mesh = vfn.make_mesh((2, 3), ("a", "b"))
        results = [run(seed, mesh) for seed in range(60 * part, 60 * (part + 1))]
    assert results.count("right") >= 15, "enough of them run to the end"


# --- into views of plain tensors, beside arrays -----------------------------------------------------------------------

INTO_PLAIN = {
    "row": lambda v: v.__setitem__(0, 0.0),
    "rows": lambda v: v[1:].mul_(5),
    "transposed": lambda v: v.t()[1:].mul_(5),
    "flat": lambda v: v.view(-1)[3:].mul_(5),
    "diagonal": lambda v: v[:2].diagonal().mul_(2),
    "a row of columns": lambda v: v[:, 1][2].zero_(),
}


def by_backward(f):
    def gradient(p, x):
        p = p.clone().requires_grad_()
        f(p, x).backward()
        return p.grad

    return gradient


@pytest.mark.parametrize("name", INTO_PLAIN)
def test_gradients_of_writes_into_plain_tensors_that_meet_arrays(name: str) -> None:
    """Their cotangents are arrays, of which autograd writes views by `as_strided`."""

    def loss(p, x):
        v = p.clone()
        INTO_PLAIN[name](v)
        return (x * p).sum() + (v * 3 * p).sum()

    p, x = torch.arange(8.0).view(4, 2) + 2, torch.arange(8.0).view(4, 2) - 3
    want = vfn.grad(loss)(p, x)
    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("x",))
        split = vfn.shard(x, mesh, vfn.P(None, "x"))
        for grad in vfn.grad, by_backward, torch.func.grad:
            torch.testing.assert_close(vfn.unshard(grad(loss)(p, split)), want, rtol=0, atol=0)
        assert vfn.check(loss, p, x, mesh=mesh, spec=(vfn.P(), vfn.P(None, "x"))).equal


@pytest.mark.parametrize("made", [lambda a: a.var(0), lambda a: a.sum(0, keepdim=True).view(-1), lambda a: a.sum(0)])
def test_what_a_partial_value_adds_up_to_is_forgotten_when_it_is_written(made) -> None:
    """`var` gives a view, inside of torch, of a sum: torch counts no write into it."""

    def f(a: torch.Tensor) -> torch.Tensor:
        v = made(a)
        v.exp()  # adds it up
        v.mul_(0.5)
        return v + 1

    x = torch.arange(12.0, dtype=torch.float64).view(4, 3) ** 2
    with vfn.simulate(2):
        found = vfn.unshard(f(vfn.shard(x, vfn.make_mesh((2,), ("a",)), vfn.P("a"))))
    torch.testing.assert_close(found, f(x))
