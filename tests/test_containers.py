"""Trees: which classes are nodes of them, and that no public function lets a leaf that holds tensors pass through."""

import collections
import dataclasses
import enum
import functools
import operator
import types

import numpy as np
import optree
import pytest
import torch
import torch.utils._pytree as torch_pytree

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn.errors import CheckpointError, CollectiveError, SpecError, TreeError


@dataclasses.dataclass
class Plain:
    w: torch.Tensor
    name: str = "plain"


class Holder:
    def __init__(self, w):
        self.layers, self.size = [{"w": w}], 3


class Slots:
    __slots__ = ("w",)

    def __init__(self, w):
        self.w = w


class Foreign:
    """An array of another library."""

    shape = (4,)

    def __init__(self, w):
        self._w = w

    def __dlpack__(self, **_):
        return self._w.__dlpack__()

    def __dlpack_device__(self):
        return self._w.__dlpack_device__()


class OfNamespace(Plain):
    pass


optree.register_pytree_node(
    OfNamespace, lambda x: ((x.w,), None, ("w",)), lambda _, c: OfNamespace(*c), namespace="tests"
)
CONTAINERS = {
    "dataclass": Plain,
    "object": Holder,
    "slots": Slots,
    "namespace": lambda w: types.SimpleNamespace(inner=(w,)),
    "of an optree namespace": OfNamespace,
    "mapping": lambda w: collections.UserDict(w=w),
    "set": lambda w: {w},
    "generator": lambda w: (x for x in [w]),
    "view": lambda w: {"w": w}.values(),
    "partial": lambda w: functools.partial(torch.add, w),
    "foreign": Foreign,
    "masked": lambda w: np.ma.MaskedArray(np.ones(4), np.zeros(4)),
}
NUMPY = {"numpy": lambda w: np.ones(4, np.float32)}
MODULE = {"module": lambda w: torch.nn.Linear(2, 2)}
W = torch.arange(4.0)


def loss(tree):
    return (tree["w"] ** 2).sum()


def step(opt):
    return lambda t, mesh: opt.update(t, opt.init({"w": W, "at": 0}), t)


def in_body(f):
    return lambda t, mesh: vfn.shard_map(lambda x: (f(t), x)[1], mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))(W)


