"""`auto`: the layout that it chooses computes what one device does, is never worse than those given, and fits."""

import re
import sys
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from sampled_choices import SLOW, chosen, fault, faults_on_ranks
from whole import some

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn.choice.search.best import NothingFits
from vescale_fn.recipes import gpt, llama, models, rows
from vescale_fn.recipes.parallel import ONE_DEVICE

S = vfn.ShapeDtype


def pair(params, x):
    grads = vfn.grad(lambda p: ((x @ p["up"]).relu() @ p["down"]).square().mean())(params)
    return vfn.tree.map(lambda p, g: p - 0.1 * g, params, grads)


PAIR = {"up": S((4096, 16384), torch.float32), "down": S((16384, 4096), torch.float32)}, S((8192, 4096), torch.float32)
MEGATRON = {"up": P(None, "tp"), "down": P("tp")}, P("dp")


@pytest.mark.parametrize(("model", "axes"), [(gpt, {"tp": 4}), (llama, {"dp": 2, "tp": 2})])
def test_a_chosen_training_step_computes_what_one_device_does(model, axes) -> None:
    sizes = {"groups": 2} if model is llama else {"context": 8}
    config = model.Config(vocab=32, dim=16, heads=4, layers=1, hidden=32, dropout=0.1, **sizes)
    optimizer = vfn.optim.adamw(1e-2)

    def step(params, state, tokens, key):
        loss, grads = vfn.value_and_grad(model.loss)(params, tokens, config, key)
        updates, state = optimizer.update(grads, state, params)
        return vfn.optim.apply_updates(params, updates), state, loss

    params = model.init(vfn.random.key(0), config, torch.float64)
    state = optimizer.init(params)
    tokens = torch.randint(32, (4, 9), generator=torch.Generator().manual_seed(0))
    key = vfn.random.key(1)
    choice = vfn.auto(step, params, state, tokens, key, mesh=axes, hardware=SLOW, candidates=1)
    assert {str(spec) for spec in vfn.tree.leaves(choice.specs[0])} != {"P()"}
    want = step(*step(params, state, tokens, key)[:2], tokens, key)
    with vfn.simulate(4):
        mesh = choice.mesh()
        fast = choice.jit()
        lie = vfn.shard((params, state, tokens, key), mesh, choice.specs)
        got = fast(*fast(*lie)[:2], *lie[2:])
        for a, b in zip(vfn.tree.leaves(want), vfn.tree.leaves(got), strict=True):
            # gradients of k's bias are 0 but for rounding, of which AdamW makes updates of some 1e-11
            torch.testing.assert_close(vfn.unshard(b), a, rtol=1e-9, atol=1e-9)


class Trained(NamedTuple):
    params: object
    state: object


# Of a step with parameters, a state and a batch, what it returns, and the same arguments made of it for the next call.
RETURNED = {
    "in order": (lambda params, state, loss: (params, state, loss), lambda out, batch: (*out[:2], batch)),
    "the other way round": (lambda params, state, loss: (loss, state, params), lambda out, batch: (*out[:0:-1], batch)),
    "by name": (
        lambda params, state, loss: {"loss": loss, "new": {"state": state, "params": params}},
        lambda out, batch: (out["new"]["params"], out["new"]["state"], batch),
    ),
    "fields": (lambda params, state, loss: (loss, Trained(params, state)), lambda out, batch: (*out[1], batch)),
    "one of them": (lambda params, state, loss: [state], lambda out, batch: (None, out[0], batch)),
}


@pytest.mark.parametrize("name", RETURNED)
def test_what_replaces_an_argument_is_laid_out_as_it_is(name: str) -> None:
    """However it is returned: it can be given to the next call."""
    returned, again = RETURNED[name]
    optimizer = vfn.optim.adamw(1e-2)

    def step(params, state, batch):
        loss, grads = vfn.value_and_grad(lambda p: ((batch @ p["up"]).relu() @ p["down"]).square().mean())(params)
        updates, state = optimizer.update(grads, state, params)
        return returned(vfn.optim.apply_updates(params, updates), state, loss)

    params = {"up": torch.linspace(-1, 1, 8 * 8).reshape(8, 8).double(), "down": torch.ones(8, 8).double() / 8}
    args = params, optimizer.init(params), torch.linspace(0, 1, 64).reshape(8, 8).double()
    fixed = P("tp"), [(r"(mean|square)", P(None, "tp"))], None
    choice = vfn.auto(step, *args, mesh={"tp": 4}, hardware=SLOW, candidates=1, fixed=fixed)
    filled = lambda new: tuple(old if x is None else x for old, x in zip(args, new, strict=True))
    want = step(*filled(again(step(*args), args[2])))
    with vfn.simulate(4):
        lie = vfn.shard(args, choice.mesh(), choice.specs)
        fast = choice.jit()
        new = again(fast(*lie), lie[2])
        for x, specs in zip(new[:2], choice.specs, strict=False):
            assert x is None or vfn.tree.map(vfn.spec_of, x) == specs
        got = fast(*(old if x is None else x for old, x in zip(lie, new, strict=True)))
        torch.testing.assert_close(vfn.unshard(got), want)


