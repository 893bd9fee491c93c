"""`f.remat({path: policy})` of a module's function: bits, what runs again, what is gathered again, and the memory of a plan."""

from collections import Counter

import pytest
import torch
import transformers as hf
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn.errors import SpecError, TransformError

policies, KEY = vfn.remat_policies, vfn.random.key(3)
X = torch.arange(32.0, dtype=torch.float64).view(4, 8).sin()


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.attn = nn.Sequential(nn.Linear(dim, dim), nn.Tanh())
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Dropout(0.3), nn.Linear(2 * dim, dim))

    def forward(self, x, scale):
        return x + scale * self.mlp(x + self.attn(x).sin())


class Net(nn.Module):
    def __init__(self, dim=8, layers=2):
        super().__init__()
        self.layers = nn.ModuleList(Block(dim) for _ in range(layers))
        self.head = nn.Linear(dim, 3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return self.head(x)


def net(**sizes):
    torch.manual_seed(0)
    return vfn.module_function(Net(**sizes).double())


BY_PATH = {
    "layers": {"layers.*": None},
    "parts": {"layers.*.attn": policies.nothing_saveable, "layers.*.mlp": policies.dots_saveable},
    "one in another": {"layers.*": policies.nothing_saveable, "layers.*.attn": policies.everything_saveable},
    "any depth": {"**.attn": None, "layers.0": policies.dots_saveable},
    "all": {"": policies.dots_saveable},
    "first counts": {"layers.1": policies.everything_saveable, "layers.*": None},
}


def gradients(f, params, x=X):
    return vfn.grad(lambda params: f(params, x, key=KEY).square().sum())(params)


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(vfn.tree.leaves(a), vfn.tree.leaves(b), strict=True))


