"""Modules as functions: equal to the module itself, to the same draws written out by hand, and on every mesh."""

import copy
import math
import threading
from typing import NamedTuple

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import vescale_fn as vfn
from vescale_fn import P, errors
from vescale_fn.nn.modules.keyed_draws import DRAWS

KEY = vfn.random.key(7)


def numbers(*shape, dtype=torch.float64):
    return torch.sin(torch.arange(math.prod(shape), dtype=dtype) * 1.7 + len(shape)).reshape(shape)


class Case(NamedTuple):
    name: str
    make: object
    shapes: tuple
    state: bool = False


class Tied(nn.Module):
    """One matrix at two places, one layer at two, and functions that draw."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.layers.append(self.layers[0])
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.arange(1.0, 7.0))
        self.nothing = None

    def forward(self, x):
        h = self.embed.weight[:4] * x.mean() * self.scale
        for layer in self.layers:
            h = F.dropout(torch.tanh(layer(h)), 0.3, self.training)
        return self.head(h)


class Hooked(nn.Module):
    """A hook that closes over the module, one that is a method of it, and an attribute that a call sets."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.seen = None
        self.kept = [self.second]  # no child: a list
        self.first.register_forward_hook(lambda module, args, out: out + self.second.bias)
        self.second.register_forward_pre_hook(self.before)

    def before(self, module, args):
        return (args[0] * self.first.weight.sum(),)

    def forward(self, x):
        self.seen = x
        return self.kept[0](self.first(x))


class Sometimes(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.drop = nn.Dropout(0.4)

    def inside(self, x):
        return self.drop(torch.sigmoid(self.layer(self.drop(x))))

    def forward(self, x):
        return checkpoint(self.inside, self.drop(x), use_reentrant=False).sin()


class Always(Sometimes):
    def forward(self, x):
        return self.inside(self.drop(x)).sin()


def normed():
    return parametrizations.weight_norm(nn.Linear(6, 4))


def spectral():
    return parametrizations.spectral_norm(nn.Linear(6, 4))


def batch_normed():
    return nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Dropout1d(0.3))


def convolutions():
    """Weights whose channels lie last, so that what kernels give lies so as well, which not all kernels take."""
    layers = [
        nn.Conv2d(3, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.SiLU(),
        nn.Conv2d(4, 4, 3, padding=1, groups=4),
        nn.MaxPool2d(2),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(16, 3),
    ]
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


CASES = [
    Case("mlp", lambda: nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.4), nn.Linear(8, 4)), ((4, 6),)),
    Case("tied", Tied, ((4, 6),)),
    Case("hooked", Hooked, ((4, 6),)),
    Case("checkpointed", Sometimes, ((4, 6),)),
    Case("weight_norm", normed, ((4, 6),)),
    Case("spectral_norm", spectral, ((4, 6),), True),
    Case("batch_norm", batch_normed, ((4, 3, 5),), True),
    Case("lstm", lambda: nn.LSTM(3, 2, 2, dropout=0.3, bidirectional=True, batch_first=True), ((4, 2, 3),)),
    Case("gru", lambda: nn.GRU(3, 2, 2, dropout=0.3), ((2, 4, 3),)),
    Case("attention", lambda: nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True), ((4, 3, 8),) * 3),
    Case("encoder", lambda: nn.TransformerEncoderLayer(8, 2, 12, 0.2, batch_first=True), ((4, 3, 8),)),
    Case("convolutions", convolutions, ((4, 3, 4, 4),)),
]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def made(case):
    torch.manual_seed(3)
    module = case.make().double()
    return module, tuple(numbers(*shape) for shape in case.shapes)


def everything(module):
    """All that there is to be seen of a module: attributes and tensors, by identity and by value."""
    seen = {}
    for name, m in module.named_modules():
        for key, value in vars(m).items():
            if isinstance(value, dict):
                seen |= {
                    (name, key, k): (id(v), v.clone() if isinstance(v, torch.Tensor) else None)
                    for k, v in value.items()
                }
            else:
                seen[name, key] = (id(value), None)
    return seen


def same_everything(a, b):
    return a.keys() == b.keys() and all(
        a[k][0] == b[k][0] and (a[k][1] is None or torch.equal(a[k][1], b[k][1])) for k in a
    )


