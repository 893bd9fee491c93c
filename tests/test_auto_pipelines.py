"""`vfn.auto` of a step with a pipeline, on meshes among which some have its axis: places, prices, and what runs."""

import functools

import pytest
import torch

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn.hardware import Hardware, Link, Protocol

WIDTH, ROWS = 16, 32
OPT = vfn.optim.adamw(1e-2)
MESHES = [{"pp": 2, "dp": 2}, {"pp": 4}]
QUICK = Hardware("quick", {"float32": 1e9}, 1e12, 1e-9, 1e12, (Link(4, (Protocol(0, 1e-9, 1e12),)),), tile=1)


def loss(params, x):
    h = x @ params["first"]
    for p in params["layers"]:
        h = vfn.cut(torch.tanh(h @ p["up"]) @ p["down"] + p["shift"])
    return (h @ params["first"]).square().mean()


def stepped(**how):
    piped = vfn.pipeline(loss, "pp", **{"microbatches": 4, "schedule": "1f1b", **how})

    def step(params, state, x):
        value, grads = vfn.value_and_grad(piped)(params, x)
        grads, _ = vfn.optim.clip_by_global_norm(1.0).update(grads, (), params)
        updates, state = OPT.update(grads, state, params)
        return vfn.optim.apply_updates(params, updates), state, value

    return step


