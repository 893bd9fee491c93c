"""Stages, and values at places, under `vfn.deterministic`: the same bits however many of the ranks a process plays."""

import os
import signal

import pytest
import test_places
import torch
import torch.distributed as dist
from test_deterministic import bits, played, same_on

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn._core.distributed import teams

WIDTH = 4
OPTIMISER = vfn.optim.chain(vfn.optim.clip_by_global_norm(0.1), vfn.optim.adamw(1e-2))


def initial(key):
    ks = vfn.random.split(key, 5)
    blocks = [0.5 * vfn.random.normal(k, (WIDTH, WIDTH)) for k in ks[1:]]
    return {"table": vfn.random.normal(ks[0], (6, WIDTH)), "blocks": blocks}


def loss(params, ids, key):
    """With a table that the last stage uses as well, and masks."""
    x = torch.nn.functional.embedding(ids, params["table"])
    for w, k in zip(params["blocks"], vfn.random.split(key, 4)):
        x = vfn.cut(torch.tanh(x @ w) * vfn.random.bernoulli(k, 0.8, x.shape))
    return (x @ params["table"].T).float().log_softmax(-1)[..., 0].mean()


CASES = {  # how many groups of processes one is in depends on where it is: in the first, on the others
    "pp": ((4,), ("pp",), P(), "1f1b", "eager"),
    "dp+pp": ((2, 2), ("dp", "pp"), P(), "zb-h1", "jit"),
    "pp+fsdp": ((2, 2), ("pp", "dp"), P("dp"), "interleaved", "eager"),
}


def begun(name):
    """A step, the parameters and the optimiser's state at their places, and a function that gives the batch of a step."""
    sizes, names, spec, schedule, how = CASES[name]
    mesh, key = vfn.make_mesh(sizes, names), vfn.random.key(0)
    f = vfn.precision.policy("params=f32,compute=bf16" if name == "dp+pp" else "params=f32").apply(loss)
    more = {"chunks": 2} if schedule == "interleaved" else {}
    piped = vfn.pipeline(f, "pp", microbatches=4, schedule=schedule, **more)

    def batch(i):
        ids = vfn.shard(torch.arange(24).reshape(8, 3) % 6, mesh, P("dp" if "dp" in names else None))
        return ids, vfn.random.fold_in(key, i)

    def step(params, state, ids, key):
        value, grads = vfn.value_and_grad(piped)(params, ids, key)
        updates, state = OPTIMISER.update(grads, state, params)
        return vfn.optim.apply_updates(params, updates), state, value

    with vfn.use_mesh(mesh):
        shapes = vfn.eval_shape(initial, key)
        specs = piped.specs(shapes, *batch(0), base=vfn.tree.map(lambda _: spec, shapes))
        params = vfn.init(initial, key, spec=specs, mesh=mesh)
    return vfn.jit(step) if how == "jit" else step, (params, OPTIMISER.init(params)), batch


def trained(name):
    step, (params, state), batch = begun(name)
    for i in range(2):
        params, state, value = step(params, state, *batch(i))
    return vfn.digest((params, state, value))


def odd_sums():
    """Of columns that ranks have none of; with a skip connection, and what is turned as it is sent."""
    mesh = vfn.make_mesh((2, 2), ("pp", "tp"))
    ws = [vfn.shard(torch.linspace(-1, 1, 15).reshape(5, 3) * (i + 1), mesh, P(None, "tp")) for i in range(2)]

    def f(ws, x):
        h, kept = vfn.cut(((x @ ws[0]).T, x[1:2]))
        return ((h.T @ ws[0].T + kept) @ ws[1]).square().mean()

    x = torch.linspace(0, 1, 20).reshape(4, 5)
    return vfn.value_and_grad(vfn.pipeline(f, "pp", microbatches=2))(ws, x)


def balanced_cuts():
    """Of a program whose first layers are the same on ranks that a process may play together, and the others not."""
    mesh = vfn.make_mesh((2, 2), ("pp", "dp"))

    def f(ws, y, x):
        for w in ws[:4]:
            x = vfn.cut(torch.tanh(x @ w))
        y = y + x
        for w in ws[4:]:
            y = vfn.cut(torch.tanh(y @ w))
        return y.square().mean()

    x, y = vfn.shard((torch.ones(1, 4), torch.ones(4, 4)), mesh, (P(), P("dp")))
    piped = vfn.pipeline(f, "pp", microbatches=2)
    vfn.grad(piped)(vfn.shard([torch.eye(4)] * 8, mesh, P()), y, x=x)
    return [*next(iter(piped._plans.values())).stages.behind]