def test_what_is_made_of_constants_alone_is_an_array_of_the_mesh() -> None:
    """In the layout that is said of it, also where the answer is the step as it is written."""
    table = torch.arange(32.0, dtype=torch.float64).reshape(4, 8)
    step = lambda x: (x * 2, table.cos() * 2)
    x = torch.linspace(0, 1, 32, dtype=torch.float64).reshape(4, 8)
    choice = vfn.auto(step, x, mesh={"a": 4}, hardware=SLOW, candidates=1)
    assert choice.ranked[0].step is not None
    with vfn.simulate(4):
        mesh = choice.mesh()
        for f in (choice.applied(mesh), choice.jit(mesh)):
            got = f(vfn.shard(x, mesh, choice.specs[0]))
            assert tuple(map(vfn.spec_of, got)) == choice.layouts.outputs
            torch.testing.assert_close(vfn.unshard(got), step(x), rtol=0, atol=0)


def test_it_says_which_meshes_it_did_not_search() -> None:
    how = {"hardware": "h100", "candidates": 1, "donate_argnums": 0}
    choice = vfn.auto(pair, *PAIR, mesh=[{"tp": 8}, {"dp": 2}], **how)
    assert repr(choice).endswith("\n  not searched: " + choice.left_out[0])
    assert re.fullmatch(r"mesh \(dp=2\): calls alone take 3\.\d\d times what another mesh takes", choice.left_out[0])
    assert "not proved" not in repr(choice)
    choice.ranked = (replace(choice.ranked[0], found=replace(choice.ranked[0].found, within=0.0333)),)
    assert "not proved to be the best on this mesh: by the search's prediction another" in repr(choice)
    assert "may be up to 3.3 % faster\n" in repr(choice)
    small = vfn.auto(pair, *PAIR, mesh=[{"tp": 8}, {"dp": 2}], memory="480 MiB", **how)
    assert small.left_out[0].startswith("mesh (dp=2): any layout needs at least ")


def test_it_is_never_worse_than_layouts_that_are_given(monkeypatch) -> None:
    given = {"megatron": MEGATRON, "whole": (P(), P("dp"))}
    own = {"own": (pair, (P("dp"), P("dp")), {"dp": 8})}
    choice = vfn.auto(
        pair, *PAIR, mesh={"dp": 2, "tp": 4}, hardware="h100", candidates=2, others=given | own, donate_argnums=0
    )
    assert "own, as given" in repr(choice)
    prices = [vfn.price(pair, *PAIR, specs=one, mesh={"dp": 2, "tp": 4}, donate_argnums=0) for one in given.values()]
    assert choice.predicted.seconds <= min(one.seconds for one in prices) * (1 + 1e-9)
    priced = [next(one.price.seconds for one in choice.ranked if one.name == name) for name in given]
    assert priced == [one.seconds for one in prices]
    assert "megatron, as given" in repr(choice)
    assert "whole, as given" in repr(choice)
    assert choice.donated == (0,)

    def nothing(*args, **how):
        raise NothingFits("nothing")

    monkeypatch.setattr(sys.modules["vescale_fn.choice.auto"], "searched", nothing)
    choice = vfn.auto(pair, *PAIR, mesh={"dp": 2, "tp": 4}, others=given)
    assert choice.specs == (MEGATRON[0], P("dp"))
    assert choice.layouts.calls == {}
    assert repr(choice).startswith("pair on mesh (dp=2, tp=4), 1 node of 8 H100: megatron, as given\n  predicted ")
    with vfn.simulate(8):
        small = {"up": torch.ones(4, 8)}
        with vfn.use_mesh(choice.mesh()), pytest.raises(vfn.errors.SpecError, match="has besides 'down'"):
            choice.jit()(small, torch.ones(4))