def arguments():
    draw = functools.partial(torch.randn, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    layer = lambda: {"up": draw(WIDTH, 2 * WIDTH), "down": draw(2 * WIDTH, WIDTH), "shift": draw(WIDTH)}
    params = {"first": draw(WIDTH, WIDTH), "layers": [layer() for _ in range(4)]}
    return params, OPT.init(params), draw(ROWS, WIDTH)


def ran(mesh, fixed=None, **how):
    """What a choice among meshes gives where it runs, beside what one device gives."""
    args, step = arguments(), stepped(**how)
    choice = vfn.auto(step, *args, mesh=mesh, hardware="cpu", candidates=1, donate_argnums=(0, 1), fixed=fixed)
    placed = vfn.shard(args, choice.mesh() if isinstance(mesh, list) else mesh, choice.specs)
    found = vfn.unshard(choice.jit()(*placed))
    torch.testing.assert_close(found, step(*args), rtol=1e-10, atol=1e-12)
    return choice


def test_a_chosen_pipeline_runs_as_one_device():
    """Its parameters lie at the stages that use them, and the optimiser's state with them; never worse than what is given."""
    with vfn.simulate(4):
        choice = ran(MESHES)
    params, state, _ = choice.specs
    assert state.mean == state.square == params
    assert state.count == P()
    assert all(spec.at for spec in vfn.tree.leaves(params["layers"]))
    at = [dict(one["up"].at)["pp"] for one in params["layers"]]
    assert at == sorted(at)
    assert len(set(at)) > 1
    assert len(dict(params["first"].at).get("pp", MESHES)) > 1  # which the first and the last stage use
    assert choice.predicted.stages
    assert "ranks of stages, 4 microbatches, 1f1b" in repr(choice)
    with pytest.raises(vfn.errors.MeshError):
        choice.jit()(*arguments())
    assert "whole on the ranks of its stages" in repr(choice)
    why = choice.explain("layers.0.up")
    assert "  at pp=0, of stage 0\n" in why
    assert ("of the whole step, were it without stages" in why) == ("dp" in choice.layouts.mesh)
    assert "instead of P(at" not in repr(choice)
    given = vfn.auto(
        stepped(schedule="auto"), *arguments(), mesh={"pp": 4}, hardware="cpu", candidates=1, others={"whole": P()}
    )
    own = [one for one in given.ranked if one.name.startswith("whole")]
    assert len(own) == 2
    assert all(given.predicted.seconds <= one.price.seconds for one in own)


def on_a_rank():
    choice = ran(vfn.make_mesh((2, 2), ("pp", "dp")), (P(), P(), P("dp")), schedule="auto")
    return choice.specs, choice.schedule.placement, choice.schedule.order, choice.predicted.seconds


def test_processes_choose_a_pipeline_and_its_schedule_together(gloo):
    assert len(set(map(repr, gloo(4, on_a_rank)))) == 1


def test_a_schedule_is_chosen_where_the_step_leaves_it_open():
    """By its price, in the memory that there is; a pipeline that says its schedule keeps it."""
    params, state, _ = arguments()
    args = params, state, vfn.ShapeDtype((4096, WIDTH), torch.float64)
    how = {"mesh": {"pp": 2}, "candidates": 1, "hardware": QUICK}
    ask = lambda schedule, **more: vfn.auto(stepped(schedule=schedule, microbatches=8), *args, **how, **more)
    choice = ask("auto")
    assert choice.schedule.placement in ((0, 1), (0, 1, 0, 1), (0, 1, 1, 0))
    own = {}
    for name in ("1f1b", "zb-h1", "zbv"):
        fixed = ask(name)
        assert fixed.schedule is None
        assert f"8 microbatches, {name}" in repr(fixed)
        own[name] = fixed.predicted
    assert choice.predicted.seconds <= 1.001 * min(one.seconds for one in own.values()) < 0.95 * own["1f1b"].seconds
    least = own["1f1b"].peak
    assert least < choice.predicted.peak
    assert ask("auto", memory=least).predicted.peak <= least
    pasted = ask(choice.schedule).predicted
    assert pasted.seconds == choice.predicted.seconds == choice.pasted.seconds


@pytest.mark.parametrize(("flops", "speed", "axis"), [(1e5, 2e4, "pp"), (1e9, 1e12, "dp")])
def test_stages_are_for_slow_links(flops, speed, axis):
    """Activations are less than gradients; and stages wait for each other."""
    hardware = Hardware("links", {"float32": flops}, 1e12, 1e-9, 1e12, (Link(4, (Protocol(0, 1e-9, speed),)),), tile=1)
    choice = vfn.auto(stepped(), *arguments(), mesh=[{"dp": 4}, {"pp": 4}], hardware=hardware, candidates=1)
    assert list(choice.layouts.mesh) == [axis]
    stages = next(one for one in choice.ranked if "pp" in one.layouts.mesh).price.stages
    assert (
        max(one.seconds["F"] for one in stages) < 1.7 * stages[1].seconds["F"]
    )  # cut for this hardware: a layer for each


def test_in_how_many_parts_is_chosen_with_it():
    """Of more parts each is smaller, and the bubble with them; a part costs its launches."""

    def step(params, x, microbatches):
        return vfn.grad(vfn.pipeline(loss, "pp", microbatches=microbatches, cuts=[1]))(params, x)

    params, _, x = arguments()
    meshes = [{"pp": 2}, {"pp": 4}]  # for which it has too few cuts
    for launch, best in ((1e-9, 8), (1e-2, 1)):
        hardware = Hardware(
            "calls", {"float32": 1e9}, 1e12, launch, 1e12, (Link(4, (Protocol(0, 1e-9, 1e12),)),), tile=1
        )
        choice = vfn.auto(step, params, x, mesh=meshes, hardware=hardware, candidates=1, microbatches=(1, 8))
        assert choice.microbatches == best
        assert f"{best} microbatches" in repr(choice)
    with pytest.raises(vfn.errors.TransformError, match="the cuts .* make 2 stages, and the schedule has 4"):
        vfn.auto(step, params, x, mesh={"pp": 4}, candidates=1, microbatches=2)
    with pytest.raises(vfn.errors.SpecError, match="does not fit beside stages on the mesh"):
        vfn.auto(step, params, x, mesh={"pp": 2, "dp": 2}, candidates=1, microbatches=2, fixed=(None, P("pp")))
