"""`vfn.jit`: a replay gives what the function itself gives, on plain tensors, on simulated meshes and on real processes."""

import contextlib
import copy
import functools
import gc
import inspect
import io
import math
import pickle
import sys
import warnings

import numpy
import pytest
import torch
import torch.distributed as dist
from programs import PROGRAMS, Program
from whole import part

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn._core.base import tree
from vescale_fn._core.distributed.mesh import communicator_of
from vescale_fn.errors import InPlaceError, RandomError, RecordError, TransformError
from vescale_fn.plan.passes.buckets import buckets
from vescale_fn.plan.passes.cse_collectives import once
from vescale_fn.plan.passes.reduce_scatter import scatter

TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}  # fp64: passes may sum in another order

BY_VALUE = {
    "indexing",
    "scattering",
    "losses",
    "control_flow",
}  # masks, `bincount`, a loss that checks its input, an `if`


def assert_same(found, wanted, tolerance=TOLERANCE):
    """Equal trees: structure, classes, layouts, dtypes and values."""
    found_leaves, found_def = tree.flatten(found)
    leaves, treedef = tree.flatten(wanted)
    assert found_def == treedef
    for x, y in zip(found_leaves, leaves):
        assert type(x) is type(y)
        if not isinstance(y, torch.Tensor):
            assert x == y
            continue
        spec = vfn.spec_of(y)
        assert vfn.spec_of(x) == spec
        assert not x.requires_grad
        torch.testing.assert_close(vfn.unshard(x), vfn.unshard(y), **tolerance)


def laid(program: Program, mesh, d, t):
    params, data = program.inputs()
    if mesh is None:
        return params, data
    return tuple(vfn.shard(x, mesh, spec) for x, spec in zip((params, data), program.specs(d, t)))


def step(program: Program, d, t):
    """A training step: the program's outputs, and its parameters moved along the gradient of a sum of them."""

    def loss(params, data):
        out = program.f(params, data, d, t)
        parts = [
            x.double().sin().sum() for x in tree.leaves(out) if isinstance(x, torch.Tensor) and x.is_floating_point()
        ]
        return sum(parts, torch.zeros((), dtype=torch.float64)), out

    def run(params, data, lr):
        (value, out), grads = vfn.value_and_grad(loss, has_aux=True)(params, data)
        return (
            value,
            out,
            tree.map_(lambda p, g: p - lr * g if torch.is_tensor(p) and p.is_floating_point() else p, params, grads),
        )

    return run


def replayed(program: Program, shape, d, t):
    mesh = None if shape is None else vfn.make_mesh(shape, ("a", "b"))
    params, data = laid(program, mesh, d, t)
    f = step(program, d, t)
    g = vfn.jit(f)
    with vfn.use_mesh(mesh):
        if program.name in BY_VALUE:
            with pytest.warns(UserWarning, match="runs as written"):
                return assert_same(g(params, data, 0.1), f(params, data, 0.1))
        for factor in (1.0, 3.0):
            lr = torch.tensor(factor, dtype=torch.float64)
            assert_same(g(params, data, lr), f(params, data, lr))
    assert g.cache_info()[:3] == (1, 1, 0)


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name):
    replayed(PROGRAMS[name], None, None, None)


@pytest.mark.parametrize("name", list(PROGRAMS)[::3])
def test_programs_on_simulated_ranks(name):
    with vfn.simulate(6):
        replayed(PROGRAMS[name], (2, 3), "a", "b")


def _all_programs(shape, d, t, names):
    torch.set_num_threads(1)
    for name in names:
        replayed(PROGRAMS[name], shape, d, t)


def test_programs_on_real_ranks(gloo):
    gloo(4, _all_programs, (2, 2), "a", "b", list(PROGRAMS)[1::6])


# --- what goes in, what comes out -------------------------------------------------------------------------------------

KEY = vfn.random.key(3)
X = torch.arange(12.0).view(4, 3) / 7
optimizer = vfn.optim.chain(vfn.optim.clip_by_global_norm(1.0), vfn.optim.adamw(1e-2))
FUNCTIONS = {
    "leaves that are no tensors": (
        lambda t: {"x": t["x"] * t["n"], "n": t["n"] + 1, "no": None, "s": t["s"]},
        [{"x": X, "n": 3, "no": None, "s": "text", "b": True}],
    ),
    "a float": (lambda x, lr: (x * lr, lr * 2, lr), [X, 0.3]),
    "a float and whole numbers": (lambda x, lr: (x.long() * 2) * lr, [X, 0.3]),
    "a float and halves": (lambda x, lr: x.bfloat16() * lr, [X, 0.3]),
    "a float where torch takes a number": (
        lambda x, lr: torch.add(x, x, alpha=lr).clamp(max=lr) + torch.full((3,), lr),
        [X, 0.3],
    ),
    "arithmetic of floats": (lambda x, lr: x * ((1 - lr) ** 2 / 3 + abs(-lr) % 0.2), [X, 0.3]),
    "a float under a gradient": (lambda x, lr: vfn.grad(lambda x: (x**2 * lr).sum())(x), [X, 0.3]),
    "arguments given back": (lambda x, y: (y, x, x), [X, X + 1]),
    "one tensor twice": (lambda x, y: x * y, [X, X]),
    "keys": (lambda k: (vfn.random.split(k), vfn.random.normal(vfn.random.fold_in(k, 3), (5,))), [KEY]),
    "a write to a value of its own": (
        lambda x: (b := torch.zeros_like(x), b.add_(x), b[:, 0].zero_(), b.mul_(2))[-1],
        [X],
    ),
    "a literal tensor": (lambda x: x + torch.tensor([1.0, 2.0, 3.0]), [X]),
    "a literal that is read": (lambda x: x * torch.tensor(3).item(), [X]),
    "a literal that is written": (lambda x: (b := torch.tensor([1.0, 2.0, 3.0]), b.add_(1), x + b)[-1], [X]),
    "a constant": (lambda x: x + X[0], [X]),
    "nothing of a shape": (lambda x: (x[:0], x.sum()), [X]),
    "a double result": (lambda x: (x * 2,) * 2, [X]),
    "an infinite float": (lambda x, lr: x.masked_fill(x > 0.5, lr).clamp(max=math.inf), [X, -math.inf]),
    "a product of vectors": (lambda x: torch.tanh(x[0] + torch.ones(3) @ torch.eye(3)), [X]),
    "a namedtuple of torch's": (lambda x: torch.sort(x, 0), [X]),
    "jvp": (lambda x: vfn.jvp(lambda v: v.sin() * v, (x,), (x * 2,)), [X]),
    "vmap of grad": (lambda x: vfn.vmap(vfn.grad(lambda v: (v**2).sum()))(x), [X]),
    "grad of grad": (lambda x: vfn.grad(lambda x: vfn.grad(lambda v: (v**3).sum())(x).sum())(x), [X]),
    "hessian": (lambda x: torch.func.hessian(lambda v: (v**3).sum())(x), [X[0]]),
    "vjp": (lambda x: vfn.vjp(lambda v: v.tanh(), x)[1](x), [X]),
    "linearize": (lambda x: vfn.linearize(lambda v: v.tanh(), x)[1](x), [X]),
    "remat": (lambda x: vfn.grad(lambda v: vfn.remat(lambda v: v.sin().exp() * v)(v).sum())(x), [X]),
    "jit in jit": (lambda x: vfn.jit(lambda v: v * 2)(x) + 1, [X]),
    "another default dtype": (lambda x: _in_another_dtype(x), [X]),
    "another default dtype, under a gradient": (
        lambda x: vfn.grad(lambda x: _in_another_dtype(x)[0].double().sum())(x),
        [X],
    ),
    "another default device": (lambda x: _on_another_device(x), [X]),
    "autocast": (lambda x: _autocast(x), [X]),
    "the truth of a mask": (
        lambda x, m: (x * 2 if m.all() else -x, x if (m.sum(0) > 3).any() else x + 1),
        [X, X > 0.2],
    ),
    "a whole step": (
        lambda p, s, x, k: _train(p, s, x, k),
        [{"w": X.T, "b": X[0, 0]}, optimizer.init({"w": X.T, "b": X[0, 0]}), X, KEY],
    ),
}