# every public function that takes a tree, or gets one from the user's function: given {"w": W, "at": leaf}
TAKES = {
    "shard": lambda t, mesh: vfn.shard(t, mesh, P("dp")),
    "with_sharding": lambda t, mesh: vfn.with_sharding(t, P("dp"), mesh=mesh),
    "from_local": lambda t, mesh: vfn.from_local(t, mesh, P("dp")),
    "unshard": lambda t, mesh: vfn.unshard(t),
    "shard_map": lambda t, mesh: vfn.shard_map(lambda t: t["w"], mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))(t),
    "shard_map, out": lambda t, mesh: vfn.shard_map(
        lambda w: {**t, "w": w}, mesh=mesh, in_specs=P("dp"), out_specs=P("dp")
    )(W),
    "check": lambda t, mesh: vfn.check_parity(lambda t: t["w"], t, mesh=mesh),
    "check, out": lambda t, mesh: vfn.check_parity(lambda w: {**t, "w": w}, W, mesh=mesh),
    "jit": lambda t, mesh: vfn.jit(lambda t: t["w"])(t),
    "jit, out": lambda t, mesh: vfn.jit(lambda w: {**t, "w": w})(W),
    "remat": lambda t, mesh: vfn.remat(loss)({**t, "w": W.clone().requires_grad_()}),
    "remat, out": lambda t, mesh: vfn.remat(lambda w: {**t, "w": w})(W.clone().requires_grad_()),
    "eval_shape": lambda t, mesh: vfn.eval_shape(loss, t),
    "eval_shape, out": lambda t, mesh: vfn.eval_shape(lambda: t),
    "init": lambda t, mesh: vfn.init(lambda: t, spec=P(), mesh=mesh),
    "grad": lambda t, mesh: vfn.grad(loss)(t),
    "grad, aux": lambda t, mesh: vfn.grad(lambda w: ((w * w).sum(), t), has_aux=True)(W),
    "vjp": lambda t, mesh: vfn.vjp(loss, t),
    "vjp, out": lambda t, mesh: vfn.vjp(lambda w: {**t, "w": w}, W),
    "jvp": lambda t, mesh: vfn.jvp(loss, (t,), (t,)),
    "linearize": lambda t, mesh: vfn.linearize(loss, t),
    "vmap": lambda t, mesh: vfn.vmap(lambda t: t["w"])(t),
    "vmap, out": lambda t, mesh: vfn.vmap(lambda w: {**t, "w": w})(W),
    "psum": in_body(lambda t: vfn.psum(t, "dp")),
    "pcast": in_body(lambda t: vfn.pcast(t, "dp", to="varying")),
    "ppermute": in_body(lambda t: vfn.ppermute(t, "dp", [(0, 1), (1, 0)])),
    "spec_from_rules": lambda t, mesh: vfn.spec_from_rules(t, [("", P())]),
    "fsdp_specs": lambda t, mesh: vfn.fsdp_specs(t, mesh, "dp"),
    "save": lambda t, mesh: vfn.save("/proc/nowhere", t),
    "global_norm": lambda t, mesh: vfn.optim.global_norm(t),
    "apply_updates": lambda t, mesh: vfn.optim.apply_updates(t, t),
    "by_path": lambda t, mesh: vfn.optim.by_path([("", True)])(t),
    "microbatches": lambda t, mesh: vfn.optim.microbatches(lambda p, t: p, 2)(W, t),
    "accumulate": lambda t, mesh: vfn.optim.accumulate(vfn.optim.sgd(1.0), 2).init(t),
    "all_finite": lambda t, mesh: vfn.precision.all_finite(t),
    "nan_guard": lambda t, mesh: vfn.precision.nan_guard(t),
    "policy": lambda t, mesh: vfn.precision.policy("params=f32,compute=bf16").cast_to_compute(t),
    "master": lambda t, mesh: vfn.precision.master_weights(vfn.optim.sgd(1.0)).init(t),
    "scaled": lambda t, mesh: vfn.precision.loss_scaled(vfn.optim.adam(1.0)).init(t),
    "masked": lambda t, mesh: vfn.optim.masked(vfn.optim.sgd(1.0), True).init(t),
    "partition": lambda t, mesh: vfn.optim.partition({"a": vfn.optim.sgd(1.0)}, "a").init(t),
    "from_torch": lambda t, mesh: vfn.optim.from_torch(torch.optim.SGD, 1.0).init(t),
    "muon.init": lambda t, mesh: vfn.optim.muon(1.0).init({**t, "w": W.view(2, 2)}),
    **{
        f"{name}.init": lambda t, mesh, opt=opt: opt.init(t)
        for name, opt in {
            "adam": vfn.optim.adam(1.0),
            "adamw": vfn.optim.adamw(1.0),
            "lion": vfn.optim.lion(1.0),
            "adafactor": vfn.optim.adafactor(1.0),
            "ema": vfn.optim.params_ema(0.9),
        }.items()
    },
    **{
        f"{name}.update": step(opt)
        for name, opt in {
            "sgd": vfn.optim.sgd(1.0),
            "adamw": vfn.optim.adamw(1.0),
            "lion": vfn.optim.lion(1.0),
            "clip_by_value": vfn.optim.clip_by_value(1.0),
        }.items()
    },
}
OWN_ERROR = {
    "save": CheckpointError,
    "psum": (TreeError, CollectiveError),
    "pcast": (TreeError, CollectiveError),
    "ppermute": (TreeError, CollectiveError),
}
TAKE_NUMPY = {
    "shard",
    "with_sharding",
    "from_local",
    "unshard",
    "shard_map",
    "shard_map, out",
    "check",
    "check, out",
    "jit",
    "jit, out",
    "remat",
    "remat, out",
    "eval_shape",
    "grad, aux",
    "psum",
    "pcast",
    "ppermute",
    "spec_from_rules",
    "fsdp_specs",
    "save",
}
TAKE_MODULES = {"jit", "jit, out", "remat", "eval_shape"}