def total(out):
    return sum(
        x.square().sum() for x in optree.tree_leaves(out) if isinstance(x, torch.Tensor) and x.is_floating_point()
    )


def first_of(case, out):
    return out[0] if case.state else out


# --- one device -------------------------------------------------------------------------------------------------------


@each_case
def test_a_module_gives_what_it_gives(case):
    module, args = made(case)
    module.eval()
    f, params, *state = vfn.module_function(module, state=case.state)
    before = everything(module)
    value, gradient = vfn.value_and_grad(lambda params: total(first_of(case, f(params, *state, *args))))(params)
    assert same_everything(before, everything(module))
    want = total(module(*args))
    want.backward()
    assert torch.equal(value, want)
    named = f.state_dict(gradient, *state)
    for name, p in module.named_parameters(remove_duplicate=False):
        assert torch.equal(named[name], p.grad), name


@each_case
def test_a_mesh_changes_nothing(case):
    module, args = made(case)
    f, params, *state = vfn.module_function(module, state=case.state)

    def loss(params, state, args, key):
        out = f(params, *state, *args, key=key)
        return total(first_of(case, out)), out

    step = vfn.value_and_grad(loss, has_aux=True)
    (want, out), gradient = step(params, state, args, KEY)
    trains = case.name not in ("hooked", "weight_norm")
    assert trains is not torch.equal(want, total(module.eval()(*args)))
    split = lambda x: P("dp") if x.ndim and x.shape[0] % 2 == 0 else P()
    batch = P(None, "dp") if case.name == "gru" else P("dp")
    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("dp",))
        held = vfn.shard(params, mesh, optree.tree_map(split, params))
        given = held, vfn.shard(state, mesh, P()), vfn.shard(args, mesh, batch), KEY
        for run in (step,) if case.name in ("lstm", "gru") else (step, vfn.jit(step)):  # a plan of theirs is long
            got = vfn.unshard(run(*given))
            torch.testing.assert_close(got, ((want, out), gradient), rtol=1e-11, atol=1e-12)
        assert optree.tree_map(vfn.spec_of, step(*given)[1]) == optree.tree_map(vfn.spec_of, held)


@each_case
def test_transforms(case):
    module, args = made(case)
    f, params, *state = vfn.module_function(module, state=case.state)
    loss = lambda params, key: total(first_of(case, f(params, *state, *args, key=key)))
    want = vfn.grad(loss)(params, KEY)
    same = lambda got, want: torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)
    same(vfn.grad(vfn.remat(loss))(params, KEY), want)
    leaves, treedef = optree.tree_flatten(params)
    if case.name != "checkpointed":  # torch.func takes no checkpoint
        of_leaves = lambda leaves, key: loss(optree.tree_unflatten(treedef, leaves), key)
        same(list(torch.func.grad(of_leaves)(leaves, KEY)), optree.tree_leaves(want))
        direction = optree.tree_map(torch.cos, params)
        if case.name not in (
            "weight_norm",
            "spectral_norm",
            "convolutions",
        ):  # torch has no such derivatives of what they call
            slope = sum((g * d).sum() for g, d in zip(optree.tree_leaves(want), map(torch.cos, leaves)))
            same(vfn.jvp(lambda params: loss(params, KEY), (params,), (direction,))[1], slope)
    if case.name not in ("checkpointed", "batch_norm", "spectral_norm", "lstm", "gru"):  # torch has no batched ones
        keys = vfn.random.split(KEY, 3)
        same(vfn.vmap(loss, in_axes=(None, 0))(params, keys), torch.stack([loss(params, key) for key in keys]))


# --- parameters, names ------------------------------------------------------------------------------------------------


def test_the_tree_follows_the_module():
    _, params = vfn.module_function(made(CASES[1])[0])
    assert optree.tree_map(lambda x: tuple(x.shape), params) == {
        "embed": {"weight": (9, 6)},
        "layers": [{"weight": (6, 6), "bias": (6,)}, {"weight": (6, 6), "bias": (6,)}, {}],
    }
    rules = [("^embed", P("tp")), (r"^layers\.0\.weight", P(None, "tp")), (r"^layers\.\d\.bias", P("tp")), ("", P())]
    assert vfn.spec_from_rules(params, rules)["layers"][0] == {"weight": P(None, "tp"), "bias": P("tp")}
    _, params = vfn.module_function(nn.Sequential(nn.ReLU(), nn.Linear(2, 3)))
    assert [list(part) for part in params] == [[], ["weight", "bias"]]