def _in_another_dtype(x):
    """Factories, whole numbers that become floats, and a comparison that torch makes in its default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        n = torch.arange(300)
        made = [
            torch.zeros(3),
            torch.full((2,), 1.5),
            torch.arange(0, 1, 0.1),
            torch.eye(2),
            torch.linspace(0, 1, 5),
            torch.bartlett_window(4),
            torch.tensor([1.5, 2]),
            torch.tensor(0.5) * n,
            torch.ones(2, dtype=torch.float64),
            torch.arange(2),
            torch.empty(2).fill_(1),
            torch.scalar_tensor(1.0),
            torch.ones(2, 2).cumsum(0),
        ]
        counted = [
            n / 2,
            n * 1.01,
            n < 256.5,
            n.sqrt(),
            n * 1j,
            n.float() / 3,
            n + 1,
            torch.where(n > 4, 0.1, 0.2),
            n / (n + 1),
            n.view(3, 100).to(torch.get_default_dtype()),
            torch.stack([n, n]).sum(dtype=torch.float32),
            n.new_zeros(2),
        ]
    finally:
        torch.set_default_dtype(before)
    return x * made[0].float() + torch.ones(3), made, counted, torch.zeros(3) + n[1] / 3


def _on_another_device(x):
    with torch.device("meta"):
        shape = torch.zeros(4, 3).shape
    return x + torch.ones(shape)


def _autocast(x):
    with torch.autocast("cpu", torch.bfloat16):
        y = x @ x.T
        with torch.autocast("cpu", enabled=False):
            return y, x @ x.T, vfn.grad(lambda x: (x @ x.T).sum())(x)


def _train(params, state, x, key):
    now, later = vfn.random.split(key)

    def loss(p):
        return ((vfn.random.dropout(now, x, 0.3) @ p["w"]).relu() + p["b"]).square().mean()

    value, grads = vfn.value_and_grad(loss)(params)
    updates, state = optimizer.update(grads, state, params)
    return value, vfn.optim.apply_updates(params, updates), state, later


F32 = {"rtol": 1e-5, "atol": 1e-6}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    f, args = FUNCTIONS[name]
    g = vfn.jit(f)
    for _ in range(2):
        assert_same(g(*args), f(*args), F32)
    assert g.cache_info()[:3] == (1, 1, 0)


def _functions_on(mesh, names=tuple(FUNCTIONS)):
    for name, (f, args) in ((name, FUNCTIONS[name]) for name in names):
        laid = [vfn.shard(x, mesh, P("b")) if torch.is_tensor(x) and x.ndim == 2 else x for x in args]
        g = vfn.jit(f)
        for _ in range(2):
            assert_same(g(*laid), f(*laid), F32)
        assert g.cache_info()[:3] == (1, 1, 0), name


def _functions_on_real_ranks(names):
    torch.set_num_threads(1)
    _functions_on(vfn.make_mesh((1, 3), ("a", "b")), names)


def test_functions_on_arrays(gloo):
    with vfn.simulate(6):
        _functions_on(vfn.make_mesh((2, 3), ("a", "b")))
    gloo(3, _functions_on_real_ranks, [*part(FUNCTIONS, 3), "the truth of a mask"])


# --- bodies -----------------------------------------------------------------------------------------------------------

BODIES = {
    "psum": (lambda x: vfn.psum((x * vfn.axis_index("a")).sum(0), "a"), P("a"), P()),
    "gather and scatter": (
        lambda x: vfn.psum_scatter(vfn.all_gather(x, "a", tiled=True), "a", tiled=True),
        P("a"),
        P("a"),
    ),
    "a sum and what was summed": (lambda x: (y := x * 2, vfn.psum(y, "a") + y)[1], P("a"), P("a")),
    "ppermute": (lambda x: vfn.ppermute(x, "a", [(0, 1), (1, 0)]), P("a"), P("a")),
    "all_to_all": (lambda x: vfn.all_to_all(x, "b", 1, 0, tiled=True), P("a"), P(("a", "b"))),
    "a gradient": (lambda x: vfn.grad(lambda x: vfn.psum((x**2).sum(), "a"))(x), P("a"), P("a")),
    "a slice": (lambda x: vfn.dynamic_slice(x, [vfn.axis_index("a") * 2, 0], [2, 4]), P(), P("a")),
    "a buffer": (lambda x: torch.zeros(x.shape).add_(x), P("a"), P("a")),
    "a draw": (lambda x: x + vfn.random.normal(KEY, (4, 4), spec=P("a")), P("a"), P("a")),
    "jit inside": (vfn.jit(lambda x: vfn.psum(x, "a")), P("a"), P()),
    "a sum that is not made": (lambda x: vfn.pcast(x, "a", to="unreduced"), P("a"), P(unreduced={"a"})),
}


def _bodies():
    torch.set_num_threads(1)
    x = torch.arange(16.0).view(4, 4) / 7
    with vfn.use_mesh(vfn.make_mesh((2, 2), ("a", "b"))):
        for name, (body, spec, out) in BODIES.items():
            for check in (True, False):
                f = vfn.shard_map(body, in_specs=spec, out_specs=out, check_vma=check)
                loss = lambda x: (vfn.unshard(f(x)).sin() * 2).sum()
                g = vfn.jit(f)
                for _ in range(2):
                    assert_same(g(x), f(x), F32)
                if name != "a gradient":
                    assert_same(vfn.jit(vfn.grad(loss))(x), vfn.grad(loss)(x), F32)
                assert g.cache_info()[:3] == (1, 1, 0), name


def test_bodies(gloo):
    with vfn.simulate(4):
        _bodies()
    gloo(4, _bodies)


def test_what_is_unreduced_stays_unreduced():
    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("a",))
        x, w = vfn.shard(X, mesh, P("a")), vfn.shard(X[0], mesh, P(reduced={"a"}))
        back = lambda w, x: vfn.vjp(lambda w: (x * w).sum(), w)[1](torch.ones(()))
        cases = [
            vfn.grad(lambda w, x: (x * w).sum()),
            back,
            lambda w, x: x.sum(0),
            lambda w, x: x.sum(0) * 2,
            lambda w, x: vfn.with_sharding(w * 1, P(unreduced={"a"})),
        ]
        for f in cases:
            wanted = f(w, x)
            assert_same(vfn.jit(f)(w, x), wanted)
            assert "unreduced" in repr(vfn.spec_of(tree.leaves(wanted)[0]))
            reduced = vfn.jit(f, out_specs=P())(w, x)
            assert vfn.spec_of(tree.leaves(reduced)[0]) == P()


def test_jit_under_transforms_is_the_function():
    f = vfn.jit(lambda v: (v**2).sum())
    assert torch.equal(vfn.grad(f)(X), 2 * X)
    assert torch.equal(torch.func.grad(f)(X), 2 * X)
    assert torch.equal(vfn.vmap(f)(X), (X**2).sum(1))
    assert torch.equal(vfn.jvp(f, (X,), (X,))[1], 2 * (X * X).sum())
    assert f.cache_info().records == 0


# --- the cache --------------------------------------------------------------------------------------------------------


def test_a_thousand_steps_with_changing_floats_are_one_plan():
    f = vfn.jit(lambda x, lr: x - lr * x)
    x = y = torch.ones(2, dtype=torch.float64)
    for i in range(1000):
        x, y = f(x, 1e-3 / (i + 1)), y - 1e-3 / (i + 1) * y
    assert torch.equal(x, y)
    assert f.cache_info()[:4] == (999, 1, 0, 1)


@pytest.mark.filterwarnings("ignore:jit")
def test_what_makes_another_plan():
    f = vfn.jit(lambda x, n=2: x * n)
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("a", "b"))
        a = torch.ones(4, 4)
        kinds = [
            (a,),
            (a[:2],),
            (a.double(),),
            (a.T[:, :2],),
            (a, 3),
            (a, True),
            (a, 1),
            (a, 1.0),
            (vfn.shard(a, mesh, P("a")),),
            (vfn.shard(a, mesh, P("b")),),
            ([a][0], 2),
        ]
        for args in kinds:
            assert_same(f(*args), args[0] * (args[1] if len(args) > 1 else 2))
    assert f.cache_info().records == len(kinds)
    for x in (a, a[:2]):
        f(x)
    assert f.cache_info().records == len(kinds) + 2  # outside of the simulation is elsewhere


OTHER_CALLS = {
    "turned": lambda x: x.t().contiguous().t(),
    "longer": lambda x: torch.cat([x, x]),
    "another dtype": lambda x: x.float(),
    "a parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "negated": lambda x: torch._neg_view(x),
    "a float": lambda x: 2.5,
    "an array": lambda x: vfn.shard(x, vfn.make_mesh((2,), ("dp",)), P("dp")),
}


@pytest.mark.parametrize("other", OTHER_CALLS)
def test_a_call_unlike_the_last_ones(other):
    function = lambda given, n: given["x"] * n - given["depth"]
    f, x = vfn.jit(lambda given, n: (function(given, n), given["x"])), torch.arange(6.0).view(2, 3).double()
    with vfn.simulate(2):
        for _ in range(4):
            f({"x": x, "depth": 3}, 0.5)
        y = OTHER_CALLS[other](x)
        for given in ({"x": y, "depth": 3}, {"x": x, "depth": 4}, {"x": x, "depth": 3}):
            (found, same), wanted = f(given, 1.5), function(given, 1.5)
            assert found == wanted if isinstance(wanted, float) else torch.equal(*vfn.unshard((found, wanted)))
            assert type(same) is type(given["x"])
    assert f.cache_info().records == 3 - (other == "negated")  # with the depth of 4, and with `y`


def test_static_argnums():
    f = vfn.jit(lambda x, how: how(x), static_argnums=1)
    assert torch.equal(f(X, torch.sin), X.sin())
    assert torch.equal(f(X, torch.cos), X.cos())
    assert torch.equal(f(X, torch.sin), X.sin())
    assert f.cache_info()[:3] == (1, 2, 0)


def test_places_out_of_range_are_refused():
    two = lambda x, y, *, z=0: x
    for name in ("donate_argnums", "static_argnums"):
        for wrong in (2, (0, -3)):
            with pytest.raises(TransformError) as raised:
                vfn.jit(two, **{name: wrong})
            place = wrong if wrong == 2 else -3
            assert str(raised.value) == (
                f"jit: {name} names the place {place}, but <lambda> takes 2 arguments by position\n"
                "  Instead: places from -2 to 1"
            )
        vfn.jit(two, **{name: (-2, 1)})
        vfn.jit(lambda *args: args, **{name: 5})
    with pytest.raises(TransformError, match="takes 0 arguments by position\n  Instead: no donate_argnums"):
        vfn.jit(lambda: X, donate_argnums=0)


def test_jit_as_a_decorator_with_arguments():
    @vfn.jit(static_argnums=1, donate_argnums=0)
    def times(x, n):
        return x * n

    assert repr(times).startswith("<vfn.jit of test_jit_as_a_decorator_with_arguments.<locals>.times: 0 plans>")
    x = X.clone()
    assert torch.equal(times(x, 2), X * 2)
    with pytest.raises(vfn.errors.VfnError, match="donate"):
        x + 1
    assert repr(times).endswith("times: 1 plan>")
    assert "passes: 'Sequence[Pass] | None' = None" in str(inspect.signature(vfn.jit))


def test_numbers_that_are_no_floats_are_a_part_of_the_plan():
    f = lambda x, s: (x * s, repr(s))
    g = vfn.jit(f)
    given = [
        numpy.float32(0.3),
        numpy.float32("nan"),
        complex("nan"),
        numpy.int64(3),
        numpy.bool_(True),
        0j,
        complex(0, -0.0),
    ]
    for _ in range(2):
        for s in given:
            (value, text), (wanted, named) = g(X, s), f(X, s)
            torch.testing.assert_close(value, wanted, equal_nan=True)
            assert text == named
    assert g.cache_info()[:3] == (7, 7, 0)


def test_static_arguments_of_equal_value_and_other_type_have_plans_of_their_own():
    given = [1, 1.0, True, (1,), (1.0,), -0.0, math.nan]
    f = vfn.jit(lambda x, one: (x, repr(one)), static_argnums=1)
    for _ in range(2):
        assert [f(X, one)[1] for one in given] == list(map(repr, given))
    assert f.cache_info().records == len(given)


def test_recording_too_often_is_said_once():
    f = vfn.jit(lambda x: x + 1)
    with pytest.warns(UserWarning, match="recorded 8 times") as said:
        [f(torch.ones(n)) for n in range(12)]
    assert len(said) == 1
    assert str(said[0].message) == (
        "jit: <lambda> has been recorded 8 times, which costs more than it saves\n"
        "  * the last time because x was f32[6] and is f32[7]\n"
        "  Instead: arguments of the same shapes and layouts (pad the last batch); a float or a tensor for an int that changes"
    )


factor, settings = torch.tensor(2.0), {"scale": torch.tensor(3.0), "n": 2}


def _helper(x):
    return x * factor if "torch" in sys.modules else x


def test_what_a_function_closes_over_is_noticed_when_it_changes(monkeypatch):
    inner = torch.tensor(5.0)

    def f(x):
        return _helper(x) * inner * settings["scale"] * settings["n"]

    g, x = vfn.jit(f), torch.ones(2)
    assert torch.equal(g(x), f(x))
    factor.add_(1)  # the plan holds the tensor, not its value
    monkeypatch.setitem(sys.modules, "imported_since", sys)
    assert torch.equal(g(x), f(x))
    assert g.cache_info().records == 1
    changes = [
        functools.partial(monkeypatch.setitem, globals(), "factor", torch.tensor(7.0)),
        functools.partial(monkeypatch.setitem, globals(), "_helper", lambda x: x - factor),
        functools.partial(monkeypatch.setitem, settings, "scale", torch.tensor(8.0)),
        functools.partial(monkeypatch.setitem, settings, "n", 4),
    ]
    for i, change in enumerate(changes):
        change()
        assert torch.equal(g(x), f(x))
        assert g.cache_info().records == i + 2
    inner = torch.tensor(6.0)
    assert torch.equal(g(x), f(x))
    assert g.cache_info().last == "inner, which it closes over, has changed"


named = torch.tensor(1.0)


def test_an_attribute_is_no_global_of_its_name(monkeypatch):
    f = vfn.jit(lambda x: x.named + 1 if hasattr(x, "named") else x * 2)
    for value in (2.0, 3.0):
        f(torch.ones(2))
        monkeypatch.setitem(globals(), "named", torch.tensor(value))
    assert f.cache_info().records == 1


class _Model:
    def __init__(self):
        self.w = torch.ones(3)

    def __call__(self, x):
        return x * self.w

    @vfn.jit
    def method(self, x):
        return x * self.w


@pytest.mark.parametrize("how", ["method", "object", "bound"])
def test_what_an_object_holds_is_noticed_when_it_changes(how):
    model = _Model()
    f = {"method": model.method, "object": vfn.jit(model), "bound": vfn.jit(model.__call__)}[how]
    for value in (1.0, 5.0):
        model.w = torch.full((3,), value)
        assert torch.equal(f(X), X * value)


def test_parameters_of_a_module_are_noticed_when_they_change():
    linear = torch.nn.Linear(3, 2).requires_grad_(False)
    f = vfn.jit(lambda x: linear(x))
    for _ in range(2):
        assert torch.equal(f(X), linear(X))
        linear.weight = torch.nn.Parameter(torch.ones(2, 3), requires_grad=False)
    linear.weight.mul_(2)
    assert torch.equal(f(X), linear(X))
    assert f.cache_info().records == 3


@contextlib.contextmanager
def _set(setter, value, before):
    setter(value)
    try:
        yield
    finally:
        setter(before)


class _Mode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {})) * (2 if func is torch.sin else 1)


_attends = torch.nn.functional.scaled_dot_product_attention
SETTINGS = {
    "default dtype": (
        functools.partial(_set, torch.set_default_dtype, torch.float64, torch.float32),
        lambda x: torch.ones(3),
    ),
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), lambda x: x @ x.T),
    "autocast that is off inside": (lambda: torch.autocast("cpu", torch.bfloat16), lambda x: (x @ x.T, _autocast(x))),
    "attention": (
        lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        lambda x: _attends(*[x[None, None]] * 3),
    ),
    "deterministic": (functools.partial(_set, torch.use_deterministic_algorithms, True, False), lambda x: x.cumsum(0)),
    "precision": (functools.partial(_set, torch.set_float32_matmul_precision, "medium", "highest"), lambda x: x @ x.T),
    "inference": (torch.inference_mode, lambda x: (x * 2, torch.ones(1) * torch.is_inference_mode_enabled())),
    "a default device": (lambda: torch.device("meta"), lambda x: torch.ones(3)),
    "a mode": (_Mode, lambda x: torch.sin(x)),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_around_a_call_are_those_of_the_function(name):
    around, f = SETTINGS[name]
    g = vfn.jit(f)
    for _ in range(2):
        assert_same(g(X), f(X), F32)
        with around():
            found, wanted = g(X), f(X)
        assert_same(found, wanted, F32)
    assert g.cache_info()[:2] == ((1, 1) if name == "a mode" else (2, 2))
    if name == "attention":
        kernels = [[n.target for n in g.lower(X).graph.nodes if n.op == "call_function"]]
        with around():
            kernels.append([n.target for n in g.lower(X).graph.nodes if n.op == "call_function"])
        assert kernels[0] != kernels[1]


def test_a_setting_of_kernels_that_a_function_changes_runs_as_written():
    def f(x):
        torch.use_deterministic_algorithms(True)
        try:
            return x.cumsum(0)
        finally:
            torch.use_deterministic_algorithms(False)

    g = vfn.jit(f)
    with pytest.warns(
        UserWarning, match="torch.use_deterministic_algorithms is set inside the function, and not around"
    ):
        assert_same(g(X), f(X))
    assert g.cache_info()[:3] == (0, 0, 1)


def test_a_function_that_leaves_the_default_dtype_changed_runs_as_written():
    g = vfn.jit(lambda x: (x + 1, torch.set_default_dtype(torch.float64))[0])
    said = pytest.warns(UserWarning, match="the function leaves torch's default dtype changed")
    with said, _set(torch.set_default_dtype, torch.float32, torch.float32):
        assert torch.equal(g(X), X + 1)
        assert torch.get_default_dtype() is torch.float64


def test_autocast_keeps_no_weight_of_a_recording():
    w = torch.eye(3, requires_grad=True)
    f = lambda x: (x @ w).detach()
    g = vfn.jit(f)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            assert_same(g(X), f(X))
    with torch.no_grad():
        w.mul_(3)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(g(X), f(X))


def test_a_decision_on_whole_numbers_heeds_the_default_dtype():
    with vfn.simulate(2):
        x = vfn.shard(torch.arange(4), vfn.make_mesh((2,), ("a",)), P("a"))
        for dtype in (torch.float32, torch.float64):
            with _set(torch.set_default_dtype, dtype, torch.float32):
                y = x / 2
                torch.testing.assert_close(vfn.unshard(y), torch.arange(4) / 2)
                assert y._spec.tensor_meta.dtype is dtype


# --- what cannot be recorded ------------------------------------------------------------------------------------------

_SPARSE = torch.eye(4).to_sparse()
READS = {
    "if": lambda x: x * 2 if x.sum() > 0 else x,
    "item": lambda x: x * x.sum().item(),
    "float()": lambda x: x * float(x[0, 0]),
    "tolist": lambda x: x * sum(x.tolist()[0]),
    "numpy": lambda x: torch.from_numpy(x.numpy() * 2),
    "a shape by values": lambda x: x[x > 0].sum(),
    "nonzero": lambda x: x.nonzero().sum(),
    "sqrt of a float": lambda x, lr: x * math.sqrt(lr),
    "a comparison of a float": lambda x, lr: x if lr > 0.5 else x * 2,
    "a tensor of a float": lambda x, lr: x * torch.Tensor([lr]),
    "a shape by a float": lambda x, lr: x * torch.arange(0, lr, 0.1),
    "a formula of torch's with a float": lambda x, lr: vfn.grad(lambda x: torch.lerp(x, x * x, lr).sum())(x),
    "a sparse constant": lambda x: torch.sparse.mm(_SPARSE, x),
    "where the memory of an argument begins": lambda x: vfn.grad(lambda x: x.as_strided((2,), (1,), 1).sum())(x),
    "a float as text": lambda x, lr: x * len(f"{lr}"),
}


@pytest.mark.parametrize("name", READS)
def test_reading_a_value_runs_as_written_and_says_so_once(name):
    f = READS[name]
    args = (X, 0.3) if f.__code__.co_argcount == 2 else (X,)
    g = vfn.jit(f)
    with pytest.warns(UserWarning, match="jit: <lambda> runs as written, not as a plan") as said:
        [assert_same(g(*args), f(*args)) for _ in range(3)]
    assert len(said) == 1
    assert said[0].filename == __file__
    assert g.cache_info()[:3] == (0, 0, 3)


def test_truth_values_of_whole_numbers_choose_a_plan():
    held = torch.ones(2, dtype=torch.bool)
    f = lambda x, n, lr: (x * lr if (n > 0).all() else -x) + (1 if n[0] == 3 else 2) * (1 if held.all() else 5)
    g = vfn.jit(f)
    for expected in (3, 3, 6):
        for n in map(torch.tensor, ([1, 2], [3, 4], [0, 1], [3, 5])):
            assert_same(g(X, n, 0.3), f(X, n, 0.3))
        assert g.cache_info()[1:4] == (expected, 0, 1)
        held[0] = g.cache_info().hits < 2
    assert "neg" in g.lower(X, torch.tensor([0, 1]), 0.3).text()


@pytest.mark.filterwarnings("ignore:jit")
def test_truth_values_that_lead_to_many_plans_run_as_written():
    many = lambda x, n: x * sum(2**i * (1 if b else 0) for i, b in enumerate(n))
    g = vfn.jit(many)
    for i in [*range(12), *range(12)]:
        n = torch.tensor([i % 2, i // 2 % 2, i // 4 % 2, i // 8]) > 0
        assert_same(g(X, n), many(X, n))
    assert g.cache_info()[1:4] == (9, 15, 1)  # the ninth ends it
    written = lambda x, n: x if (m := n.clone(), m.add_(1), (m > 1).all())[-1] else -x
    g = vfn.jit(written)
    for n in (torch.ones(2, dtype=torch.long), torch.zeros(2, dtype=torch.long)):
        assert_same(g(X, n), written(X, n))
    assert g.cache_info().records == 0


def test_distributions_that_check_values_are_named():
    normal = lambda x, checks=True: torch.distributions.Normal(x, 1.0, validate_args=checks).log_prob(x)
    g = vfn.jit(normal)
    with pytest.warns(
        UserWarning, match="torch.distributions checks values, but for those with validate_args=False, at"
    ):
        assert_same(g(X), normal(X))
    unchecked = vfn.jit(lambda x: normal(x, checks=False))
    assert_same(unchecked(X), normal(X))
    assert unchecked.cache_info().records == 1


def test_the_line_that_reads_is_named():
    def f(x):
        if x.sum() > 0:
            return x
        return -x

    with pytest.warns(UserWarning, match="jit") as said:
        vfn.jit(f)(X)
    line = f.__code__.co_firstlineno + 1
    assert str(said[0].message) == (
        "jit: f runs as written, not as a plan\n"
        f"  * a value is read in Python, at {__file__}:{line}: `if x.sum() > 0:`\n"
        "  Instead: torch.where for `if`, tensors for numbers; or leave the jit out"
    )


def test_arguments_that_require_gradients():
    w = X.clone().requires_grad_()
    g = vfn.jit(lambda w: (w**2).sum())
    with pytest.warns(UserWarning, match="an argument requires gradients"):
        value = g(w)
    value.backward()
    assert torch.equal(w.grad, 2 * X)
    with torch.no_grad():
        assert g(w) == value
    assert g.cache_info().records == 1


def test_writes_to_what_is_not_its_own_raise():
    def f(x):
        x += 1
        return x

    with pytest.raises(InPlaceError) as raised:
        vfn.jit(f)(X.clone())
    assert str(raised.value) == (
        "add_: jit: this changes an argument in place, and a recorded function is pure\n"
        f"  * at {__file__}:{f.__code__.co_firstlineno + 1}: `x += 1`\n"
        "  Instead: a new value: x = x + y for x += y, x.clone() before the write; to update parameters in their own memory "
        "return the new ones, and vfn.jit(f, donate_argnums=...)"
    )
    with pytest.raises(InPlaceError, match="an argument in place"):
        vfn.jit(lambda x: x.view(-1)[:2].zero_())(X.clone())
    with pytest.raises(InPlaceError, match="a tensor that the function closes over in place"):
        vfn.jit(lambda x: X.mul_(x))(X)
    with vfn.simulate(2):
        x = vfn.shard(X, vfn.make_mesh((2,), ("a",)), P("a"))
        with pytest.raises(InPlaceError, match="an argument in place"):
            vfn.jit(f)(x)


def _given_to(y, value):
    y.data = value
    return y


def _after_a_view(x):
    y = x * 3
    z = y.view(-1)
    y.data = x * 5
    z.mul_(2)
    y.add_(1)
    return y.view(-1) + z


def _under_two_names(x):
    y, v = x.clone(), x * 3
    y.data = v
    v.add_(1)
    y.add_(1)
    return y * v


def _saved_before(x):
    def loss(x):
        y = x * 3
        w = y * y
        y.data = x.data * 100
        return w.sum() + y.sum()

    return vfn.grad(loss)(x)


def _stepped(x):
    p = torch.nn.Parameter(x.detach().clone())
    (p * p).sum().backward()
    p.data = p.data - 0.5 * p.grad
    p.data.mul_(3)
    return p.detach()


EXCHANGED = {
    "plain": lambda x: _given_to(x.clone(), x * 2),
    "a part": lambda x: _given_to(x.clone().split(2)[0], x * 3) ** 2,
    "another shape": lambda x: _given_to(x.clone(), torch.cat([x, x], 1)) @ torch.ones(6, 2),
    "another dtype": lambda x: _given_to(x.clone(), x.double()),
    "of an argument": lambda x: _given_to(x.clone(), x) * 2,
    "a view of an argument": lambda x: _given_to(x.view(-1), x * 2),
    "a view": _after_a_view,
    "two names": _under_two_names,
    "saved": _saved_before,
    "a parameter": _stepped,
    "a literal": lambda x: x + 1 if _given_to(torch.tensor(True), torch.tensor(False)) else x - 1,
    "written": lambda x: (y := x.clone(), y.data.mul_(2))[0],
}


@pytest.mark.parametrize("name", EXCHANGED)
def test_an_assignment_to_data_is_recorded(name):
    """`x.data = value` is no op: it was not recorded, and `x` stayed what it was before."""
    f = EXCHANGED[name]
    fast = vfn.jit(f)
    for x in (X, X + 1):
        found = fast(x.clone())
        torch.testing.assert_close(found, f(x.clone()), rtol=0, atol=0)


def _swapped(x):
    y, z = x * 1, x * 2
    torch.utils.swap_tensors(y, z)
    return y


def test_exchanged_memory_of_what_outlives_the_function_raises():
    """The tensors that it closes over lost their values, and an argument was exchanged in the recording alone."""
    w, v = torch.ones(2), torch.zeros(2)

    def swap_with(x, y):
        torch.utils.swap_tensors(x, y)

    for change, what in (
        (lambda x: _given_to(x, x * 2), "`.data = `: jit: this changes an argument"),
        (lambda x: _given_to(w, x * 2), "`.data = `: jit: this changes a tensor that the function closes over"),
        (lambda x: _given_to(w, v), "`.data = `: jit: this changes a tensor that the function closes over"),
        (
            lambda x: swap_with(w, x * 2),
            "torch.utils.swap_tensors: jit: this changes a tensor that the function closes",
        ),
    ):
        with pytest.raises(InPlaceError, match=what):
            vfn.jit(change)(X.clone())
    assert type(w) is torch.Tensor
    assert torch.equal(w, torch.ones(2))
    with pytest.warns(UserWarning, match="_swapped runs as written"):
        assert torch.equal(vfn.jit(_swapped)(X), X * 2)
    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("a",))
        x, w = vfn.shard(X, mesh, P("a")), vfn.shard(torch.ones(2), mesh, P("a"))
        assert torch.equal(vfn.unshard(vfn.jit(_swapped)(x)), X * 2)
        with pytest.raises(InPlaceError, match="a tensor that the function closes over in place"):
            vfn.jit(lambda x: swap_with(w, x * 2))(x)
        with pytest.raises(InPlaceError, match="an argument in place"):
            vfn.jit(lambda x: swap_with(x, x * 2))(x)
        assert torch.equal(vfn.unshard(w), torch.ones(2))
        with pytest.raises(InPlaceError, match="`.data = ` cannot exchange what an array holds"):
            vfn.jit(lambda x: _given_to(x * 1, x * 2))(x)


def test_draws_from_torchs_generator_raise():
    with pytest.raises(RandomError) as raised:
        vfn.jit(lambda x: x * torch.rand(4, 3))(X)
    assert "vfn.random.uniform(key, (4, 3))" in str(raised.value)
    with pytest.raises(RandomError, match="vfn.random.dropout"):
        vfn.jit(lambda x: torch.nn.functional.dropout(x, 0.5))(X)


def test_an_error_of_the_function_is_its_own():
    def f(x):
        return x @ x

    with pytest.raises(RuntimeError) as wanted:
        f(X)
    with pytest.raises(RuntimeError) as raised:
        vfn.jit(f)(X)
    assert str(raised.value) == str(wanted.value)


def test_arguments_that_cannot_be_keyed():
    with pytest.raises(TransformError) as raised:
        vfn.jit(lambda x, s: x)(X, {1, 2})
    assert str(raised.value) == (
        "jit: arguments are trees of tensors and of hashable Python values\n"
        "  * s is the set {1, 2}\n"
        "  Instead: torch.as_tensor(x) for numbers; a tuple for a list of settings; what never changes, closed over"
    )


def test_a_view_that_is_a_copy_of_what_lies_otherwise_on_a_rank_is_recorded():
    def f(x):  # attention gathers the positions, and what it gives lies in memory as that, not as the whole would
        heads = x.unflatten(-1, (4, -1)).transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2).square()

    x = torch.randn(2, 6, 12, dtype=torch.float64)
    with vfn.simulate(2):
        run = vfn.jit(f)
        found = run(vfn.shard(x, vfn.make_mesh((2,), ("cp",)), P(None, "cp")))
        assert run.cache_info().as_written == 0
        torch.testing.assert_close(vfn.unshard(found), f(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("op", [torch.add, torch.sub, torch.mul, torch.div], ids=["add", "sub", "mul", "div"])
def test_a_number_meets_halves_as_it_does_one_by_one(op, dtype):
    def f(tensors):  # each in the place of a value that is done with: one call for all of them
        return [op(x.sin(), 0.4) for x in tensors]

    tensors = [torch.linspace(-2, 2, 100 + i).to(dtype) for i in range(4)]
    assert all(torch.equal(x, y) for x, y in zip(vfn.jit(f)(tensors), f(tensors), strict=True))


def test_out_specs():
    def init(key):
        return {"w": vfn.random.normal(key, (5, 4)) * 0.1, "b": torch.zeros(4)}

    with vfn.simulate(4), vfn.use_mesh(vfn.make_mesh((2, 2), ("a", "b"))):
        made = vfn.jit(init, out_specs={"w": P("a", "b"), "b": P()})(KEY)
        assert vfn.spec_of(made["w"]) == P("a", "b")
    assert torch.equal(vfn.unshard(made["w"]), init(KEY)["w"])


# --- what else happens ------------------------------------------------------------------------------------------------


def test_debug_print(capsys):
    def f(x):
        vfn.debug_print("sum {:.1f} of {x}", x.sum(), x=x[:2, 0])
        return vfn.grad(lambda x: (vfn.debug_print("inside {}", x[0, 0]), (x**2).sum())[1])(x)

    g = vfn.jit(f)
    expected = "sum 9.4 of tensor([0.0000, 0.4286])\ninside 0.0\n"
    for run in (f, g, g):
        assert torch.equal(run(X), 2 * X)
        assert capsys.readouterr().out == expected
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("a", "b"))
        for run in (f, g, g):
            run(vfn.shard(X, mesh, P("a")))
            assert capsys.readouterr().out == expected
        body = vfn.shard_map(
            lambda x: (vfn.debug_print("{}", x[0, 0] * 7), x)[1], mesh=mesh, in_specs=P("a"), out_specs=P("a")
        )
        for run in (body, vfn.jit(body)):
            run(X)
            assert capsys.readouterr().out == "[a=0, b=0] 0.0\n[a=0, b=1] 0.0\n[a=1, b=0] 6.0\n[a=1, b=1] 6.0\n"
    with pytest.raises(TransformError, match="does not fit the values"):
        vfn.debug_print("{} {}", X)


def _print_on_real_ranks():
    x = vfn.shard(X, vfn.make_mesh((2,), ("a",)), P("a"))
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        f = vfn.jit(lambda x: (vfn.debug_print("{}", x.sum()), x * 2)[1])
        f(x), f(x)
    return said.getvalue()


def test_debug_print_on_real_ranks(gloo):
    assert gloo(2, _print_on_real_ranks) == ["9.428571701049805\n" * 2, ""]


def test_an_error_in_a_replay_names_the_users_line():
    @torch.library.custom_op("vfn_tests::may_fail", mutates_args=())
    def may_fail(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 100:
            raise ValueError("too much")
        return x.clone()

    may_fail.register_fake(torch.empty_like)
    f = vfn.jit(lambda x: may_fail(x) + 1)
    f(X)
    with pytest.raises(ValueError, match="too much") as raised:
        f(X * 100)
    if hasattr(raised.value, "__notes__"):
        assert raised.value.__notes__[-1].startswith(f"in a replay of what was recorded at {__file__}:")


def test_a_value_kept_from_a_recording_is_not_taken_for_one():
    kept = []
    f = vfn.jit(lambda x: (kept.append(x * 2), x + 1)[1])
    f(X)
    uses = [
        vfn.jit(lambda x: x + kept[0]),
        lambda x: kept[0] + 1,
        lambda x: x * kept[0],
        lambda x: kept[0].tolist(),
        lambda x: x.clone().copy_(kept[0]),
        lambda x: bool(kept[0][0, 0] > 0),
    ]
    for use in uses:
        with pytest.raises(RecordError, match="an earlier recording, which was kept from it"):
            use(X)
    assert repr(kept[0]) == "<a value of an earlier recording: f32[4,3]>"
    with vfn.simulate(2):
        f(vfn.shard(X, vfn.make_mesh((2,), ("a",)), P("a")))
        with pytest.raises(RecordError, match="an earlier recording, which was kept from it"):
            kept[-1].sum()


def test_a_float_kept_from_a_recording_has_the_value_of_the_call():
    kept = {}

    def f(x, rate):
        kept["last"], kept["computed"] = rate, rate * 2
        if "first" not in kept:
            kept["first"], kept["root"] = rate, math.sqrt(rate)  # C reads the value of what stands for it
        return x * kept["root"] + rate

    fast, x = vfn.jit(f), torch.ones(2, dtype=torch.float64)
    assert torch.allclose(fast(x, 0.25), x * 0.75, rtol=1e-11)
    assert torch.allclose(fast(x, 0.5), x, rtol=1e-11)  # as in eager: the first call's root
    assert fast.cache_info().records == 1
    assert (kept["last"] + 1, f"{kept['first']}", kept["computed"]) == (1.25, "0.25", 0.5)
    assert (math.sqrt(kept["last"]), {kept["last"]: 1}) == (0.5, {0.25: 1})
    assert torch.equal(x * kept["last"], x / 4)


@pytest.mark.filterwarnings("ignore:jit. f runs as written")
@pytest.mark.parametrize("rate", [0.0, -0.5, 1.0, math.inf, 5e-324])
def test_a_float_kept_and_used_by_later_calls(rate):
    def f(x, rate):
        kept.setdefault("rate", rate)
        return x * kept["rate"] - rate

    kept = {}
    fast, x = vfn.jit(f), torch.ones(2)
    for now in rate, 0.125:
        assert torch.equal(fast(x, now), x * rate - now) or (math.isinf(rate) and now == rate)
    assert x[0] * kept["rate"] == rate


@pytest.mark.filterwarnings("ignore:jit. f runs as written")
def test_a_float_kept_is_a_float_beside_those_of_a_recording():
    def f(x, rate):
        for name in "left", "right":
            kept[name] = kept.get(name, 0.0) + rate if name == "left" else rate + kept.get(name, 0.0)
        return x * kept["left"]

    kept = {}
    vfn.jit(f)(torch.ones(2), 0.25)
    assert kept == {"left": 0.75, "right": 0.75}  # two recordings, and a call as written

    kept.clear()
    vfn.jit(lambda x, rate: x * kept.setdefault("rate", rate) if not kept else x * rate)(torch.ones(2), 0.25)
    for made in (pickle.loads(pickle.dumps(kept["rate"])), copy.copy(kept["rate"]), copy.deepcopy(kept["rate"])):
        assert (type(made), made) == (float, 0.25)


def _written(dtype, index, rate):
    x = torch.zeros(3, dtype=dtype)
    x[index] = rate
    return x


_N = torch.arange(3)
OF_A_FLOAT = {  # what C makes of a float among the arguments; those in capitals are refused
    "tensor": lambda r: (torch.tensor(r), torch.tensor(r, dtype=torch.long), torch.tensor(r, dtype=torch.bool)),
    "lists": lambda r: (torch.tensor([[r, 1], [2, r]], dtype=torch.int32), torch.as_tensor([r, True])),
    "as": lambda r: (torch.as_tensor(r, dtype=torch.long), torch.asarray(r, dtype=torch.int16, copy=True)),
    "new": lambda r: (_N.new_tensor(r), _N.double().new_tensor([r]), _N.new_full((2,), r), torch.full_like(_N, r)),
    "written": lambda r: [
        _written(d, i, r) for d in (torch.long, torch.bool, torch.half) for i in (0, slice(2), _N > 1)
    ],
    "operators": lambda r: (torch.full((2,), r, dtype=torch.long), torch.zeros(2, dtype=int).fill_(r), _N.clamp(max=r)),
    "sign": lambda r: _N * math.copysign(1.0, r),
    "a probability": lambda r: torch.feature_dropout(torch.ones(2, 2), r, False),
    "NEW": lambda r: _N.new([r]),
    "LONGTENSOR": lambda r: torch.LongTensor([r]),
    "NUMPY": lambda r: torch.from_numpy(numpy.array([r], dtype=int)),
    "FREXP": lambda r: _N * math.frexp(r)[1],
    "MODF": lambda r: _N * math.modf(r)[1],
    "ROOT": lambda r: _N * int(math.sqrt(r)),
    "REAL": lambda r: _N * int(r.real),
}


@pytest.mark.filterwarnings("ignore:jit. <lambda> runs as written")
@pytest.mark.parametrize("name", OF_A_FLOAT)
def test_what_c_makes_of_a_float_follows_it(name):
    f, rates = OF_A_FLOAT[name], (0.0, 1.0, 2.0, 0.5, 2.5, 1e4, -0.0, -1.0)
    if name in ("a probability", "ROOT"):
        rates = rates[:4] if name == "ROOT" else (0.0, 1.0, 0.3, 0.5)
    for first in rates[:4]:
        fast = vfn.jit(f)
        for rate in (first, *rates):
            assert_same(fast(rate), f(rate))
        assert (fast.cache_info().as_written > 0) == name.isupper()


def test_equal_floats_are_told_apart_in_whatever_order_they_are_used():
    def f(x, *rates):
        halves = [rate / 2 for rate in reversed(rates)]
        return torch.stack([x * half for half in halves])

    fast, x = vfn.jit(f), torch.ones(2, dtype=torch.float64)
    for rates in (0.25, 0.25, 0.25), (1.0, 2.0, 3.0):
        assert torch.equal(fast(x, *rates), f(x, *rates))
    assert fast.cache_info()[:3] == (1, 1, 0)


@pytest.mark.filterwarnings("ignore:jit. f runs as written")
def test_what_is_kept_of_a_recording_that_failed_is_told():
    def f(x):
        if not kept:
            kept.append(torch.arange(2.0))
        return x * kept[0] if x.sum() > 0 else x

    kept, x = [], torch.ones(2)
    for _ in range(2):
        with pytest.raises(RecordError, match="a value of an earlier recording"):
            vfn.jit(f)(x)


def _kept_with_a_float():
    kept = []

    def f(w, x, rate):
        if not kept:
            angles = torch.arange(4, dtype=torch.float64) / 10
            mask = torch.zeros(4, dtype=torch.float64)
            mask[1] = 2
            kept.extend((angles.cos(), angles.sin(), mask.add_(1)))
        cos, sin, mask = kept
        return w - rate * vfn.grad(lambda w: ((w * cos + sin) * mask * x).sin().sum())(w)

    return f


def _kept_in_a_body():
    kept = []

    def f(w, x, rate):
        def body(c, y):
            if not kept:
                kept.append(torch.arange(4, dtype=torch.float64).cos())
            return torch.tanh(c * w + y * kept[0]), None

        return vfn.scan(body, w, x.sum(0).expand(2, -1))[0] * rate

    return f


def _kept_where_a_loop_is_unrolled():
    kept = []

    def f(w, x, rate):
        kept[1:] = []
        if not kept:
            kept.append(torch.arange(4, dtype=torch.float64).cos())

        def body(c, y):
            kept.append(c * w)
            return c * w + y, None

        last, _ = vfn.scan(body, w, x.sum(0).expand(2, -1))
        return last * kept[0] + kept[-1]

    return f


KEEPING = [_kept_with_a_float, _kept_in_a_body, _kept_where_a_loop_is_unrolled]


def test_what_a_function_kept_may_not_come_of_an_argument():
    def f(w, rate):
        if not kept:
            kept.append(w.max())  # of which the first call's gradient is, too, and no later one's
        return (w / kept[0] * rate).sum()

    kept = []
    with pytest.raises(RecordError, match="a value of an earlier recording"):
        vfn.jit(vfn.grad(f))(torch.arange(1.0, 5.0), 0.5)


def test_what_a_function_kept_may_not_have_been_written_after_its_use():
    def f(x, rate):
        if not kept:
            kept.append(torch.zeros(3, dtype=torch.float64))
        y = x * rate + kept[0]  # zeros in the first call, and in no later one
        kept[0][1:].add_(1)
        return y

    kept = []
    with pytest.raises(RecordError, match="a value of an earlier recording"):
        vfn.jit(f)(X, 0.5)


def _all_keeping(mesh=None):
    w, x = torch.linspace(0.1, 1, 4, dtype=torch.float64), torch.linspace(-1, 1, 20, dtype=torch.float64).view(5, 4)
    if mesh is not None:
        w, x = vfn.shard((w, x), mesh, (P(), P("a")))
    for made in KEEPING:
        g = vfn.jit(made())
        for rate in (0.5, 0.25):
            assert_same(g(w, x, rate), made()(w, x, rate))
        assert g.cache_info()[:3] == (1, 1, 0), made.__name__


def _keeping_on_real_ranks():
    _all_keeping(vfn.make_mesh((3,), ("a",)))


def test_a_function_keeps_a_table_though_it_is_recorded_again(gloo):
    _all_keeping()
    with vfn.simulate(3):
        _all_keeping(vfn.make_mesh((3,), ("a",)))
    gloo(3, _keeping_on_real_ranks)


@pytest.mark.parametrize(
    "made",
    [
        lambda x, rate: torch.ones(3, dtype=x.dtype) * rate,
        lambda x, rate: torch.full((3,), math.sqrt(rate), dtype=x.dtype),
        lambda x, rate: torch.tensor([rate, 1.0, 2.0], dtype=x.dtype),
    ],
)
def test_what_a_function_kept_may_not_come_of_a_float(made):
    kept = []

    def f(x, rate):
        if not kept:
            kept.append(made(x, rate))
        return x * rate + kept[0]

    with pytest.raises(RecordError, match="an earlier recording, which was kept from it"):
        vfn.jit(f)(X, 0.5)


def test_what_a_function_kept_is_not_written_each_time_it_is_recorded():
    kept = []

    def f(x, rate):
        if kept:
            kept[0].add_(1)
        else:
            kept.append(torch.zeros(3, dtype=torch.float64))
        return x * rate + kept[0]

    with pytest.raises(InPlaceError, match="a recorded function is pure"):
        vfn.jit(f)(X, 0.5)


def test_passes_are_the_callers_choice():
    def f(x):
        return x.sin() + x.sin()

    def counted(graph):
        seen.append(len(graph.nodes))
        return graph

    seen = []
    for passes in ((), vfn.plan.PASSES, (*vfn.plan.PASSES, counted)):
        assert torch.equal(vfn.jit(f, passes=passes)(X), f(X))
    assert len(vfn.jit(f, passes=()).lower(X).graph.nodes) > seen[0]


def test_disable_jit():
    f = vfn.jit(lambda x: x if x.sum() > 0 else -x)
    with vfn.disable_jit():
        assert f(X) is X
    assert f.cache_info() == (0, 0, 0, 0, 64, "")


def test_logs_of_a_replay_name_the_lines_of_the_function():
    with vfn.simulate(2):
        x = vfn.shard(X, vfn.make_mesh((2,), ("a",)), P("a"))
        f = lambda x: x.sum() + 1
        g = vfn.jit(f)
        logs = []
        for run in (f, g, g):
            with vfn.comm_log() as log:
                vfn.unshard(run(x))
            logs.append([(r.op, r.axes, r.bytes, r.line) for r in log])
    assert logs[0] == logs[1] == logs[2]
    assert len(logs[0]) == 1
    assert [(r.op, r.axes, r.bytes, r.line) for r in g.lower(x).comms()] == logs[0]


# --- ranks that differ ------------------------------------------------------------------------------------------------


def _one_rank_reads():
    x = vfn.shard(X, vfn.make_mesh((2,), ("a",)), P("a"))

    def f(x):
        total = x.sum()
        if dist.get_rank() == 1:
            torch.zeros(()).item()
        return total + (x**2).sum()

    g = vfn.jit(f)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        values = [g(x).item() for _ in range(2)]
    return values, g.cache_info()[:3], [str(w.message).splitlines()[1].split(", at")[0] for w in said]


def test_what_one_rank_cannot_record_runs_as_written_on_all(gloo):
    (values, info, said), (other_values, other_info, other_said) = gloo(2, _one_rank_reads)
    assert values == other_values == [(X.sum() + (X**2).sum()).item()] * 2
    assert info == other_info == (0, 0, 2)
    assert said == ["  * on rank 1 a value is read in Python"]
    assert other_said == ["  * a value is read in Python"]


def _other_collectives(how):
    mesh = vfn.make_mesh((2,), ("a",))
    x = vfn.shard(X, mesh, P("a"))

    def f(x):
        if how == "raise" and dist.get_rank() == 1:
            x.add_(1)
        return vfn.with_sharding(x * 2, P() if dist.get_rank() == 0 and how == "differ" else P(None, "a"))

    passes = vfn.plan.PASSES[dist.get_rank() :] if how == "passes" else None
    try:
        vfn.jit(f, passes=passes)(x)
    except vfn.errors.VfnError as error:
        return type(error).__name__, str(error).splitlines()[:3]


def test_ranks_that_record_other_collectives_raise_on_all(gloo):
    here, there = gloo(2, _other_collectives, "differ")
    assert here == there
    name, text = here
    assert name == "DivergenceError"
    assert text[0] == "jit: ranks recorded different collectives for f; the first that differs is number 1"
    assert text[1].startswith(f"  * rank 0: all_gather over a of f32, at {__file__}")
    assert text[2].startswith(f"  * rank 1: all_to_all over a of f32, at {__file__}")
    here, there = gloo(2, _other_collectives, "raise")
    assert here[0] == "RecordError"
    assert here[1][0] == "jit: recording f raised on rank 1, and not here"
    assert there[0] == "InPlaceError"
    here, there = gloo(2, _other_collectives, "passes")
    count = len(vfn.plan.PASSES)
    assert here == there
    assert here[1] == [
        "jit: ranks improve f by different passes",
        f"  * rank 0: {count} passes",
        f"  * rank 1: {count - 1} passes",
    ]


def _told_of(*counts):
    """How many bytes a rank tells the others of recordings with so many collectives."""
    mesh, told = vfn.make_mesh((2,), ("a",)), []
    communicator = communicator_of(mesh)
    everyone = communicator.everyone
    communicator.everyone = lambda mine, why: told.append(len(pickle.dumps(mine))) or everyone(mine, why)
    try:
        for count in counts:
            xs = [vfn.shard(torch.arange(2.0) + i, mesh, P("a")) for i in range(count)]
            vfn.jit(lambda xs: [vfn.with_sharding(x.sin(), P()) for x in xs], passes=())(xs)
    finally:
        del communicator.everyone
    return told


def test_what_ranks_tell_of_a_recording_does_not_grow_with_its_collectives(gloo):
    few, many = gloo(2, _told_of, 2, 30)[0]
    assert few == many


def _written_and_forgotten():
    """The ranks with rows write into what the collective gave them, the one without any into a copy."""
    mesh = vfn.make_mesh((3,), ("a",))

    def f(x, y):
        v = vfn.with_sharding(x * x, P(None, "a"))
        v.copy_(y)
        return x + y

    x, y = torch.arange(24.0).view(4, 6), torch.ones(4, 6)
    given, g = [vfn.shard(x, mesh, P("a")), vfn.shard(y, mesh, P())], vfn.jit(f)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(vfn.unshard(g(*given)), f(x, y))
    return [r.op for r in g.lower(*given).comms()]


def test_what_is_written_and_not_read_is_left_out_on_all_ranks(gloo):
    assert gloo(3, _written_and_forgotten) == [[]] * 3


def _gathered_along_two_axes():
    """Of 5 rows the first three ranks hold one each, and pad nothing; of the others one holds none."""
    mesh = vfn.make_mesh((2, 3), ("a", "b"))
    g = vfn.jit(lambda x: vfn.with_sharding(vfn.with_sharding(x, P("a")), P()) * 2)
    found = []
    for n in (5, 6):
        x = torch.arange(4.0 * n).view(n, 4)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            given = vfn.shard(x, mesh, P(("a", "b")))
            assert torch.equal(vfn.unshard(g(given)), x * 2)
        found.append([r.axes for r in g.lower(given).comms()])
    return found


def test_gathers_of_padded_blocks_are_not_merged_on_some_ranks(gloo):
    assert gloo(6, _gathered_along_two_axes) == [[[("b",), ("a",)], [("a", "b")]]] * 6


def _needed_on_one_rank():
    """The first row is gathered on all ranks, and the one that holds it writes it."""
    mesh = vfn.make_mesh((3,), ("a",))

    def f(x):
        v = torch.zeros_like(x)
        v.narrow(0, 0, 1).copy_(x[1:2])
        return v * 2

    x = torch.arange(1.0, 13.0).view(6, 2)
    given, g = vfn.shard(x, mesh, P("a")), vfn.jit(f)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(vfn.unshard(g(given)), f(x))
    return [r.op for r in g.lower(given).comms()], g.cache_info()[:2]


def test_what_one_rank_needs_stays_on_all(gloo):
    first, *others = gloo(3, _needed_on_one_rank)
    assert first[1] == (0, 1)
    assert others == [first] * 2


def _written_beside_a_padded_block(how):
    """Ranks 0 and 1 gather a part of `v` as it lies in memory that is written, rank 2 has to pad a copy."""
    mesh = vfn.make_mesh((3,), ("a",))

    def f(x, y):
        v = x * 1.0
        v.t().add_(1.0)
        return v[:, -2:] * 1.0, y[:, -2:] * 1.0

    def one_column(x, y):
        v = x * 1.0
        v[:, 0] = 1.0  # which rank 0 has
        return v[:, -2:] * 1.0, y[:, -2:] * 1.0

    def by_rank(graph):
        if how == "raises" and dist.get_rank() == 1:
            raise ZeroDivisionError("in a pass")
        return buckets(graph) if dist.get_rank() == 1 else graph

    x, y = torch.arange(25.0).view(5, 5), torch.arange(42.0).view(6, 7)
    if how == "planted":
        f = lambda x, y: (x[:, -2:] * 2.0, y[:, -2:] * 1.0)
    f = one_column if how == "written on one rank" else f
    g = vfn.jit(f) if how.startswith("written") else vfn.jit(f, passes=(once, by_rank, scatter))
    given = [vfn.shard(z, mesh, P(None, "a")) for z in (x, y)]

    def looked_at(*_):
        raise ZeroDivisionError("where ranks compare")

    with warnings.catch_warnings(record=True) as said, pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        if how == "before a pass" and dist.get_rank() == 1:
            patch.setattr(sys.modules[vfn.jit.__module__], "brought", looked_at)
        try:
            for _ in range(2):
                assert all(map(torch.equal, map(vfn.unshard, g(*given)), f(x, y)))
        except (vfn.errors.VfnError, ZeroDivisionError) as error:
            return type(error).__name__, str(error)
    kinds = [(r.op, r.bytes) for r in g.lower(*given).comms()]
    return kinds, [str(w.message) for w in said], g.cache_info()[:2]


@pytest.mark.parametrize("how", ["written", "written on one rank"])
def test_no_rank_looks_at_how_its_own_block_lies(gloo, how):
    """The ranks abort where they gather other sizes."""
    assert (
        gloo(3, _written_beside_a_padded_block, how) == [([("all_gather", 120), ("all_gather", 216)], [], (1, 1))] * 3
    )


def test_a_pass_that_decides_by_rank_is_left_out_on_all_ranks(gloo):
    found = gloo(3, _written_beside_a_padded_block, "planted")
    for kinds, (said,), info in found:
        assert kinds == [("all_gather", 120), ("all_gather", 216)]
        assert info == (1, 1)
        first, *rows = said.splitlines()
        assert first == (
            "jit: after the pass `by_rank` the collectives of <lambda> would differ between ranks, so the plan is "
            "made without this pass: its values are right, it may be slower"
        )
        why = f"slice needs dim 1 whole: f32[5,5@a], at {__file__}"
        assert rows[0].startswith(f"  * number 1 on rank 0: all_gather over a of f32[5,2], {why}")
        assert rows[1].startswith(f"  * number 1 on rank 1: all_gather over a of f32[28], 2 together: {why}")
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(("how", "text"), [("raises", "in a pass"), ("before a pass", "where ranks compare")])
def test_what_raises_on_one_rank_raises_on_all(gloo, how, text):
    found = gloo(3, _written_beside_a_padded_block, how)
    assert found[1] == ("ZeroDivisionError", text)
    assert found[0] == found[2] == ("RecordError", f"jit: recording f raised on rank 1, and not here\n  * {text}")


def _alone_raises(cases):
    """On each rank what each case raises, and whether the ranks work on: f(a plain tensor, or an array) raises on rank 1."""
    mesh, rank, said = vfn.make_mesh((2,), ("a",)), dist.get_rank(), []
    sums = lambda x: vfn.shard_map(lambda x: vfn.psum(x.sum(), "a"), mesh=mesh, in_specs=P("a"), out_specs=P())(x)
    for case in cases:
        when, kind, given = case.split()

        def f(x):
            y = sums(x) if when == "late" else 0
            if rank == 1:
                raise {"own": ZeroDivisionError, "ours": vfn.errors.SpecError}[kind]("mine")
            return sums(x) + y

        x = X if given == "plain" else vfn.shard(X, mesh, P("a"))
        try:
            said.append(vfn.jit(f)(x))
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}".splitlines())
        assert vfn.unshard(sums(X)) == X.sum()
    return said


def test_what_the_function_raises_on_one_rank_ends_the_call_on_all(gloo):
    """Nobody waits in a collective that this rank does not come to."""
    cases = [f"{w} {k} {x}" for w in ("early", "late") for k in ("own", "ours") for x in ("plain", "array")]
    here, there = gloo(2, _alone_raises, cases)
    for case, waiting, failing in zip(cases, here, there, strict=True):
        name = "ZeroDivisionError" if "own" in case else "SpecError"
        assert failing == [f"{name}: mine"], case
        if "ours" in case or case == "early own plain":
            text = "mine" if "ours" in case else f"{name}: mine"
            assert waiting == ["RecordError: jit: recording f raised on rank 1, and not here", f"  * {text}"], case
        else:  # it may have been recording that cannot be done: the function runs as written
            assert waiting[0] == "DivergenceError: debug: rank 1 has left while others wait for it", case
            assert "by ZeroDivisionError: mine, " in waiting[1], case


# --- how arrays lie in memory -------------------------------------------------------------------------------------------


def _steps(mesh, sizes, specs):
    """The values of three steps of momentum with donated state, and how often the step was recorded."""

    def step(p, m, x):
        g = vfn.grad(lambda p: ((torch.relu(x @ p["w"] + p["b"]) @ p["v"]) ** 2).mean())(p)
        m = {name: 0.9 * m[name] + g[name] for name in p}
        return {name: p[name] - 0.1 * m[name] for name in p}, m

    n, k = sizes
    values = {"w": torch.arange(float(n * k)).view(n, k).cos(), "b": torch.arange(float(k)), "v": torch.ones(k, 2)}
    x = torch.arange(4.0 * n).view(4, n).sin()
    p = {name: vfn.shard(value.t().clone().t(), mesh, specs[name]) for name, value in values.items()}
    m = {name: vfn.with_sharding(x * 0, specs[name]) for name, x in p.items()}
    data, fast = vfn.shard(x, mesh, P("a")), vfn.jit(step, donate_argnums=(0, 1))
    q, moment = values, {name: value * 0 for name, value in values.items()}
    for _ in range(3):
        p, m = fast(p, m, data)
        q, moment = step(q, moment, x)
    for name in q:
        torch.testing.assert_close(vfn.unshard(p[name]), q[name], rtol=1e-4, atol=1e-5)
    return fast.cache_info()[:2]


STATES = [
    {"w": P(), "b": P(), "v": P()},
    {"w": P(None, "a"), "b": P("a"), "v": P("a")},
    {"w": P("a"), "b": P(), "v": P(None, "a")},
]


@pytest.mark.parametrize("axes", [{"a": 3}, {"a": 2, "b": 2}])
@pytest.mark.parametrize("specs", STATES)
def test_a_training_loop_is_recorded_once_on_simulated_ranks(axes, specs):
    """Ranks that hold the same value may hold it once or each for itself; that makes no other plan."""
    with vfn.simulate(math.prod(axes.values())):
        assert _steps(vfn.make_mesh(tuple(axes.values()), tuple(axes)), (5, 4), specs) == (2, 1)


def _training_loops():
    mesh = vfn.make_mesh((3,), ("a",))
    return [_steps(mesh, (5, 4), specs) for specs in STATES]


def test_a_training_loop_is_recorded_once_on_real_ranks(gloo):
    """Of 4 columns or rows the last rank has none, of 5 it has one."""
    assert gloo(3, _training_loops) == [[(2, 1)] * 3] * 3


def _blocks_in_other_orders():
    """The last rank's block has width 1, and is contiguous in any order."""
    mesh = vfn.make_mesh((2,), ("a",))
    x = torch.arange(12.0).view(4, 3)
    f = lambda x: (x.t() * 2 + 1).t().sum(0)
    fast = vfn.jit(f)
    for local in (lambda b: b, lambda b: b.t().contiguous().t(), lambda b: torch.cat([b, b], 1)[:, : b.shape[1]]):
        given = vfn.shard(x, mesh, P(None, "a"))
        given._local_tensor = local(given._local_tensor)
        assert torch.equal(vfn.unshard(fast(given)), f(x))
    return fast.cache_info()[:2]