@pytest.fixture(scope="module")
def mesh():
    with vfn.simulate(2):
        yield vfn.make_mesh((2,), ("dp",))


@pytest.mark.parametrize("name", TAKES)
def test_a_leaf_that_holds_tensors_is_refused(name, mesh):
    """By every function, whatever the container, with its path."""
    containers = CONTAINERS | ({} if name in TAKE_NUMPY else NUMPY) | ({} if name in TAKE_MODULES else MODULE)
    passed = []
    for kind, make in containers.items():
        try:
            TAKES[name]({"w": W, "at": make(W)}, mesh)
        except OWN_ERROR.get(name, TreeError) as error:
            assert "['at']" in str(error) or name == "check, out", (kind, str(error))
        else:
            passed.append(kind)
    assert not passed


def test_every_wrong_leaf_is_named_with_the_line_to_write(mesh):
    """One message for all, one way for each kind."""
    tree = {"a": Plain(W), "b": [Foreign(W), (Holder(W), torch.nn.Linear(2, 2))], "c": CONTAINERS["mapping"](W), "n": 3}
    with pytest.raises(TreeError) as error:
        vfn.shard(tree, mesh, P("dp"))
    assert str(error.value) == (
        "shard: a leaf is a container that trees do not go into, or another library's array\n"
        "  * tree['a'] is a Plain, which is not a registered node: its .w is the tensor f32[4]\n"
        "  * tree['b'][0] is a test_containers.Foreign\n"
        "  * tree['b'][1][0] is a Holder, which is not a registered node: its .layers[0]['w'] is the tensor f32[4]\n"
        "  * tree['b'][1][1] is a Linear\n"
        "  * tree['c'] is a UserDict, which is not a registered node: its ['w'] is the tensor f32[4]\n"
        "  Instead: vfn.register_dataclass(Plain); torch.from_dlpack(x) for a Foreign; "
        "vfn.register_dataclass(Holder, data_fields=['layers'], meta_fields=['size']); "
        "f, params = vfn.module_function(module), of which params is a tree; dict(x) for a UserDict"
    )


class Model:
    def __init__(self):
        self.w, self.inner = W, Holder(W)

    def scale(self, x):
        return x * self.w

    @vfn.jit
    def jitted(self, x):
        return x * self.w * self.inner.layers[0]["w"]

    @vfn.remat
    def again(self, x):
        return x * self.w


def test_what_is_not_an_argument_may_hold_tensors():
    """The object of a method, a module and a static argument are used as what a function closes over is: also when they change."""
    x, model, linear = torch.ones(4, requires_grad=True), Model(), torch.nn.Linear(4, 4).requires_grad_(False)
    static = vfn.jit(lambda model, x: model.w * x, static_argnums=0)
    given = vfn.jit(lambda module, x: module(x))
    for _ in range(2):
        assert torch.equal(model.again(x), x * model.w)
        assert torch.equal(model.jitted(x.detach()), model.w * model.inner.layers[0]["w"])
        assert torch.equal(vfn.vmap(Model.scale, in_axes=(None, 0))(model, torch.eye(4)), torch.eye(4) * model.w)
        assert torch.equal(static(model, x.detach()), model.w)
        assert torch.equal(given(linear, x.detach()), linear(x.detach()))
        model.w, model.inner.layers[0]["w"] = model.w + 1, model.w + 2
        linear.weight.mul_(2)


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass(frozen=True)
class Config:
    width: int = 4
    names: tuple = ("a", "b")
    dtype: torch.dtype = torch.float32


STATIC = [
    3,
    2.5,
    True,
    "x",
    b"x",
    None,
    1j,
    Colour.RED,
    torch.float32,
    torch.device("cpu"),
    torch.Size((2,)),
    Config(),
    len,
    torch.relu,
    functools.partial(torch.sum, dim=0),
    np.float32(2),
    range(3),
    collections.Counter("aab"),
    Colour,
    {1, 2},
    vfn.optim.sgd(1.0),
    vfn.jit(torch.relu),
    torch.Generator(),
]


