"""Parallelisms as tables: the numbers of one device, the collectives of the program by hand, the bytes of the formulas.

The numbers are a sample, of few steps; ``python -m benchmarks.parity`` does all of them.
"""

import math
import re
import sys
import types
from collections import Counter
from pathlib import Path

import pytest
import torch

import vescale_fn as vfn
from benchmarks import parity
from vescale_fn import P
from vescale_fn._core.base import tree
from vescale_fn.recipes import count_lines, gpt, layers, llama, mixtral, models
from vescale_fn.recipes.parallel import AXES, ONE_DEVICE, TABLE, WORDS, Layout, ParallelError, Specs, parallel

# The same numbers as on one device. float64, sums in another order: a relative 1e-16 an addition

SAMPLE = [
    ("gpt", "dp", {"dp": 3}),  # batches of 3, 3 and 2
    ("gpt", "fsdp+tp+sp+vp+remat", {"dp": 2, "tp": 2}),
    ("gpt", "dp+cp-gather", {"dp": 2, "cp": 3}),
    ("llama", "fsdp+cp-zigzag", {"dp": 2, "cp": 3}),
    ("llama", "zero2+tp", {"dp": 2, "tp": 4}),  # more ranks than heads of keys
    ("llama", "hsdp+tp", {"replica": 2, "dp": 2, "tp": 2}),
    ("mixtral", "fsdp+cp+ep", {"dp": 2, "cp": 2, "ep": 2}),
    ("dit", "pp+fsdp+reshard", {"pp": 2, "dp": 2}),
    ("dit", "cp-ulysses+tp+sp", {"cp": 2, "tp": 2}),
    ("gpt", "cp-zigzag+tp+sp+vp+remat", {"cp": 2, "tp": 2}),
    ("resnet", "fsdp+tp", {"dp": 2, "tp": 2}),
    ("resnet", "pp+zero2", {"pp": 3, "dp": 2}),
    ("gpt", "pp+zero1+tp", {"pp": 2, "dp": 2, "tp": 2}),  # whose embedding two stages use
]
PLANS = [("llama", "zero1", {"dp": 2})]
ALONE = {}
PAGE = Path(count_lines.__file__).parent / "README.md"


def one_device(name, text=""):
    key = name, parity.alone(text)
    if key not in ALONE:
        ALONE[key] = parity.train(name, torch.float64, 2, key[1], jit=False)
    return ALONE[key]


def close(found, wanted):
    assert parity.apart(found, wanted) < 1e-12
    for x, y in zip(tree.leaves(found.last), tree.leaves(wanted.last), strict=True):
        # AdamW divides by the size of a gradient: where that is but rounding, its eps of 1e-8 bounds what comes of it
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("name", "text", "sizes"), SAMPLE, ids=[f"{name}-{text}" for name, text, _ in SAMPLE])
def test_a_model_gives_the_numbers_of_one_device(name, text, sizes):
    with vfn.simulate(math.prod(sizes.values())):
        close(parity.on_mesh(name, torch.float64, 2, text, sizes, jit=False), one_device(name, text))


@pytest.mark.parametrize(("name", "text", "sizes"), PLANS, ids=[f"{name}-{text}" for name, text, _ in PLANS])
def test_a_replayed_step_gives_the_numbers_of_one_device(name, text, sizes):
    with vfn.simulate(math.prod(sizes.values())):
        close(parity.on_mesh(name, torch.float64, 2, text, sizes), one_device(name))


def two_runs():
    on = lambda text, sizes: parity.on_mesh("mixtral", torch.float64, 2, text, sizes, False)
    return on("fsdp+ep", {"dp": 2, "ep": 2}), on("pp+zero1", {"pp": 2, "dp": 2})


def test_real_ranks_give_the_numbers_of_one_device(gloo):
    for found, staged in gloo(4, two_runs):
        close(found, one_device("mixtral"))
        close(staged, one_device("mixtral", "pp"))


def test_a_difference_is_seen():
    wanted = one_device("gpt")
    other = wanted._replace(losses=[wanted.losses[0], wanted.losses[1] + 1e-11])
    assert parity.apart(other, wanted) > 1e-12
    assert parity.apart(wanted._replace(mask=wanted.mask * (1 + 1e-15)), wanted) == math.inf
    assert parity.apart(wanted._replace(losses=[math.nan, 0.0]), wanted) == math.inf