def test_the_order_of_a_block_in_memory_makes_no_other_plan(gloo):
    assert gloo(2, _blocks_in_other_orders) == [(2, 1)] * 2


def _raw_dtensors():
    mesh = vfn.make_mesh((2,), ("a",))
    x = torch.arange(16.0).view(4, 4)
    fast = vfn.jit(lambda x: x * 2 + x.sum(0))
    for spec in (P("a"), P(None, "a"), P()):
        array = vfn.shard(x, mesh, spec)
        raw = torch.distributed.tensor.DTensor.from_local(array.to_local(), mesh, array.placements)
        assert torch.equal(vfn.unshard(fast(raw)), x * 2 + x.sum(0))
    return fast.cache_info()[:2]


def test_a_dtensor_of_torch_has_a_plan_for_each_placement(gloo):
    assert gloo(2, _raw_dtensors) == [(0, 3)] * 2


def test_a_view_behind_sums_of_transposed_blocks():
    """They travel together, and each comes back contiguous, as from a process group."""

    def f(w, x):
        o = (x @ w).transpose(1, 2)
        return (o * torch.tanh(1.702 * o)).sum()

    w, x = torch.arange(24.0).view(4, 6).sin(), torch.arange(24.0).view(2, 3, 4).cos()
    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("a",))
        found = vfn.jit(vfn.grad(f))(vfn.shard(w, mesh, P("a")), vfn.shard(x, mesh, P(None, None, "a")))
        torch.testing.assert_close(vfn.unshard(found), vfn.grad(f)(w, x))