def test_static_leaves_pass_through(mesh):
    """What holds no tensors is a setting, also an object with attributes."""
    tree = {"w": W, "static": STATIC}
    out = vfn.unshard(vfn.shard(tree, mesh, P("dp")))
    assert all(map(operator.eq, out["static"], STATIC))
    seen = []
    vfn.shard_map(lambda w, *s: (seen.extend(s), w)[1], mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))(W, *STATIC)
    assert all(map(operator.eq, seen, STATIC))
    assert vfn.grad(lambda t: t["w"].sum())({"w": W, "static": STATIC[:12]})["static"] == STATIC[:12]
    hashable = tuple(x for x in STATIC if not isinstance(x, (set, collections.Counter)))
    assert torch.equal(vfn.jit(lambda w, s: w * s[0])(W, hashable), W * 3)


def test_numbers_under_a_spec_that_splits_are_refused(mesh):
    """A list of numbers is a tree of numbers: no spec splits it, and no rank would see less than the whole."""
    for call in (
        lambda x: vfn.shard(x, mesh, P("dp")),
        lambda x: vfn.with_sharding(x, P("dp"), mesh=mesh),
        lambda x: vfn.from_local(x, mesh, P("dp")),
        vfn.shard_map(lambda x: torch.tensor(sum(x)), mesh=mesh, in_specs=P("dp"), out_specs=P()),
    ):
        with pytest.raises(SpecError) as error:
            call([1.0, 2.0])
        for said in ("[1]", "the float 2.0", "has no dims", "torch.tensor(x) for a list of numbers"):
            assert said in str(error.value)
    assert vfn.shard({"x": W, "n": 3}, mesh, P("dp"))["n"] == 3
    assert vfn.shard([3], mesh, P()) == [3]


# --- classes that are registered --------------------------------------------------------------------------------------


@vfn.register_dataclass
@dataclasses.dataclass
class Layer:
    w: torch.Tensor
    b: torch.Tensor
    name: str = dataclasses.field(default="layer", metadata={"static": True})


class Both:
    """A class of the user's with a constructor of its own."""

    def __init__(self, x, y, kind):
        self.x, self.y, self.kind = x, y, kind


vfn.register_dataclass(Both, data_fields=["x", "y"], meta_fields=["kind"])


class OfTorch:
    """A node for torch's pytree alone."""

    def __init__(self, w, b, name="torch"):
        self.w, self.b, self.name = w, b, name


torch_pytree.register_pytree_node(
    OfTorch,
    lambda x: ([x.w, x.b], x.name),
    lambda c, name: OfTorch(*c, name),
    flatten_with_keys_fn=lambda x: ([(torch_pytree.GetAttrKey("w"), x.w), (torch_pytree.GetAttrKey("b"), x.b)], x.name),
)