def test_a_row_of_the_recipes_is_priced_and_carried_out_as_it_is_written() -> None:
    config, optimizer = llama.Config(vocab=32, dim=16, heads=4, groups=4, layers=1, hidden=32), vfn.optim.adamw(1e-2)

    def make(layout, specs):
        return rows.training(llama, models.laid_out(config, layout), optimizer, specs)

    params = llama.init(vfn.random.key(0), config, torch.float64)
    args = params, optimizer.init(params), models.random_batch(vfn.random.key(1), config, 4, 8)
    step, on = make(ONE_DEVICE, None), [{"dp": 2, "tp": 2}, {"dp": 2, "cp": 2}]
    given = rows.rows(make, args, llama.NAMES, optimizer, on, ["zero1+tp+sp", "dp+cp"])
    name, slower = "zero1+tp+sp on dp=2, tp=2", "dp+cp on dp=2, cp=2"
    assert list(given) == [name, slower]
    choice = vfn.auto(step, *args, candidates=0, others=given, hardware=SLOW, donate_argnums=(0, 1))
    for one, (own, specs, sizes) in zip((choice, *choice.others), given.values(), strict=True):
        price = vfn.price(own, *args, specs=specs, mesh=sizes, hardware=SLOW, donate_argnums=(0, 1))
        assert (one.predicted.seconds, one.predicted.bytes) == (price.seconds, price.bytes)
        assert one.layouts.mesh == sizes
        assert one.moves == []
    assert f": {name}, as given\n  predicted" in repr(choice)
    assert f"{slower}, as given\n" in repr(choice)
    want = step(*args)
    with vfn.simulate(4):
        mesh, fast = choice.mesh(), choice.jit()
        by_rules = vfn.shard(params, mesh, vfn.spec_from_rules(params, choice.rules()))
        lie = (
            by_rules,
            *vfn.shard(args[1:2], mesh, choice.specs[1:2]),
            args[2],
        )  # plain ones are laid out as they come in
        with vfn.use_mesh(mesh), vfn.comm_log() as log:
            got = fast(*lie)
        sent = {axes: log.bytes(axis=tuple(axes.split(","))) for axes in choice.predicted.bytes}
        assert sent == choice.predicted.bytes
        for a, b in zip(vfn.tree.leaves(want), vfn.tree.leaves(got), strict=True):
            torch.testing.assert_close(vfn.unshard(b), a, rtol=1e-9, atol=1e-9)
        with pytest.raises(vfn.errors.MeshError, match="the layout is of a mesh"):
            choice.jit(vfn.make_mesh((4,), ("dp",)))(*args)


def test_what_a_given_step_closes_over_counts_when_its_plan_is_replayed() -> None:
    w, factor = torch.arange(8.0), [1.0]
    own = {"own": (lambda w: w * factor[0], (P("tp"),))}
    choice = vfn.auto(lambda w: w * 1.0, w, mesh={"tp": 2}, candidates=0, others=own)
    with vfn.simulate(2):
        fast, lies = choice.jit(), vfn.shard(w, choice.mesh(), choice.specs[0])
        for factor[0] in (1.0, 1.0, 2.0):
            assert torch.equal(vfn.unshard(fast(lies)), w * factor[0])


def test_arguments_by_name_have_the_place_that_they_have_in_the_signature() -> None:
    def step(w, rate=0.5, *, y, x):
        return w - rate * vfn.grad(lambda w: (x @ w - y).square().mean())(w)

    w, x, y = torch.eye(4), torch.arange(8.0).reshape(2, 4), torch.ones(2, 4)
    own = {"own": (lambda w, *, x, y: step(w, x=x, y=y), (P(None, "tp"), P(), P())), "row": (P("tp"), P(), P())}
    for named, others in (({"x": x, "y": y}, own), ({"x": x, "rate": 0.25, "y": y}, None)):
        how = {"hardware": "cpu", "candidates": 0 if others else 1}
        choice = vfn.auto(step, w, **named, mesh={"tp": 2}, others=others, **how)
        price = vfn.price(step, w, **named, specs=choice.specs, mesh={"tp": 2}, hardware="cpu")
        assert price.peak == choice.predicted.peak
        assert len(choice.specs) == 1 + len(named)
        with vfn.simulate(2):
            lies = vfn.shard(w, choice.mesh(), choice.specs[0])
            torch.testing.assert_close(vfn.unshard(choice.jit()(lies, **named)), step(w, **named))
    with pytest.raises(vfn.errors.TransformError, match="argument 'candidate'; did you mean 'candidates'"):
        vfn.auto(step, w, x=x, y=y, mesh={"tp": 2}, candidate=1)
    with pytest.raises(vfn.errors.TransformError, match="y, x: what jit has made takes these by name alone"):
        vfn.price(vfn.jit(step), w, x=x, y=y, mesh={"tp": 2})