def test_a_view_of_what_was_made_beside_an_expanded_value():
    def f(a, b, x):
        return (a.expand(2, 6, 3) * b.expand(2, 6, 3) + x).view(2, 18)

    given = [torch.rand(3), torch.rand(3), torch.rand(2, 3, 6).transpose(1, 2)]
    assert torch.equal(vfn.jit(f)(*given), f(*given))


# --- arguments by name, and how they lie ------------------------------------------------------------------------------


def test_a_name_stands_for_a_place_and_a_place_for_a_name():
    for picked in (
        {"static_argnums": 1},
        {"static_argnames": "how"},
        {"static_argnums": -1},
        {"static_argnames": ["how"]},
    ):
        f = vfn.jit(lambda x, how: how(x), **picked)
        for how in (torch.sin, torch.cos, torch.sin):
            assert torch.equal(f(X, how), how(X))
            assert torch.equal(f(X, how=how), how(X))
        assert f.cache_info()[:3] == (2, 4, 0)


def test_static_arguments_by_name_alone():
    f = vfn.jit(lambda x, **how: how["f"](x) * how["s"], static_argnames=("f", "unused"))
    assert torch.equal(f(X, f=torch.sin, s=2.0), X.sin() * 2)
    assert torch.equal(f(X, f=torch.sin, s=3.0), X.sin() * 3)
    assert torch.equal(f(X, f=torch.cos, s=2.0), X.cos() * 2)
    assert f.cache_info()[:3] == (1, 2, 0)
    with pytest.raises(TransformError, match=r"f, which is static, is the list \[\]"):
        f(X, f=[], s=1.0)


