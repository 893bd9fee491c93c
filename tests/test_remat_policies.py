"""`vfn.remat` with policies: which values are kept, that no bit depends on it, and how often each op runs."""

import weakref
from collections import Counter

import pytest
import torch
from torch.nn.functional import dropout
from torch.utils._python_dispatch import TorchDispatchMode

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn.errors import TransformError

policies = vfn.remat_policies


def draw(*shape):
    return torch.linspace(-1, 1, torch.Size(shape).numel(), dtype=torch.float64).mul(7).sin().view(shape)


W = {"a": draw(8, 8), "b": draw(8, 12).cos(), "c": draw(12, 4)}
X = draw(8, 8) * 2


@pytest.fixture
def poisoned():
    """What is not computed again, and is in memory without values, is nan: who reads it tells."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


POLICIES = {
    "none": None,
    "everything": policies.everything_saveable,
    "nothing": policies.nothing_saveable,
    "dots": policies.dots_saveable,
    "dots without batch": policies.dots_with_no_batch_dims_saveable,
    "only h": policies.save_only_these_names("h"),
    "only g": policies.save_only_these_names("g"),
    "any but h": policies.save_any_names_but_these("h"),
    "anything but h": policies.save_anything_except_these_names("h"),
    "offload": policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["g"], names_which_can_be_offloaded=["h"]
    ),
    "offload dots": policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
    "both": policies.save_from_both_policies(policies.save_only_these_names("h"), policies.dots_saveable),
    "a function": lambda op, shapes, name: op in ("tanh", "all_gather") or (op == "mm" and shapes[0][1] == 12),
}


def net(w, x):
    h = vfn.name(torch.tanh(x @ w["a"]), "h")
    g = vfn.name(torch.sin(h @ w["b"]), "g")
    return torch.exp((g @ w["c"]) / 4).sum()


class Counted(TorchDispatchMode):
    """How often each op runs."""

    def __init__(self):
        super().__init__()
        self.ops = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops[func.overloadpacket.__name__] += 1
        return func(*args, **kwargs or {})


# What jax 0.10.2 has for the same function: dot_general, tanh and sin in jax.make_jaxpr(jax.grad(jax.remat(net, policy=...))).
# A named value is the op's own result here, so that "only h" needs no product again to have tanh's, which JAX needs.
COUNTS = {
    "everything": (8, 1, 1),
    "nothing": (11, 2, 2),
    "dots": (8, 2, 2),
    "only h": (10, 1, 2),  # JAX: (11, 2, 2)
    "only g": (11, 2, 1),
}


@pytest.mark.parametrize("name", COUNTS)
def test_what_runs_again(name):
    with Counted() as counted:
        vfn.grad(vfn.remat(net, policy=POLICIES[name]))(W, X)
    assert (counted.ops["mm"], counted.ops["tanh"], counted.ops["sin"]) == COUNTS[name]


# As jax 0.10.2's print_saved_residuals says it, but for "dot_general" and columns.
KEPT = {
    "nothing": [],
    "dots": ["f64[8,8] output of mm", "f64[8,12] output of mm", "f64[8,4] output of mm"],
    "only h": ["f64[8,8] named 'h'"],
    "only g": ["f64[8,12] named 'g'"],
    "any but h": ["f64[8,12] named 'g'"],
}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept(name, capsys):
    vfn.print_saved_residuals(vfn.remat(net, policy=POLICIES[name]), W, X)
    lines = capsys.readouterr().out.splitlines()
    arguments = ["f64[8,8] w['a']", "f64[8,12] w['b']", "f64[12,4] w['c']", "f64[8,8] x"]
    assert lines[:4] == [" from the argument ".join(said.split(" ")) for said in arguments]
    assert [line.split(" from ")[0] for line in lines[4:]] == KEPT[name]
    assert all(f"{__file__}:{net.__code__.co_firstlineno}"[:-1] in line for line in lines[4:])
    assert vfn.saved_residuals(net, W, X)[-1][1].startswith("output of exp from ")


def with_draws(w, x):
    h = dropout(torch.tanh(x @ w["a"]), 0.5)
    h = vfn.random.dropout(vfn.random.key(3), vfn.name(h, "h"), 0.25)
    return (dropout(h @ w["b"], 0.5) @ w["c"]).sin().sum()


def with_writes(w, x):
    h = (x @ w["a"]).mul_(3)
    h += 1
    h = vfn.name(h, "h") * 2
    h.mul_(0.5)
    return ((h @ w["b"]).sin_() @ w["c"]).exp().sum()


def with_views_and_several_results(w, x):
    h = vfn.name((x @ w["a"]).tanh().view(4, 2, 8).transpose(0, 1), "h").reshape(8, 8)
    first, second = (h @ w["b"]).split([5, 7], 1)
    top, _ = vfn.name(torch.cat([second.sin(), first.cos()], 1), "g").topk(6, 1)
    return (top @ w["c"][:6]).max(1)[0].sum() + h.var(0).sum()


@vfn.custom_vjp
def sine(x):
    return torch.sin(x)


sine.defvjp(lambda x: (torch.sin(x), torch.cos(x)), lambda cos, g: (g * cos,))


def with_rules_and_loops(w, x):
    h = vfn.remat(lambda h: vfn.name(sine(h @ w["a"]), "h").tanh(), policy=policies.save_only_these_names("h"))(x)
    h, _ = vfn.scan(lambda h, one: (sine(vfn.name(h * one, "g")), None), h @ w["b"], w["b"])
    return (h @ w["c"]).sum()


def with_a_gradient(w, x):
    g = vfn.grad(lambda w: (torch.tanh(x @ w) ** 2).sum())(w["a"])
    return (vfn.name(g.sin(), "g") @ w["b"]).sum()


PROGRAMS = [net, with_draws, with_writes, with_views_and_several_results, with_rules_and_loops, with_a_gradient]


def seeded(f, *args):
    torch.manual_seed(5)
    return f(*args)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("f", PROGRAMS)
def test_no_bit_depends_on_the_policy(f):
    wanted = seeded(vfn.value_and_grad(f), W, X)
    twice = lambda f: vfn.grad(lambda w: sum((g**2).sum() for g in vfn.grad(f)(w, X).values()))
    second = seeded(twice(f), W) if f is not with_writes else None  # which autograd refuses to differentiate twice
    for name, policy in POLICIES.items():
        again = vfn.remat(f, policy=policy)
        assert same(seeded(vfn.value_and_grad(again), W, X), wanted), name
        assert second is None or same(seeded(twice(again), W), second), name


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(vfn.tree.leaves(a), vfn.tree.leaves(b), strict=True))


def gathered(w, x):
    """A body whose weights are split, and gathered where they are used."""
    h = vfn.name(torch.tanh(x @ vfn.all_gather(w["a"], "i", tiled=True)), "h")
    h = torch.sin(h @ vfn.all_gather(w["b"], "i", tiled=True))
    return vfn.psum(torch.exp(h @ w["c"] / 4).sum(), "i")


def on_a_mesh():
    """For each policy: gradients in a body, with types and without, and of arrays; how often weights are gathered, and summed."""
    mesh, specs = vfn.make_mesh((2, 2), ("i", "j")), {"a": P("i"), "b": P("i"), "c": P()}
    found, logs = {}, {}
    for name, policy in POLICIES.items():
        for check in (True, False):
            body = vfn.remat(gathered, policy=policy)
            f = vfn.shard_map(body, mesh=mesh, in_specs=(specs, P("i")), out_specs=P(), check_vma=check)
            with vfn.comm_log() as log:
                gradient = vfn.grad(f)(W, X)
            found[name, check] = vfn.unshard(gradient)
            logs[name, check] = Counter(record.op for record in log)["all_gather"]
        w, x = vfn.shard(W, mesh, {"a": P("i"), "b": P("i", "j"), "c": P("j")}), vfn.shard(X, mesh, P("i"))
        whole = lambda w, x: net({k: vfn.with_sharding(v, P()) for k, v in w.items()}, x)
        found[name, "arrays"] = vfn.unshard(vfn.grad(vfn.remat(net, policy=policy))(w, x))
        with vfn.comm_log() as log:
            gradient = vfn.grad(vfn.remat(whole, policy=policy))(w, x)
        found[name, "gathered"] = vfn.unshard(gradient)
        logs[name, "gathered"] = Counter(record.op for record in log)["all_gather"]
    keeps = lambda op, shapes, name: op == "with_sharding"
    with vfn.comm_log() as log:
        gradient = vfn.grad(vfn.remat(whole, policy=keeps))(w, x)
    found["keeps", "gathered"] = vfn.unshard(gradient)
    logs["keeps", "gathered"] = Counter(record.op for record in log)["all_gather"]
    return found, logs


def check_mesh(found, logs):
    wanted = vfn.grad(net)(W, X)
    for (name, where), gradient in found.items():
        for key, g in gradient.items():
            torch.testing.assert_close(
                g, wanted[key], rtol=1e-11, atol=1e-12, msg=lambda text, at=(name, where): f"{at}: {text}"
            )
        same_place = found["none", where]
        assert same(gradient, same_place), (name, where)
    counts = {name: logs[name, True] for name in POLICIES}
    assert counts == {name: logs[name, False] for name in POLICIES}
    # with two of the gradients of plain weights, which come out split
    assert (counts["nothing"], counts["everything"], counts["a function"]) == (2 + 4, 2 + 2, 2 + 2)
    assert (logs["keeps", "gathered"], logs["nothing", "gathered"]) == (4, 8)


@pytest.mark.usefixtures("poisoned")
def test_on_a_mesh():
    with vfn.simulate(4):
        check_mesh(*on_a_mesh())


def with_keyed_draws(w, x):
    first, second = vfn.random.split(vfn.random.key(0))
    h = vfn.random.dropout(first, vfn.name(torch.tanh(x @ w["a"]), "h"), 0.3)
    return (vfn.name(vfn.random.dropout(second, h.sin(), 0.5), "g") @ w["b"]).exp().sum()


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("f", [with_keyed_draws, with_views_and_several_results])
def test_no_bit_depends_on_the_policy_on_ranks_that_make_their_blocks_one_by_one(f):
    with vfn.simulate(3):
        w, x = vfn.shard((W, X), vfn.make_mesh((3,), ("i",)), P("i"))
        wanted = vfn.unshard(vfn.grad(f)(w, x))
        for key, g in vfn.grad(f)(W, X).items():
            torch.testing.assert_close(wanted[key], g, rtol=1e-11, atol=1e-12)
        for name, policy in POLICIES.items():
            assert same(vfn.unshard(vfn.grad(vfn.remat(f, policy=policy))(w, x)), wanted), name


def test_a_name_that_is_not_to_be_saved_is_computed_again():
    """Of what is gathered as one tree, too: FSDP's reshard_after_forward."""
    policy = policies.save_anything_except_these_names("gathered", "h")

    def layer(w, x):
        w = vfn.name(vfn.with_sharding(w, P()), "gathered")
        return (vfn.name(torch.tanh(x @ w["a"]), "h") @ w["b"]).sum()

    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("dp",))
        w, x = vfn.shard({name: W[name] for name in "ab"}, mesh, P("dp")), vfn.shard(X, mesh, P("dp"))
        kept = [what.partition(" from")[0] for _, what in vfn.saved_residuals(vfn.remat(layer, policy=policy), w, x)]
        assert [what for what in kept if what.startswith("output")] == ["output of mm"]
        with vfn.comm_log() as log:
            found = vfn.grad(vfn.remat(layer, policy=policy))(w, x)
        assert [(call.op, call.bytes) for call in log if call.op == "all_gather"] == [("all_gather", 8 * 8 * 20)] * 2
        for name, grad in vfn.grad(layer)(w, x).items():
            assert torch.equal(vfn.unshard(found[name]), vfn.unshard(grad))


