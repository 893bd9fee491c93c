"""Loops, branches and rules of one's own give what live JAX gives, and refuse what it refuses: small calls and sampled programs."""

import json

import loops
import pytest
import torch
from test_derivatives import lib as names

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn.errors import VfnError

GOLDENS = json.loads(loops.GOLDENS.read_text())


class lib(names):
    lax = vfn.lax


def array(x):
    out = torch.tensor(x)
    return out.double() if out.is_floating_point() else out


@pytest.fixture(autouse=True)
def as_in_jax():
    """Where 64 bits are enabled."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def check(found, golden):
    """Equal up to rounding, dtypes included. What jax refuses without running it may have a value here."""
    if isinstance(golden, str):
        return
    assert found != "error"
    if golden and isinstance(golden[0], str):
        assert found[0] == golden[0]
        assert found[0].startswith(("bool", "int")) is False or found[1] == golden[1]
        torch.testing.assert_close(array(found[1]), array(golden[1]), rtol=1e-9, atol=1e-10)
    elif golden:
        assert len(found) == len(golden)
        for one, other in zip(found, golden, strict=True):
            check(one, other)
    else:
        assert found == golden


@pytest.mark.filterwarnings("ignore:jit:UserWarning")  # of conditions that are read
@pytest.mark.parametrize("name", GOLDENS["small"])
def test_small(name):
    golden = GOLDENS["small"][name]
    for wrap in (lambda f: f, vfn.jit):
        found = loops.found(wrap(loops.small(lib, torch, array)[name]), (VfnError,))
        assert (found == "error") == (golden == "error"), found
        check(found, golden)


def on_one(way, program):
    given, tangents = loops.states(array)
    return way(lib, torch, program, given, tangents)


def by_plan(way, program):
    return vfn.jit(lambda given, tangents: way(lib, torch, program, given, tangents))(*loops.states(array))


def in_body(way, program):
    with vfn.simulate(2):
        body = lambda given, tangents: way(lib, torch, program, given, tangents)
        mapped = vfn.shard_map(body, mesh=vfn.make_mesh((2,), ("i",)), in_specs=P(), out_specs=P())
        return vfn.unshard(mapped(*loops.states(array)))


WHERE = {"on one": (on_one, GOLDENS["sampled"]), "by plan": (by_plan, ["1", "4"]), "in a body": (in_body, ["2", "7"])}


@pytest.mark.filterwarnings("ignore:jit:UserWarning")
@pytest.mark.parametrize(("where", "seed"), [(where, seed) for where, (_, seeds) in WHERE.items() for seed in seeds])
def test_sampled_programs(where, seed):
    """Their values, and derivatives, in each way."""
    for name, way in loops.WAYS.items():
        found = loops.found(lambda way=way: WHERE[where][0](way, loops.sampled(int(seed))), (VfnError,))
        check(found, GOLDENS["sampled"][seed][name])