def test_tied_weights_are_one_leaf_under_all_their_names():
    module = made(CASES[1])[0]
    f, params = vfn.module_function(module)
    more = optree.tree_map(lambda x: x + 1, params)
    named = f.state_dict(more)
    assert named.keys() == module.state_dict().keys()
    assert named["head.weight"] is named["embed.weight"]
    assert named["layers.2.bias"] is named["layers.0.bias"]
    module.load_state_dict(named)
    torch.testing.assert_close(vfn.module_function(module)[1], more, rtol=0, atol=0)
    del named["embed.weight"], named["layers.0.weight"]  # safetensors keeps one name of each
    torch.testing.assert_close(f.from_state_dict(named), more, rtol=0, atol=0)


def test_a_state_dict_that_does_not_fit():
    f, _ = vfn.module_function(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))
    with pytest.raises(errors.SpecError) as error:
        f.from_state_dict({"0.weight": torch.ones(3, 3), "0.bias": torch.ones(3), "1.weigth": torch.ones(1, 3)})
    assert str(error.value) == (
        "Sequential.from_state_dict: the state_dict is not of this module\n"
        "  * '0.weight' is f32[3,3], but params[0]['weight'] is f32[3,2]\n"
        "  * it lacks '1.bias', for params[1]['bias']; did you mean '0.bias'?\n"
        "  * it lacks '1.weight', for params[1]['weight']; did you mean '1.weigth'?\n"
        "  * it has '1.weigth' besides, which the module does not know"
    )


def test_parameters_share_memory_with_the_module_and_the_function_keeps_none():
    module = nn.Linear(2, 3)
    f, params = vfn.module_function(module)
    assert params["weight"].data_ptr() == module.weight.data_ptr()
    assert not params["weight"].requires_grad
    assert all(p.is_meta for p in f._template.root.parameters())
    module.weight.data.zero_()
    module.eval()
    assert params["weight"].abs().max() == 0


def test_another_tree_of_parameters():
    f, params = vfn.module_function(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))
    with pytest.raises(errors.SpecError) as error:
        f([params[0], {"weight": params[1]["weight"]}], torch.ones(1, 2))
    assert "params[1] lacks 'bias'" in str(error.value)
    with pytest.raises(errors.TransformError) as error:
        f([params[0], {"weight": params[1]["weight"], "bias": 0.5}], torch.ones(1, 2))
    assert str(error.value) == (
        "Sequential: the leaves of params must be tensors\n  * params[1]['bias'] is the float 0.5"
    )


def test_frozen_parameters_get_zeros():
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    module[0].requires_grad_(False)
    f, params = vfn.module_function(module)
    assert f.trainable == [{"weight": False, "bias": False}, {"weight": True, "bias": True}]
    gradient = vfn.grad(lambda params: f(params, torch.ones(4, 2)).sum())(params)
    assert gradient[0]["weight"].abs().max() == 0
    assert torch.equal(gradient[1]["bias"], torch.tensor([4.0]))


@pytest.mark.parametrize("case", ["class", "function", "lazy", "scripted", "locked"])
def test_what_is_no_module(case):
    class Locked(nn.Module):
        def __init__(self):
            super().__init__()
            self.lock = threading.Lock()

    given, message = {
        "class": (
            nn.Linear,
            "module_function: module must be a torch.nn.Module, but it is the class Linear\n"
            "  Instead: Linear(...), an object of the class",
        ),
        "function": (F.relu, "module_function: module must be a torch.nn.Module, but it is the function relu"),
        "lazy": (
            nn.LazyLinear(3),
            "module_function: a lazy module has no shapes yet\n  * weight, bias\n  Instead: "
            "module(x) once, with an input of the right shape, then vfn.module_function(module)",
        ),
        "scripted": (
            torch.jit.script(nn.ReLU()),
            "module_function: a scripted module cannot be run with other parameters\n"
            "  Instead: the module that was scripted",
        ),
        "locked": (
            Locked(),
            "module_function: a Locked cannot be copied\n  * TypeError: cannot pickle '_thread.lock' object\n"
            "  Instead: a module for which copy.deepcopy(module) works",
        ),
    }[case]
    with pytest.raises(errors.TransformError) as error:
        vfn.module_function(given)
    assert str(error.value) == message