def test_the_whole_list_has_every_model_parallelism_and_mesh():
    found = list(parity.rows(list(parity.CONFIGS), list(parity.ROWS)))
    assert {name for name, _ in found} == set(models.MODELS) == set(parity.CONFIGS)
    assert {word for _, text in found for word in text.split("+")} == {*TABLE, *WORDS} - {"zero3"}
    assert {text for name, text in found if name == "resnet"} == {
        "dp",
        "zero1",
        "zero2",
        "fsdp",
        "fsdp+remat",
        "fsdp+reshard",
        "hsdp",
        "tp",
        "dp+tp",
        "zero1+tp",
        "fsdp+tp",
        "hsdp+tp",
        "pp",
        "pp+zero1",
        "pp+fsdp",
        "pp+hsdp",
    }
    assert list(parity.meshes("gpt", "hsdp", 6)) == [{"replica": a, "dp": b} for a, b in ((2, 2), (2, 3), (3, 2))]
    assert [*parity.meshes("gpt", "fsdp")] == [{"dp": n} for n in range(2, 9)]
    assert [*parity.meshes("gpt", "cp-zigzag")] == [{"cp": n} for n in (2, 3, 6)]
    assert [*parity.meshes("gpt", "pp+cp")] == [{"pp": a, "cp": b} for a, b in ((2, 2), (2, 3), (2, 4), (3, 2))]
    assert [*parity.meshes("dit", "cp")] == [{"cp": n} for n in (2, 4, 8)]
    assert [*parity.meshes("mixtral", "dp+ep")] == [{"dp": a, "ep": b} for a, b in ((2, 2), (2, 4), (3, 2), (4, 2))]


# The collectives of the program by hand


def bytes_of(params, names=r".*"):
    pairs = zip(tree.paths(params), tree.leaves(params), strict=True)
    return sum(x.nbytes for path, x in pairs if re.search(names, path))


CONFIG = llama.Config(vocab=24, dim=16, heads=4, groups=4, layers=2, hidden=32, dropout=0.2)
WHOLE = llama.init(parity.KEY, CONFIG)
BATCH, LENGTH = 8, 12
ACTIVATIONS = 4 * BATCH * LENGTH * CONFIG.dim
ALL, NORMS, VOCABULARY = bytes_of(WHOLE), bytes_of(WHOLE, "norm"), bytes_of(WHOLE, "embed|head")
BLOCKS = bytes_of(WHOLE, "blocks")
LAYERS = CONFIG.layers