@pytest.mark.parametrize("donated", [{"donate_argnums": 1}, {"donate_argnames": "w"}])
def test_what_is_donated_by_place_or_by_name_is_used_up(donated):
    f = vfn.jit(lambda x, w: w + x, **donated)
    for call in (lambda w: f(X, w), lambda w: f(X, w=w), lambda w: f(w=w, x=X)):
        w = X.clone()
        call(w)
        with pytest.raises(vfn.errors.DonationError):
            w + 1
    assert torch.equal(f(X, X.clone()), 2 * X)


def _arriving():
    mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
    x, along = vfn.shard(X, mesh, P("dp")), vfn.shard(X, mesh, P("tp")).sharding
    f = lambda t, s: {"a": t["a"] * s, "b": t["b"]}
    found = []
    with vfn.use_mesh(mesh):
        for specs in (({"a": P("tp"), "b": None}, None), ({"a": along, "b": P("dp", None)}, P())):
            jitted = vfn.jit(f, in_shardings=specs)
            for run in (jitted, jitted, lambda t, s, g=jitted: vfn.jit(lambda t: g(t, s))(t)):
                out = run({"a": X, "b": x}, 2.0)
                found.append((out["a"].spec, out["b"].spec, torch.equal(vfn.unshard(out["a"]), 2 * X)))
            with vfn.disable_jit():
                found.append((jitted({"a": X, "b": x}, 2.0)["a"].spec, P("dp"), jitted.cache_info().records == 1))
            grad = vfn.grad(lambda a, g=jitted: g({"a": a, "b": x}, 2.0)["a"].sum())(X)
            found.append((P("tp"), P("dp"), torch.equal(grad, torch.full_like(X, 2.0))))
    f = vfn.jit(lambda x, n, y: vfn.spec_of(x + n * y), in_specs=P("dp", None), static_argnames="n")
    return found, f(x, 2, X), f(X, 2, x), f(X, 2, X)  # where there is no mesh, it is one device's program