# --- buffers ----------------------------------------------------------------------------------------------------------


def test_a_buffer_that_changes_is_state():
    module, (x,) = made(CASES[6])
    f, params, state = vfn.module_function(module, state=True)
    assert sorted(state[1]) == ["num_batches_tracked", "running_mean", "running_var"]
    before = copy.deepcopy(state)
    (_, new) = f(params, state, x, key=KEY)
    _, newer = f(params, new, x + 1, key=KEY)
    torch.testing.assert_close(state, before, rtol=0, atol=0)
    reference = copy.deepcopy(module)
    reference[3].eval()
    reference(x), reference(x + 1)
    assert torch.equal(newer[1]["running_mean"], reference[1].running_mean)
    assert torch.equal(newer[1]["running_var"], reference[1].running_var)
    assert newer[1]["num_batches_tracked"] == 2
    module.load_state_dict(f.state_dict(params, newer))
    assert torch.equal(module[1].running_var, reference[1].running_var)
    params, state = f.from_state_dict(reference.state_dict())
    assert state[1]["num_batches_tracked"] == 2


def test_a_buffer_that_changes_and_is_no_state_raises_before_it_changes():
    module, (x,) = made(CASES[6])
    f, params = vfn.module_function(module)
    before = everything(module)
    with pytest.raises(errors.InPlaceError) as error:
        f(params, x, key=KEY)
    assert str(error.value).splitlines()[0] == (
        "Sequential: a call changes the buffer '1.num_batches_tracked', which is a constant of the function: "
        "in BatchNorm1d '1'"
    )
    assert "Instead: f, params, state = vfn.module_function(module, state=True), then out, state" in str(error.value)
    assert same_everything(before, everything(module))
    assert f(params, x, train=False).shape == (4, 4, 3)
    f, params, state = vfn.module_function(module, state="num_batches")
    with pytest.raises(errors.InPlaceError, match="the buffer '1.running_mean'"):
        f(params, state, x, key=KEY)
    f, params, state = vfn.module_function(module, state="running|num")
    f(params, state, x, key=KEY)


def test_writes_that_no_mode_sees_raise_as_well():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(2))

        def forward(self, x):
            self.count = self.count + 1
            return x

    f, params = vfn.module_function(Counts())
    with pytest.raises(errors.InPlaceError, match="a call changes the buffer 'count', and the function is pure"):
        f(params, torch.ones(1))
    f, params, state = vfn.module_function(Counts(), state=True)
    assert f(params, state, torch.ones(1))[1]["count"].tolist() == [1, 1]


def test_a_parameter_is_not_written():
    module = nn.Embedding(5, 3, max_norm=0.1)
    f, params = vfn.module_function(module)
    with pytest.raises(errors.InPlaceError, match=r"the parameter params\['weight'\]"):
        f(params, torch.arange(3))


# --- draws ------------------------------------------------------------------------------------------------------------


def test_dropout_is_that_of_the_key_by_order():
    module, (x,) = made(CASES[0])
    f, params = vfn.module_function(module)

    def by_hand(params, x):
        h = F.gelu(x @ params[0]["weight"].T + params[0]["bias"])
        h = vfn.random.dropout(vfn.random.fold_in(KEY, 0), h, 0.4)
        return h @ params[3]["weight"].T + params[3]["bias"]

    torch.testing.assert_close(f(params, x, key=KEY), by_hand(params, x), rtol=1e-12, atol=1e-12)
    assert torch.equal(f(params, x, train=False), module.eval()(x))