@pytest.mark.parametrize("made", [Layer, OfTorch, lambda w, b: Both(w, b, "kind")], ids=["dataclass", "torch", "class"])
def test_registered_classes_are_nodes_everywhere(made, mesh, tmp_path):
    """As a dictionary is: the same values, gradients, plans, updates and files."""

    def parts(x):
        return (x.w, x.b) if hasattr(x, "w") else (x.x, x.y)

    def loss(x):
        w, b = parts(x)
        return (w * w * 3 + b).sum()

    whole = made(W, torch.ones(4))
    laid = vfn.shard([whole], mesh, P("dp"))[0]
    assert type(laid) is type(whole)
    assert [vfn.spec_of(x) for x in parts(laid)] == [P("dp"), P("dp")]
    for f in (vfn.grad(loss), vfn.jit(vfn.grad(loss)), lambda x: vfn.vjp(loss, x)[1](torch.ones(()))[0]):
        found = vfn.unshard(f(laid))
        assert type(found) is type(whole)
        torch.testing.assert_close(parts(found), (W * 6, torch.ones(4)), rtol=0, atol=0)
    doubled = vfn.shard_map(
        lambda x: torch_pytree.tree_map(lambda y: y * 2, x), mesh=mesh, in_specs=P("dp"), out_specs=P("dp")
    )
    torch.testing.assert_close(parts(vfn.unshard(doubled(whole))), (W * 2, torch.ones(4) * 2), rtol=0, atol=0)
    assert torch.equal(vfn.vmap(lambda x: parts(x)[0] + parts(x)[1])(whole), W + 1)
    opt = vfn.optim.sgd(1.0, momentum=0.9)
    updates, _ = opt.update(vfn.grad(loss)(laid), opt.init(laid), laid)
    torch.testing.assert_close(parts(vfn.unshard(vfn.optim.apply_updates(laid, updates))), (W - W * 6, torch.zeros(4)))
    vfn.save(tmp_path / "saved", {"x": laid})
    torch.testing.assert_close(parts(vfn.unshard(vfn.load(tmp_path / "saved", like={"x": laid})["x"])), parts(whole))
    with pytest.raises(SpecError, match=r"tree\[0\]\.(w|x) is f32\[4\]"):
        vfn.shard([whole], mesh, [P("no")])


def test_meta_fields_belong_to_the_structure():
    """A plan serves one value of them, and a prefix must have the same."""
    lengths = []
    f = vfn.jit(lambda x: (lengths.append(x.name), x.w * len(x.name))[1])
    assert torch.equal(f(Layer(W, W)), W * 5)
    assert torch.equal(f(Layer(W, W, "other one")), W * 9)
    assert torch.equal(f(Layer(W + 1, W)), (W + 1) * 5)
    assert set(lengths) == {"layer", "other one"}
    assert optree.tree_paths(Layer(1, 2)) == [("w",), ("b",)]
    assert torch_pytree.tree_leaves(Layer(1, 2)) == [1, 2]


@dataclasses.dataclass
class Fields:
    a: int
    b: int
    c: int = dataclasses.field(init=False, default=0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((3,), "it takes a class, but was given the int 3"),
        ((Holder,), "Holder is not a dataclass, so its fields are not known"),
        ((Layer,), "Layer is registered already"),
        ((Fields, ["a", "c"]), "'c' is not a field that the constructor takes"),
        ((Fields, ["a", "a"], []), "'a' is named twice\n  * the field 'b' is in neither list"),
    ],
)
def test_what_cannot_be_registered(given, said):
    with pytest.raises(TreeError) as error:
        vfn.register_dataclass(*given)
    assert said in str(error.value)


def test_shard_takes_rules_as_init_does(mesh):
    """A list of (pattern, spec) pairs; a list of specs, which are tuples of strings too, is none."""
    tree = {"w": W, "b": torch.ones(4)}
    laid = vfn.shard(tree, mesh, [("w$", P("dp")), ("", P())])
    assert [vfn.spec_of(laid[name]) for name in "wb"] == [P("dp"), P()]
    assert [vfn.spec_of(x) for x in vfn.shard([W, W], mesh, [P("dp"), P()])] == [P("dp"), P()]
    assert [vfn.spec_of(x) for x in vfn.init(lambda: [W + 1, W + 2], spec=[P("dp"), P()], mesh=mesh)] == [P("dp"), P()]


@pytest.mark.parametrize(
    "call",
    [
        lambda: vfn.optim.adamw(-1e-3),
        lambda: vfn.optim.sgd(float("nan")),
        lambda: vfn.optim.lion(-1),
        lambda: vfn.optim.muon(-1.0),
        lambda: vfn.optim.clip_by_global_norm(-1),
        lambda: vfn.optim.clip_by_value(float("nan")),
        lambda: vfn.optim.from_torch(torch.optim.SGD, -0.1),
        lambda: vfn.shard_shape((-4,), {"dp": 2}, P("dp")),
    ],
)
def test_negative_numbers_are_refused(call):
    with pytest.raises(vfn.errors.VfnError, match="must not be negative"):
        call()