@pytest.mark.parametrize("name", BY_PATH)
def test_no_bit_depends_on_it(name):
    f, params = net()
    again, wanted = f.remat(BY_PATH[name]), gradients(f, params)
    assert same(gradients(again, params), wanted)
    assert same(vfn.jit(gradients, static_argnums=0)(again, params), vfn.jit(gradients, static_argnums=0)(f, params))
    one = lambda f: torch.func.grad(lambda params: f(params, X, key=KEY).square().sum())(params)
    assert same(one(again), one(f))
    with vfn.simulate(3):
        mesh = vfn.make_mesh((3,), ("dp",))
        params, x = vfn.shard(params, mesh, P("dp")), vfn.shard(X, mesh, P("dp"))
        f, again = f.gathering(P()), again.gathering(P())
        found = vfn.unshard(gradients(again, params, x))
        assert same(found, vfn.unshard(gradients(f, params, x)))
        for a, b in zip(vfn.tree.leaves(found), vfn.tree.leaves(wanted), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


class Counted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops[func.overloadpacket.__name__] += 1
        return func(*args, **kwargs or {})


COUNTS = {  # of tanh (in attn), of gelu (in mlp), of sin (in the block), of addmm, in 2 blocks and the head
    None: (2, 2, 2, 7),
    "layers": (4, 4, 4, 11),
    "parts": (4, 4, 2, 9),
    "one in another": (2, 4, 4, 9),
    "any depth": (4, 3, 3, 9),
    "first counts": (3, 3, 3, 9),
}


@pytest.mark.parametrize("name", COUNTS)
def test_what_runs_again(name):
    f, params = net()
    with Counted() as counted:
        gradients(f if name is None else f.remat(BY_PATH[name]), params)
    assert tuple(counted.ops[op] for op in ("tanh", "gelu", "sin", "addmm")) == COUNTS[name]


def test_weights_are_gathered_again_and_a_plan_needs_less_memory():
    """FSDP's reshard_after_forward: nothing is computed twice, but what is gathered is not kept."""
    with torch.device("meta"):
        f, shapes = net(dim=1024, layers=6)
    weights = sum(x.nbytes for name, x in f.state_dict(shapes).items() if "layers" in name and x.ndim == 2)
    params = vfn.shard(shapes, vfn.abstract_mesh((4,), ("dp",)), P("dp"))
    x = vfn.ShapeDtype((4, 1024), torch.float64, P("dp"), vfn.abstract_mesh((4,), ("dp",)))
    kept = f.gathering(P())
    not_gathered = kept.remat({"layers.*": lambda op, shapes, name: op != "with_sharding"})
    found = {}
    for name, g in {"kept": kept, "again": not_gathered, "all again": kept.remat({"layers.*": None})}.items():
        plan = vfn.jit(gradients, static_argnums=0).lower(g, params, x)
        found[name] = plan.comms().bytes("all_gather"), plan.memory().peak, plan.text(lines=None).count("gelu")
    gathered, peak, gelus = found["kept"]
    first = 1024 * 1024 * 8  # of the first layer, which no gradient asks for; nor for biases
    assert found["again"][0] == gathered + weights - first
    assert gelus == found["again"][2] < found["all again"][2]
    assert found["again"][1] < 0.5 * peak


HUGGING_FACE = {
    hf.LlamaForCausalLM: (
        hf.LlamaConfig(
            num_hidden_layers=2,
            num_attention_heads=4,
            hidden_size=16,
            intermediate_size=32,
            vocab_size=40,
            num_key_value_heads=2,
        ),
        {"model.layers.*": policies.dots_saveable, "model.layers.*.self_attn": None},
    ),
    hf.GPT2LMHeadModel: (
        hf.GPT2Config(n_layer=2, n_head=4, n_embd=16, vocab_size=40, n_positions=16, bos_token_id=0, eos_token_id=1),
        {"transformer.h.*": None},
    ),
}


@pytest.mark.parametrize("kind", HUGGING_FACE)
def test_models_of_hugging_face(kind):
    config, by_path = HUGGING_FACE[kind]
    ids = (torch.arange(32).reshape(4, 8) * 7) % 40
    f, params = vfn.module_function(kind(config).double())
    run = lambda f: vfn.grad(
        lambda p, ids: f(p, input_ids=ids, use_cache=False, key=KEY, train=True).logits.sin().sum()
    )
    wanted = run(f)(params, ids)
    assert same(run(f.remat(by_path))(params, ids), wanted)
    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("dp",))
        split, ids = vfn.shard(params, mesh, vfn.fsdp_specs(params, mesh, "dp")), vfn.shard(ids, mesh, P("dp"))
        found = vfn.unshard(run(f.gathering(P()).remat(by_path))(split, ids))
    for a, b in zip(vfn.tree.leaves(found), vfn.tree.leaves(wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_messages():
    f, _ = net()
    with pytest.raises(SpecError) as caught:
        f.remat({"layer.*": None, "head": 3})
    assert str(caught.value) == (
        "Net.remat: policies are for modules by their paths\n"
        "  * no module is called 'layer.*'; did you mean 'layers.1'?\n"
        "  * the policy of 'head' is the int 3\n"
        "  Instead: paths as in named_modules(), with * for any one part and ** for any number of them; policies or None"
    )
    with pytest.raises(SpecError) as caught:
        f.remat(policies.dots_saveable)
    assert str(caught.value) == (
        "Net.remat: policies must be a dictionary from paths to policies, but it is the function dots_saveable\n"
        "  Instead: {'layers.*': vfn.remat_policies.nothing_saveable}"
    )
    f, *_ = vfn.module_function(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), state=True)
    with pytest.raises(TransformError) as caught:
        f.remat({"*": None})
    assert str(caught.value) == (
        "Sequential.remat: what is computed again would change its state twice\n"
        "  * 1.num_batches_tracked\n  * 1.running_mean\n  * 1.running_var\n"
        "  Instead: paths without it; or a state= that leaves it out, if no call changes it"
    )
    assert callable(f.remat({"0": None}))