def test_what_a_checkpoint_computes_again_draws_the_same():
    (again, (x,)), (kept, _) = made(CASES[3]), made(CASES[3]._replace(make=Always))
    gradients = []
    for module in again, kept:
        f, params = vfn.module_function(module)
        gradients.append(vfn.grad(lambda params, f=f: total(f(params, x, key=KEY)))(params))
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_a_draw_without_a_key():
    module = nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5))})
    module.forward = lambda x: module["mlp"](x)
    f, params = vfn.module_function(module)
    with pytest.raises(errors.RandomError) as error:
        f(params, torch.ones(2, 6))
    first, line, fix = str(error.value).splitlines()
    assert first == "ModuleDict: the module draws random numbers, and there is no key: in Dropout 'mlp.1'"
    assert line.startswith("  * torch's dropout, at ")
    assert fix == (
        "  Instead: f(params, ..., key=key); or module.eval() before module_function, train=False, where only training draws"
    )
    with pytest.raises(errors.RandomError, match="key must be one key, but it is the int 3"):
        f(params, torch.ones(2, 6), key=3)
    with pytest.raises(errors.TransformError, match="train must be True, False or None, but it is 1"):
        f(params, torch.ones(2, 6), train=1)


class Draws(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.draw = draw
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.draw(x * self.weight)


A = 4000
DRAWN = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout_": lambda x: F.dropout(x, 0.3, inplace=True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, True),
    "alpha_dropout_": lambda x: F.alpha_dropout(x, 0.3, True, inplace=True),
    "feature_dropout": lambda x: F.dropout1d(x[..., None], 0.3),
    "feature_dropout_": lambda x: F.dropout1d(x[..., None], 0.3, inplace=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x[..., None], 0.3, True),
    "feature_alpha_dropout_": lambda x: F.feature_alpha_dropout(x[..., None], 0.3, True, inplace=True),
    "rrelu": lambda x: F.rrelu(-x, 0.1, 0.5, True),
    "rrelu_": lambda x: F.rrelu(-x, 0.1, 0.5, True, inplace=True),
    "rand": lambda x: x * torch.rand(4, A, dtype=x.dtype),
    "randn": lambda x: x * torch.randn((4, A), dtype=x.dtype) + 1,
    "rand_like": torch.rand_like,
    "randn_like": lambda x: torch.randn_like(x) + 1,
    "randint": lambda x: x * torch.randint(2, 9, (4, A)),
    "randint_like": lambda x: torch.randint_like(x, 2, 9),
    "randperm": lambda x: x[:, torch.randperm(A)][:, :500],
    "random_": lambda x: x.detach().clone().random_(2, 9),
    "bernoulli": lambda x: torch.bernoulli(x / 4),
    "bernoulli_": lambda x: x.detach().clone().bernoulli_(0.3),
    "normal": lambda x: torch.normal(x, 0.5),
    "normal_": lambda x: x.detach().clone().normal_(1, 2),
    "uniform_": lambda x: x.detach().clone().uniform_(-1, 3),
    "exponential_": lambda x: x.detach().clone().exponential_(2),
    "log_normal_": lambda x: x.detach().clone().log_normal_(0.2, 0.3),
    "geometric_": lambda x: x.detach().clone().geometric_(0.4),
    "cauchy_": lambda x: x.detach().clone().cauchy_(1, 0.1).clamp(0.5, 1.5),
    "multinomial": lambda x: torch.multinomial(x[:, :5].contiguous(), 1000, True),
    "poisson": torch.poisson,
    "binomial": lambda x: torch.binomial(torch.full_like(x, 5), x / 4),
    "_standard_gamma": torch._standard_gamma,
}
WITHOUT_A_MODULE = {"trunc_normal_"}  # an initialiser: see test_init
ELSEWHERE = {"scaled_dot_product_attention", "lstm", "gru", "rnn_tanh", "rnn_relu"}  # see CASES


def test_every_draw_is_tested():
    assert DRAWN.keys() | WITHOUT_A_MODULE | ELSEWHERE == DRAWS.keys()