def everything():
    mesh = vfn.make_mesh((2, 2), ("pp", "tp"))
    found = {name: trained(name) for name in CASES}
    few = [P("tp", at={"pp": 0}), P(at={"pp": (0, 1)}), P("tp", unreduced={"pp"})]
    assert not test_places.moved(mesh, few)
    of_places = test_places.program(mesh), test_places.training(mesh, jit=True)
    test_places.same(of_places[0])
    return {
        **found,
        "places": vfn.digest(of_places),
        "odd": list(map(bits, vfn.tree.leaves(odd_sums()))),
        "cuts": balanced_cuts(),
    }


def test_any_number_of_processes_has_the_same_bits(gloo) -> None:
    same_on(gloo, (2, 4), 4, everything)


def without_stages(piped: bool):
    """The gradients on a mesh of as many ranks, of which those along one axis do the same, or have stages."""
    mesh = vfn.make_mesh((2, 2), ("pp" if piped else "copies", "dp"))
    ids = vfn.shard(torch.arange(24).reshape(8, 3) % 6, mesh, P("dp"))
    params = vfn.shard(initial(vfn.random.key(0)), mesh, P())
    f = vfn.pipeline(loss, "pp", microbatches=4) if piped else vfn.optim.microbatches(vfn.value_and_grad(loss), 4)
    return (vfn.value_and_grad(f) if piped else f)(params, ids, vfn.random.key(1))


def test_what_one_stage_uses_has_the_bits_of_microbatches() -> None:
    with vfn.deterministic(4):
        (value, grads), (wanted, others) = without_stages(True), without_stages(False)
        assert vfn.digest((value, grads["blocks"])) == vfn.digest((wanted, others["blocks"]))
        torch.testing.assert_close(vfn.unshard(grads["table"]), vfn.unshard(others["table"]))


def running(folder=None):
    """A run with stages, of which a process is killed in the middle of a step."""
    step, state, batch = [], [], []

    def begin():
        for kept, made in zip((step, state, batch), begun("pp+fsdp")):
            kept[:] = [made]
        return state[0]

    def taken(at, i):
        if folder is not None and i == 2 and dist.get_rank() == 3 and not (folder / "killed").exists():
            (folder / "killed").touch()
            signal.setitimer(signal.ITIMER_REAL, 0.01)  # its default is to end the process, as a kill does
        *at, value = step[0](*at, *batch[0](i))
        return tuple(at), value

    return vfn.digest(vfn.elastic(taken, begin, lambda i: i, steps=4, virtual=4))


def test_a_run_with_stages_goes_on_where_a_process_is_killed(tmp_path, capfd) -> None:
    found = vfn.launch(running, 4, tmp_path, device="cpu", restarts=1)
    assert found == [running()] * 4
    assert "rank 3 of 4 was killed by SIGALRM" in capfd.readouterr().err
    assert os.listdir(tmp_path) == ["killed"]


def test_which_ranks_of_each_stage_a_process_plays() -> None:
    mesh = (("a", 2), ("pp", 4), ("b", 2))
    assert teams.shares(mesh, ("pp",), 16)[5] == ((2,), (1, 2))
    assert teams.shares(mesh, ("pp",), 4)[3] == ((2, 3), (2, 4))
    assert teams.shares(mesh, ("pp",), 2)[1] == ((0, 1, 2, 3), (2, 4))
    assert teams.shares((("a", 2), ("pp", 3)), ("pp",), 2) == (((0, 1, 2), (0, 1)), ((0, 1, 2), (1, 2)))
    assert teams.shares((("a", 2), ("pp", 3)), ("pp",), 3) is None  # the second would have the last place and the first


def noted(folder):
    with vfn.deterministic(4, check=folder):
        return vfn.digest(odd_sums())


def test_a_run_with_stages_is_compared_with_the_one_before_it(gloo, tmp_path) -> None:
    assert gloo(2, noted, str(tmp_path)) == [noted(str(tmp_path))] * 2  # on two processes it is the second one


def parted():
    mesh = vfn.make_mesh((3, 2), ("pp", "dp"))
    said = []
    for place in (lambda: vfn.shard(torch.ones(2), mesh, P(at={"pp": 1})), lambda: run(mesh)):
        with pytest.raises(vfn.errors.MeshError) as error:
            place()
        said.append(str(error.value))
    return said


def run(mesh):
    piped = vfn.pipeline(lambda ws, x: vfn.cut(vfn.cut(x @ ws[0]) @ ws[1]).sum(), "pp", microbatches=2)
    return vfn.grad(piped)(vfn.shard([torch.eye(2)] * 2, mesh, P()), torch.ones(2, 2))


def test_processes_that_would_play_other_ranks_at_each_stage_are_refused(gloo) -> None:
    text = (
        "mesh: 2 processes that play the mesh (pp=3, dp=2) do not play the same ranks at each place of 'pp'\n"
        "  Instead: 1, 3 or 6 processes"
    )
    assert gloo(2, played, 6, parted) == [[text] * 2] * 2