def test_what_no_gradient_asks_for_is_not_kept():
    made = []

    def f(x):
        y = x * 2  # of which a sum asks nothing
        made.append(weakref.ref(y.untyped_storage()))
        return (y + x).sum()

    x = draw(4).requires_grad_()
    y = vfn.remat(f, policy=policies.everything_saveable)(x)
    assert made[0]() is None
    y.backward()
    assert x.grad.tolist() == [3] * 4


def test_on_real_ranks(gloo):
    for found, logs in gloo(4, on_a_mesh):
        check_mesh(found, logs)


def layers(policy):
    def layer(w, x):
        h = vfn.name(torch.tanh(x @ w["up"]), "h")
        return x + torch.sin(h @ w["down"])

    def loss(ws, x):
        for w in ws:
            x = (layer if policy is None else vfn.remat(layer, policy=policy))(w, x)
        return x.square().mean()

    return loss


def test_under_jit():
    """A plan keeps what the policy says: its gradients are the bits of those, and its memory is less the less is kept."""
    ws = [{"up": draw(64, 512) / 8, "down": draw(512, 64) / 8} for _ in range(6)]
    x = draw(2048, 64)
    peaks, products, wanted = {}, {}, None
    for name in ("everything", "dots", "only h", "nothing"):
        f = vfn.jit(vfn.grad(layers(POLICIES[name])))
        lowered = f.lower(ws, x)
        peaks[name] = lowered.memory().peak
        products[name] = sum("mm" in str(node.target) for node in lowered.graph.nodes)
        wanted = wanted or f(ws, x)
        assert same(f(ws, x), wanted)
    assert peaks["nothing"] < peaks["only h"] < peaks["everything"]
    assert products == {"everything": 24, "dots": 24, "only h": 30, "nothing": 36}
    merged = vfn.jit(vfn.grad(lambda ws, x: vfn.remat(layers(None), prevent_cse=False)(ws, x)))
    assert merged.lower(ws, x).memory().peak > peaks["nothing"]