def test_specs_that_are_given_stay_and_choose_the_mesh() -> None:
    meshes = [{"dp": 8}, {"dp": 2, "tp": 4}]
    fixed = [(r"up$", P(None, "tp"))], None
    choice = vfn.auto(pair, *PAIR, mesh=meshes, hardware="h100", fixed=fixed, candidates=1)
    assert choice.layouts.mesh == {"dp": 2, "tp": 4}
    assert choice.specs[0]["up"] == P(None, "tp")
    assert "instead" in choice.explain("down")
    with pytest.raises(vfn.errors.SpecError, match="3 arguments, and the step was recorded with 2"):
        choice.shard(1, 2, 3)
    free = vfn.auto(pair, *PAIR, mesh=meshes, hardware="h100", candidates=2)
    assert {str(one.layouts.mesh) for one in (free, *free.others)} == set(map(str, meshes))


def test_the_memory_is_that_of_a_device_where_none_is_given() -> None:
    small = replace(vfn.hardware.h100(), memory=6e8)
    choice = vfn.auto(pair, *PAIR, mesh={"tp": 8}, hardware=small, candidates=1, donate_argnums=0)
    assert choice.predicted.peak <= choice.budget == 6e8
    share = vfn.auto(pair, *PAIR, mesh={"tp": 8}, hardware=small, memory="95 %", candidates=1, donate_argnums=0)
    assert share.predicted.peak <= share.budget == 5.7e8
    with pytest.raises(vfn.errors.VfnError, match="needs? as little as 1.00 MiB"):
        vfn.auto(pair, *PAIR, mesh={"tp": 8}, memory="1 MiB", candidates=1)


def test_without_its_solver_it_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)
    with pytest.raises(
        vfn.errors.VfnError, match=r"HiGHS is not installed\n  Instead: pip install 'vescale_fn\[auto\]'"
    ):
        vfn.auto(pair, *PAIR, mesh={"tp": 8})


def test_chosen_layouts_of_sampled_steps_compute_what_one_device_does() -> None:
    for name in ("2:1", *(f"2:{i}" for i in range(3, some(3, 400)))):
        with vfn.simulate(8):
            assert (found := chosen(name)) is None or not fault(found), name


def together(names):
    """What four processes choose of which one has another idea, or an error, or is interrupted; and of sampled steps."""
    rank, said = torch.distributed.get_rank(), []
    mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
    args = {"up": S((64, 256), torch.float32), "down": S((256, 64), torch.float32)}, S((128, 64), torch.float32)
    ask = lambda step=pair, on=mesh, **how: vfn.auto(step, *args, mesh=on, hardware=SLOW, candidates=1, **how)
    other = ({"up": P("tp"), "down": P()}, None)

    def interrupted(*args):
        if rank == 2:
            raise KeyboardInterrupt
        return pair(*args)

    specs = ask(fixed=None if rank else other).specs[0]
    for call in (
        lambda: ask(fixed=P("pp") if rank == 1 else None),
        lambda: ask(interrupted),
        lambda: ask(lambda p, x: pair(p, x) if rank else pair(p, x * 2)),
        lambda: ask(on={"dp": 2, "tp": 2}, fixed=None if rank else other).mesh(),
    ):
        try:
            call()
        except BaseException as error:
            said.append(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
    return specs, said, *faults_on_ranks(names)


def test_processes_choose_the_same_or_all_of_them_learn_why_not(gloo) -> None:
    found = gloo(4, together, ["5:9", *(f"5:{i}" for i in range(12, some(12, 60)))])
    elsewhere = "RecordError: auto: choosing a layout of {} raised on rank {}, and not here"
    parted = "DivergenceError: auto: ranks 0 and 1 have chosen different layouts for pair"
    for rank, (specs, said, faults, counted) in enumerate(found):
        assert specs == {"up": P("tp"), "down": P()}
        assert said == [
            "SpecError: auto: fixed= does not fit on the mesh (dp=2, tp=2)"
            if rank == 1
            else elsewhere.format("pair", 1),
            "KeyboardInterrupt: " if rank == 2 else elsewhere.format("interrupted", 2),
            "DivergenceError: auto: ranks 0 and 1 have recorded different calls of <lambda>, or were given other shapes",
            parted,
        ]
        assert not faults
        assert all(memory is None or max(alive, peak) <= memory for memory, peak, alive in counted)
        assert counted