# a plan puts small gathers together; what is gathered is so block by block once more, when gradients are computed
GATHERED_TWICE = {
    ("reduce_scatter", "dp"): (1, ALL),
    ("all_gather", "dp"): (1 + LAYERS, ALL + BLOCKS),
    ("all_reduce", "dp"): (1, 4),
}
REPLAYED = {  # (op, axis): how many, and the bytes of all of them, of a step replayed from a plan; the loss is 4 bytes
    "fsdp+remat": GATHERED_TWICE,
    "fsdp+reshard": GATHERED_TWICE,
    # each sum becomes a reduce-scatter and an all-gather; what is whole saw a part of the tokens: one sum of its gradients
    "tp+sp": {
        ("reduce_scatter", "tp"): (4 * LAYERS, 4 * LAYERS * ACTIVATIONS),
        ("all_gather", "tp"): (4 * LAYERS, 4 * LAYERS * ACTIVATIONS),
        ("all_reduce", "tp"): (1, NORMS + VOCABULARY + 4),
    },
}
OP_BY_OP = {  # the same of a step that is run as written: what is gathered or scattered is so block by block
    "dp": {("all_reduce", "dp"): (1, ALL + 4)},
    "zero1": {("reduce_scatter", "dp"): (1, ALL), ("all_gather", "dp"): (1, ALL), ("all_reduce", "dp"): (1, 4)},
    "fsdp": {
        ("reduce_scatter", "dp"): (LAYERS + 1, ALL),
        ("all_gather", "dp"): (LAYERS + 1, ALL),
        ("all_reduce", "dp"): (1, 4),
    },
    "hsdp": {
        ("reduce_scatter", "dp"): (LAYERS + 1, ALL),
        ("all_gather", "dp"): (LAYERS + 1, ALL),
        ("all_reduce", "replica"): (LAYERS + 1, ALL // 2),
        ("all_reduce", "replica,dp"): (1, 4),
    },
    "tp": {("all_reduce", "tp"): (4 * LAYERS, 4 * LAYERS * ACTIVATIONS)},
    # forward what is looked up, backward the gradient of what is scored; of each token's scores the maximum and a sum
    "zero1+vp": {
        ("reduce_scatter", "dp"): (1, ALL - VOCABULARY // 2),
        ("all_gather", "dp"): (1, ALL - VOCABULARY // 2),
        ("all_reduce", "tp"): (4, 2 * ACTIVATIONS // 2 + 2 * 4 * BATCH * LENGTH // 2),
        ("all_reduce", "dp,tp"): (1, 4),
    },
    "fsdp+tp": {
        ("reduce_scatter", "dp"): (LAYERS + 1, (ALL + NORMS + VOCABULARY) // 2),
        ("all_reduce", "dp"): (1, 4),
        ("all_gather", "dp"): (LAYERS + 1, (ALL + NORMS + VOCABULARY) // 2),
        ("all_reduce", "tp"): (4 * LAYERS, 4 * LAYERS * ACTIVATIONS // 2),
    },
}


def step_on(text, sizes, config=CONFIG, model=llama, jit=True, keep=False):
    """The log of collectives of a step of SGD, and what it gives: parameters, state, and gradients if they are kept."""
    with vfn.simulate(math.prod(sizes.values())):
        mesh = vfn.make_mesh(tuple(sizes.values()), tuple(sizes))
        layout = parallel(text, mesh)
        config, optimizer = models.laid_out(config, layout), vfn.optim.sgd(0.1, momentum=0.9)
        params = model.init(parity.KEY, config)
        specs = layout.specs(params, model.NAMES, mesh)
        params = vfn.shard(params, mesh, specs.params)
        state = specs.init(optimizer, params)
        batch = vfn.shard(models.random_batch(parity.KEY, config, BATCH, LENGTH), mesh, layout.spec("batch"))

        def step(params, state, batch, key):
            value, grads = vfn.value_and_grad(model.loss)(params, batch, config, key)
            params, state = specs.update(optimizer, grads, state, params)
            return value, params, state, vfn.with_sharding(grads, specs.grads) if keep else None

        run = vfn.jit(step) if jit else step
        with vfn.use_mesh(mesh), vfn.comm_log() as log:
            _, params, state, grads = run(params, state, batch, parity.KEY)
        return log, params, state, grads


def counted(log):
    found, sizes = Counter(), Counter()
    for x in log:
        found[x.op, x.axis] += 1
        sizes[x.op, x.axis] += x.bytes
    return {key: (found[key], sizes[key]) for key in found}


def sizes_of(text):
    axes = {axis for names in dict(parallel(text).dims).values() for axis in names}
    return {axis: 2 if len(axes) > 1 else 4 for axis in AXES if axis in axes}


@pytest.mark.parametrize("text", REPLAYED)
def test_a_replayed_step_communicates_as_one_written_by_hand(text):
    assert counted(step_on(text, sizes_of(text))[0]) == REPLAYED[text]


@pytest.mark.parametrize("text", OP_BY_OP)
def test_a_step_communicates_as_one_written_by_hand(text):
    assert counted(step_on(text, sizes_of(text), jit=False)[0]) == OP_BY_OP[text]


def test_experts_are_reached_by_two_exchanges_each_way():
    config = mixtral.Config(vocab=24, dim=16, heads=4, groups=2, layers=2, hidden=12, experts=4, capacity=1.0)
    places = math.ceil(1.0 * config.chosen * LENGTH / config.experts)
    log = step_on("ep", {"ep": 4}, config, mixtral, jit=False)[0]
    sent = 4 * BATCH * config.experts * places * config.dim // 4  # on a rank
    exchanges = [x for x in log if x.op == "all_to_all"]
    assert [x.bytes for x in exchanges] == [sent] * (4 * config.layers)
    assert {x.op for x in log} == {"all_to_all", "all_reduce"}


# Bytes on a rank: the formulas of ZeRO (arXiv 1910.02054), with momentum as the state: 4 bytes a parameter for each


def on_rank(x, rank=1):
    blocks = getattr(x.to_local(), "blocks", None) if hasattr(x, "to_local") else None
    return (blocks[rank] if blocks else x).nbytes


def held(values):
    return sum(on_rank(x) for x in tree.leaves(values) if isinstance(x, torch.Tensor) and x.is_floating_point())


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("dp", (1, 1, 1)),
        ("zero1", (1, 1, 4)),
        ("zero2", (1, 4, 4)),
        ("fsdp", (4, 4, 4)),
        ("hsdp", (2, 2, 2)),
        ("zero2+cp", (1, 4, 4)),
        ("fsdp+cp", (4, 4, 4)),
    ],
)
def test_bytes_on_a_rank_are_those_of_the_formula(text, parts):
    _, params, state, grads = step_on(text, sizes_of(text), jit=False, keep=True)
    assert (held(params), held(grads), held(state)) == tuple(ALL // n for n in parts)


# The table


def test_layouts_by_name():
    assert parallel("dp").spec("batch", "length", None) == P("dp", None, None)
    assert parallel("fsdp+tp").spec("batch", "norm_length", "heads") == P("dp", None, "tp")
    assert parallel("cp+tp+sp").spec("batch", "norm_length") == P(None, ("cp", "tp"))
    assert parallel("cp+tp+sp").spec("batch", "length") == P(None, "cp")
    assert parallel("tp+sp+vp").spec("batch", "norm_length", without="vocab") == P(None, None)
    assert parallel("dp+ep").spec("experts", "batch") == P("ep", "dp")  # an axis splits one dim, the first
    assert parallel("hsdp").spec("batch") == P(("replica", "dp"))
    assert parallel("dp+fsdp") == Layout(
        (("batch", ("dp",)), *((kind, ("dp",)) for kind in ("state", "grads", "params")))
    )
    assert parallel("zero3") == parallel("fsdp") != parallel("fsdp+remat")
    assert parallel("cp-zigzag", {"cp": 2}).ordered(torch.arange(8), 0).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    with pytest.raises(ParallelError, match="depends on the number of ranks: write parallel"):
        parallel("cp-zigzag").ordered(torch.arange(8), 0)


def test_specs_of_a_model():
    specs = parallel("zero2+tp").specs(WHOLE, llama.NAMES, {"dp": 2, "tp": 2})
    block = {kind: tree_["blocks"][0] for kind, tree_ in specs._asdict().items()}
    columns, rows = P(None, "tp", reduced={"dp"}), P("tp", reduced={"dp"})  # gradients stay to be added up and split
    assert block["params"]["attention"] == {
        "k": columns,
        "norm": P(reduced={"dp"}),
        "out": rows,
        "q": columns,
        "v": columns,
    }
    assert block["grads"] == block["state"]
    assert block["state"]["mlp"] == {
        "down": P(("tp", "dp")),
        "gate": P("dp", "tp"),
        "norm": P("dp"),
        "up": P("dp", "tp"),
    }
    # "down" is 32 x 16 and tp leaves 16 x 16 of it on a rank: the first of two dims as large
    assert parallel("zero1").specs({"w": torch.ones(3)}, [("", P())], {"dp": 2}) == Specs(*[{"w": P()}] * 3)


def test_what_is_kept_in_parts_is_split_over_all_ranks_that_see_other_tokens():
    experts = mixtral.init(parity.KEY, parity.CONFIGS["mixtral"])
    specs = parallel("fsdp+cp+ep+tp").specs(experts, mixtral.NAMES, {"dp": 2, "cp": 2, "ep": 2, "tp": 2})
    block, data = specs.params["blocks"][0], ("dp", "cp", "ep")
    assert block["attention"]["q"] == P(data, "tp")
    assert block["moe"]["router"] == P(data)
    assert block["moe"]["up"] == P("ep", ("dp", "cp"), "tp")  # experts lie along "ep" as it is
    assert specs.params == specs.grads == specs.state
    specs = parallel("hsdp+cp").specs(WHOLE, llama.NAMES, {"replica": 2, "dp": 2, "cp": 2})
    assert specs.params["norm"] == P(("dp", "cp"))  # not over replicas


def test_one_device_states_nothing():
    x, calls = torch.ones(2), []
    f = lambda p, x: calls.append(p) or p["w"] * x
    assert ONE_DEVICE(x, "batch") is x
    assert ONE_DEVICE.gather({"w": x}, [])["w"] is x
    assert ONE_DEVICE.attention(f) is f
    assert ONE_DEVICE.block(f, [])({"w": x}, 3).tolist() == [3, 3]
    specs = Specs(P(), P(), P())
    sgd = vfn.optim.sgd(0.5)
    params, _ = specs.update(sgd, {"w": x}, specs.init(sgd, {"w": x}), {"w": x})
    assert params["w"].tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("text", "mesh", "message"),
    [
        (
            "fdsp",
            None,
            "'fdsp': 'fdsp' is none of them; write names from dp, zero1, zero2, fsdp, hsdp, tp, sp, vp, cp, cp-zigzag, cp-gather, "
            "cp-ulysses, ep, zero3, remat, reshard, pp, joined by +: fsdp+tp+remat",
        ),
        (
            "dp+dp",
            None,
            "'dp+dp': a name stands there twice; write names from dp, zero1, zero2, fsdp, hsdp, tp, sp, vp, cp, "
            "cp-zigzag, cp-gather, cp-ulysses, ep, zero3, remat, reshard, pp, joined by +: fsdp+tp+remat",
        ),
        ("cp+cp-gather", None, "'cp+cp-gather': cp and cp-gather share one sequence in two ways; leave one of them"),
        (
            "dp+reshard",
            None,
            "'dp+reshard': reshard gathers parameters again, but none is kept in parts: add fsdp or hsdp",
        ),
        ("fsdp+tp", {"dp": 2}, "'fsdp+tp' needs the axes dp, tp, but the mesh is dp=2: add tp=2, say"),
        (
            "fsdp",
            {"dp": 2, "tp": 2},
            "the mesh is dp=2, tp=2, but 'fsdp' leaves tp idle: set it to 1, or name what uses it",
        ),
    ],
    ids=["unknown", "twice", "two ways", "kept whole", "missing", "idle"],
)
def test_messages(text, mesh, message):
    with pytest.raises(ParallelError) as error:
        parallel(text, mesh)
    assert str(error.value) == message


def test_an_axis_of_size_one_may_be_idle():
    assert parallel("fsdp", {"dp": 2, "tp": 1}) == parallel("fsdp")


def test_the_page_about_them_runs():
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    words = {word for word in TABLE if f"`{word}`" in PAGE.read_text()}
    assert words == set(TABLE) - {"zero3"}
    there = {}
    for block in blocks:
        exec(block, there)


# The models without the lines that exist only for distribution


def without_marked_lines(name, monkeypatch):
    """The module of a model as it is for one device, in a package of such modules."""
    source = (Path(count_lines.__file__).parent / f"{name}.py").read_text().splitlines()
    marked = {number for number, *_ in count_lines.distribution_lines(f"{name}.py")}
    left = "\n".join("" if i in marked else line for i, line in enumerate(source, 1))
    for word in (r"layout", r"\bshard", r"\bP\(", r"\bat\b", r"mesh"):
        assert not re.search(word, re.sub(r'"""(.|\n)*?"""|#.*', "", left)), f"{word} is left in {name}.py"
    module = types.ModuleType(f"one_device.{name}")
    module.__package__ = "one_device"
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(left, f"{name}.py without its marked lines", "exec"), module.__dict__)
    return module


@pytest.mark.parametrize("name", models.MODELS)
def test_without_its_marked_lines_a_model_is_one_for_one_device(name, monkeypatch):
    package = types.ModuleType("one_device")
    package.__path__ = []
    monkeypatch.setitem(sys.modules, "one_device", package)
    monkeypatch.setitem(sys.modules, "one_device.layers", layers)
    without_marked_lines("llama", monkeypatch)  # of which mixtral has its attention
    module = without_marked_lines(name, monkeypatch)
    config = parity.CONFIGS[name]
    params, batch = models.MODELS[name].init(parity.KEY, config), models.random_batch(parity.KEY, config, BATCH, LENGTH)
    wanted = models.MODELS[name].loss(params, batch, config, parity.KEY)
    config = module.Config(**{field: value for field, value in vars(config).items() if field != "layout"})
    assert all(
        torch.equal(x, y)
        for x, y in zip(tree.leaves(module.init(parity.KEY, config)), tree.leaves(params), strict=True)
    )
    assert torch.equal(module.loss(params, batch, config, parity.KEY), wanted)


def test_gpt_scores_with_its_embedding_where_it_is_tied():
    tied, loose = (gpt.Config(vocab=24, context=16, dim=16, hidden=8, tied=t) for t in (True, False))
    params = gpt.init(parity.KEY, loose)
    both = {**params, "head": params["embed"]}
    tokens = torch.arange(10).view(2, 5)
    assert torch.equal(
        gpt.logits(both, tokens, loose), gpt.logits({k: p for k, p in params.items() if k != "head"}, tokens, tied)
    )