def test_static_arguments():
    def f(w, x, how, times):
        for _ in range(times):
            x = how(x @ w)
        return x.sum()

    again = vfn.remat(f, policy=policies.dots_saveable, static_argnums=(2, -1))
    assert same(vfn.grad(again)(W["a"], X, torch.tanh, 2), vfn.grad(f)(W["a"], X, torch.tanh, 2))


def test_a_function_that_does_something_else_the_second_time():
    runs = []

    def f(x):
        runs.append(x)
        return (x.sin().cos() if len(runs) < 2 else x.exp().cos()).sum()

    with pytest.raises(TransformError) as error:
        vfn.grad(vfn.remat(f, policy=policies.save_only_these_names("h")))(X)
    assert str(error.value) == (
        "remat: the function does something else when its values are computed again, and so the policy's are not its own\n"
        "  Instead: a function of its arguments alone"
    )


def test_names_for_both():
    with pytest.raises(TransformError) as error:
        policies.save_and_offload_only_these_names(names_which_can_be_saved=["a"], names_which_can_be_offloaded=["a"])
    assert str(error.value) == (
        "remat_policies: a name is to be kept on the device and on the host\n  * 'a'\n  Instead: each name in one of the two"
    )


def test_a_name_means_nothing_elsewhere():
    assert vfn.name(X, "h") is X
    tree = {"a": X, "n": 3}
    assert vfn.checkpoint_name(tree, "h") is tree


def test_static_arguments_by_name() -> None:
    def f(x, n, *, how="sin"):
        assert isinstance(n, int)
        return getattr(torch, how)(x) ** n

    x = torch.tensor(0.5, dtype=torch.float64)
    g = vfn.remat(f, static_argnames=("n", "how"))
    for given in ({"n": 3, "how": "cos"}, {"n": 2}):
        assert vfn.grad(g)(x, **given) == vfn.grad(f)(x, **given)
    assert vfn.grad(g)(x, 3) == vfn.grad(f)(x, 3)
    with pytest.raises(TransformError, match="there is no parameter 'z'"):
        vfn.remat(f, static_argnames="z")