@pytest.mark.parametrize("name", DRAWN)
def test_draws(name):
    f, params = vfn.module_function(Draws(DRAWN[name]).double())
    x = torch.linspace(0.5, 3.5, 4 * A, dtype=torch.float64).view(4, A)
    got = f(params, x, key=KEY)
    torch.manual_seed(1)
    want = DRAWN[name](x.clone())
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    spread = want.double().std() / math.sqrt(want.numel() / (1 if want.ndim == 2 else want.shape[-1]))
    assert (got.double().mean() - want.double().mean()).abs() < 8 * spread
    assert (got.double().std() / want.double().std() - 1).abs() < 0.1
    assert not torch.equal(got, f(params, x, key=vfn.random.key(8)))
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
        spec = P("dp") if name in ("multinomial", "randperm") else P("dp", "tp")
        on_mesh = vfn.unshard(f(vfn.shard(params, mesh, P()), vfn.shard(x, mesh, spec), key=KEY))
    torch.testing.assert_close(on_mesh, got, rtol=1e-15 if name in ("_standard_gamma",) else 0, atol=0)


def test_attention_with_dropout_is_the_formula():
    q, k, v = numbers(2, 4, 3, 6), numbers(2, 2, 5, 6) + 1, numbers(2, 2, 5, 6) - 1
    allowed = numbers(3, 5) > -0.3
    allowed[1] = False  # a row that may look at nothing
    for options in ({"attn_mask": allowed}, {"attn_mask": numbers(3, 5)}, {"is_causal": True}, {"scale": 0.3}):
        attend = lambda q, rate=0.0: F.scaled_dot_product_attention(q, k, v, dropout_p=rate, enable_gqa=True, **options)
        f, params = vfn.module_function(Draws(attend).double())
        tiny = Draws(lambda q: attend(q, 1e-12)).double()  # by the formula, and nothing is dropped
        out = vfn.module_function(tiny)[0](params, q, key=KEY)
        torch.testing.assert_close(out, f(params, q), rtol=1e-10, atol=1e-12)


def test_what_no_key_reaches_raises():
    class Hidden(nn.Module):
        def forward(self, x):
            with torch._C.DisableTorchFunction():
                return x + torch.rand(2)

    f, params = vfn.module_function(Hidden())
    with pytest.raises(errors.RandomError, match="draws from torch's global generator by code that no key reaches"):
        f(params, torch.ones(2))
    given = Draws(lambda x: torch.rand(2, generator=torch.Generator()))
    f, params = vfn.module_function(given)
    with pytest.raises(errors.RandomError, match="no generator=: the draw then comes from the key of the call"):
        f(params, torch.ones(2), key=KEY)


# --- bodies, processes ------------------------------------------------------------------------------------------------


def test_in_a_body():
    module, (x,) = made(CASES[0])
    f, params = vfn.module_function(module.eval())
    loss = lambda params, x: f(params, x).square().mean()
    want = vfn.grad(loss)(params, x)
    with vfn.simulate(4), vfn.use_mesh(vfn.make_mesh((4,), ("dp",))):
        body = vfn.shard_map(lambda p, x: vfn.pmean(loss(p, x), "dp"), in_specs=(P(), P("dp")), out_specs=P())
        torch.testing.assert_close(vfn.unshard(vfn.grad(body)(params, x)), want, rtol=1e-12, atol=1e-12)


def train_on_ranks():
    module, (x,) = made(CASES[1])
    f, params = vfn.module_function(module)
    mesh = vfn.make_mesh((2, 1), ("dp", "tp"))
    held = vfn.shard(params, mesh, vfn.spec_from_rules(params, [("layers.*weight", P("dp")), ("", P())]))
    step = vfn.jit(vfn.grad(lambda params, x, key: total(f(params, x, key=key))))
    return vfn.unshard(step(held, vfn.shard(x, mesh, P("dp")), KEY))


def test_on_processes(gloo):
    module, (x,) = made(CASES[1])
    f, params = vfn.module_function(module)
    want = vfn.grad(lambda params: total(f(params, x, key=KEY)))(params)
    for got in gloo(2, train_on_ranks):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


def test_a_hook_that_a_call_registers_is_gone_after_it():
    """As those of transformers do where hidden states are asked for: each call gave one more than the last."""

    class Hooking(nn.Sequential):
        def forward(self, x):
            self[0].register_forward_hook(lambda module, args, out: out + 1)
            self[0].register_forward_pre_hook(lambda module, args, kwargs: ((args[0] * 2,), kwargs), with_kwargs=True)
            return super().forward(x)

    f, params = vfn.module_function(Hooking(nn.Identity()))
    assert [f(params, torch.ones(1)).item() for _ in range(3)] == [3.0] * 3