def test_plain_arguments_are_laid_out_as_they_come_in(gloo):
    with vfn.simulate(4):
        seen = _arriving()
    assert seen == ([(P("tp"), P("dp"), True)] * 10, P("dp"), P("dp"), P())
    assert gloo(4, _arriving) == [seen] * 4


def test_recordings_grow_old_at_once_but_for_some(monkeypatch):
    """Or Python, which counts what grows old in its way, would not look for garbage among what recordings have left."""
    frozen = []
    monkeypatch.setattr(gc, "get_stats", lambda: [{"collections": -7}])
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(("old", gc.isenabled())))
    monkeypatch.setattr(gc, "unfreeze", lambda: frozen.append("again"))  # not what the tests themselves have frozen
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)
    for n in range(6):
        vfn.jit(lambda x: x + 1)(torch.ones(n + 1))
    assert frozen == [("old", False), "again"] * 4
    assert gc.isenabled()


def test_what_the_user_has_frozen_stays_so(monkeypatch):
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 3)
    monkeypatch.setattr(gc, "unfreeze", lambda: pytest.fail("it was unfrozen"))
    assert vfn.jit(lambda x: x + 1)(torch.ones(2)).tolist() == [2, 2]


def test_a_plan_whose_first_replay_raises_is_kept():
    """On one rank perhaps: it must not record again, which the others do not."""
    f = vfn.jit(lambda x, i: x[i] * 2)
    for _ in range(2):
        with pytest.raises(IndexError):
            f(torch.zeros(2), torch.tensor([5]))
    assert f.cache_info().records == 1
    assert f(torch.ones(2), torch.tensor([1])) == 2
    assert f.cache_info().records == 1
