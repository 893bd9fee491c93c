"""Files that users have: pickles, `torch.save` files and a checkpoint, written by 0.1.0 on a simulated mesh (dp=2, tp=2).

Nothing writes `goldens/files_of_0_1` anew: these files must load whatever the modules are called by then.
"""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import vescale_fn as vfn
from vescale_fn import P

FILES = Path(__file__).parent / "goldens" / "files_of_0_1"
X = torch.arange(24.0).view(4, 6)


def same(loaded: Any, made: Any) -> None:
    """The same type, layout, printed form and bits; what holds no tensors only prints alike."""
    assert type(loaded) is type(made)
    assert repr(loaded) == repr(made)
    if isinstance(made, vfn.random.Key):
        assert (loaded == made).all()
    if isinstance(made, torch.Tensor):
        assert vfn.spec_of(loaded) == vfn.spec_of(made)
        torch.testing.assert_close(vfn.unshard(loaded), vfn.unshard(made), rtol=0, atol=0)


def made(mesh: Any) -> dict[str, Any]:
    x = vfn.shard(X, mesh, P("dp", "tp"))
    sums = vfn.shard_map(
        lambda a: vfn.pcast(a.sum(0), "dp", to="unreduced"), mesh=mesh, in_specs=P("dp"), out_specs=P(unreduced={"dp"})
    )
    return {
        "array": x,
        "parameter": torch.nn.Parameter(vfn.shard(X + 1, mesh, P(None, "tp"))),
        "nested axes": vfn.shard(X + 2, mesh, P(("dp", "tp"))),
        "partial sums": sums(x),
        "reduced": x.sum(),
        "merged dim": x.reshape(24),
        "mesh": mesh,
        "spec": P(None, ("dp", "tp"), unreduced={"x"}),
        "spec of a merged dim": vfn.spec_of(x.reshape(24)),
    }


def pickled(name: str) -> Any:
    return pickle.loads((FILES / f"{name}.pickle").read_bytes())


def saved(name: str) -> Any:
    return torch.load(FILES / f"{name}.pt", weights_only=name == "values")


@pytest.mark.parametrize("read", [pickled, saved])
def test_values(read: Any) -> None:
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
        loaded, expected = read("values"), made(mesh)
        assert loaded["mesh"] is mesh
        assert list(loaded) == list(expected)
        for name, value in expected.items():
            same(loaded[name], value)


@pytest.mark.parametrize("read", [pickled, saved])
def test_states_of_optimisers_and_what_else_is_kept(read: Any) -> None:
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
        params = {"w": vfn.shard(X, mesh, P("dp", "tp")), "b": torch.ones(3)}
        loaded = read("others")
        others = loaded.pop("others")
        clipped, adam = loaded.pop("adamw")
        assert clipped is None
        assert {name: type(state).__name__ for name, state in (loaded | {"adamw": adam}).items()} == {
            "sgd": "SgdState",
            "lion": "LionState",
            "ema": "tuple",
            "accumulate": "AccumulateState",
            "adafactor": "AdafactorState",
            "scaled": "ScaledState",
            "master": "MasterState",
            "from_torch": "TorchState",
            "muon": "MuonState",
            "adamw": "AdamState",
        }
        same(loaded["ema"][1].average["w"], params["w"])
        same(loaded["sgd"].momentum["w"], vfn.grad(lambda w: (w**2).sum())(params["w"]))
        grads = {"w": params["w"], "b": torch.ones(3)}
        _, later = vfn.optim.adamw(0.1).update(grads, adam, params)  # a state that was loaded goes on
        assert int(later.count) == 2
        assert vfn.spec_of(later.mean["w"]) == P("dp", "tp")
    same(others["key"], vfn.random.key(7))
    same(others["keys"], vfn.random.split(vfn.random.key(7), 3))
    assert (type(others["error"]), others["error"].args) == (vfn.errors.SpecError, ("a", "b"))
    assert others["policy"] == vfn.precision.policy()
    assert type(others["routes"]) is vfn.nn.Routes
    function, weights = others["function of a module"], {"weight": torch.ones(3, 2), "bias": torch.ones(3)}
    assert function(weights, torch.ones(2)).tolist() == [3.0, 3.0, 3.0]


def test_a_checkpoint() -> None:
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
        params = {"w": vfn.shard(torch.zeros(4, 6), mesh, P("tp", "dp")), "b": torch.zeros(3)}
        state = vfn.optim.chain(vfn.optim.clip_by_global_norm(1.0), vfn.optim.adamw(0.1)).init(params)
        like = {"params": params, "state": state, "key": vfn.random.key(0), "step": 0}
        loaded = vfn.load(FILES / "checkpoint", like)
        same(loaded["params"]["w"], vfn.shard(X, mesh, P("tp", "dp")))
        assert (loaded["step"], bool(loaded["key"] == vfn.random.key(7))) == (3, True)
        clipped, kept = pickled("others")["adamw"]
        assert (clipped, type(loaded["state"][1])) == (None, type(kept))
        torch.testing.assert_close(
            vfn.unshard(loaded["state"][1].square["w"]), vfn.unshard(kept.square["w"]), rtol=0, atol=0
        )
