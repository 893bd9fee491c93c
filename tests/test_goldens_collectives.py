"""Every collective, and the gradients in and around `shard_map`, against JAX's numbers (made by jax 0.10.2).

Beside JAX's cotangents the file holds the transpose found by brute force, from the map of basis vectors: where JAX's
own gradient crashes (untiled `all_to_all` between different dims), ours is compared with that.
"""

import json
import math
from pathlib import Path

import pytest
import torch

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn.errors import CollectiveError

GOLDENS = json.loads((Path(__file__).parent / "goldens" / "collectives.json").read_text())
CASES = {case["name"]: case for case in GOLDENS["collectives"]}
GRADS = {case["name"]: torch.tensor(case["value"]) for case in GOLDENS["grad"]}
RING = [(0, 1), (1, 2), (2, 3), (3, 0)]

# The body that each case was made with.
BODIES = {
    "psum": lambda x: vfn.psum(x, "i"),
    "psum_of_invarying": lambda x: vfn.psum(x, "i"),
    "pmean": lambda x: vfn.pmean(x, "i"),
    "pmax": lambda x: vfn.pmax(x, "i"),
    "all_gather_untiled_axis0": lambda x: vfn.all_gather(x, "i"),
    "all_gather_untiled_axis1": lambda x: vfn.all_gather(x, "i", axis=1),
    "all_gather_tiled_axis0": lambda x: vfn.all_gather(x, "i", tiled=True),
    "all_gather_tiled_axis1": lambda x: vfn.all_gather(x, "i", axis=1, tiled=True),
    "all_gather_invarying_tiled": lambda x: vfn.all_gather(x, "i", tiled=True, to="invarying"),
    "psum_scatter_untiled": lambda x: vfn.psum_scatter(x, "i"),
    "psum_scatter_tiled": lambda x: vfn.psum_scatter(x, "i", tiled=True),
    "psum_scatter_tiled_dim1": lambda x: vfn.psum_scatter(x, "i", scatter_dimension=1, tiled=True),
    "psum_scatter_tiled_bad": lambda x: vfn.psum_scatter(x, "i", tiled=True),
    "psum_scatter_untiled_bad": lambda x: vfn.psum_scatter(x, "i"),
    "all_to_all_untiled_0_0": lambda x: vfn.all_to_all(x, "i", 0, 0),
    "all_to_all_untiled_0_1": lambda x: vfn.all_to_all(x, "i", 0, 1),
    "all_to_all_untiled_1_0": lambda x: vfn.all_to_all(x, "i", 1, 0),
    "all_to_all_tiled_0_1": lambda x: vfn.all_to_all(x, "i", 0, 1, tiled=True),
    "all_to_all_tiled_1_0": lambda x: vfn.all_to_all(x, "i", 1, 0, tiled=True),
    "all_to_all_tiled_0_0": lambda x: vfn.all_to_all(x, "i", 0, 0, tiled=True),
    "all_to_all_untiled_bad": lambda x: vfn.all_to_all(x, "i", 0, 0),
    "ppermute_ring": lambda x: vfn.ppermute(x, "i", RING),
    "ppermute_partial": lambda x: vfn.ppermute(x, "i", [(0, 1), (1, 2)]),
    "ppermute_dup_src": lambda x: vfn.ppermute(x, "i", [(0, 1), (0, 2)]),
    "axis_index_scale": lambda x: x * vfn.axis_index("i"),
    "tile_from_invarying": lambda x: x,
    "unmentioned_varying_out": lambda x: x,
    "unmentioned_varying_out_nocheck": lambda x: x,
    "psum_nocheck": lambda x: vfn.psum(x, "i"),
    "uneven_in": lambda x: x,
    "rank_too_low": lambda x: x,
    "2d_psum_one_axis": lambda x: vfn.psum(x, "x"),
    "2d_psum_both": lambda x: vfn.psum(x, ("x", "y")),
    "2d_all_gather_xy": lambda x: vfn.all_gather(x, ("x", "y"), tiled=True),
    "2d_all_gather_yx": lambda x: vfn.all_gather(x, ("y", "x"), tiled=True),
    "2d_psum_scatter_xy": lambda x: vfn.psum_scatter(x, ("x", "y"), tiled=True),
    "2d_psum_scatter_yx": lambda x: vfn.psum_scatter(x, ("y", "x"), tiled=True),
}


def mapped(case, body):
    """The case's `shard_map`, and its argument."""
    mesh = vfn.make_mesh((2, 4), ("x", "y")) if case["name"].startswith("2d") else vfn.make_mesh((4,), ("i",))
    specs = {key: eval(case[key], {"P": P}) for key in ("in_spec", "out_spec")}
    f = vfn.shard_map(
        body, mesh=mesh, in_specs=specs["in_spec"], out_specs=specs["out_spec"], check_vma=case["check_vma"]
    )
    return f, torch.arange(float(math.prod(case["in_shape"]))).view(case["in_shape"])


def test_each_case_has_a_body():
    assert BODIES.keys() == CASES.keys()


@pytest.mark.filterwarnings("ignore:vfn.psum over")
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "out" in case])
def test_value_and_cotangent(name):
    case = CASES[name]
    with vfn.simulate(8 if name.startswith("2d") else 4):
        f, x = mapped(case, BODIES[name])
        out, pullback = vfn.vjp(lambda x: vfn.unshard(f(x)), x)
        torch.testing.assert_close(out, torch.tensor(case["out"]), rtol=0, atol=0)
        ct = 1 + torch.arange(float(out.numel())).view(out.shape)
        if name == "pmax":
            with pytest.raises(CollectiveError, match="no derivative"):
                pullback(ct)
            return
        (found,) = pullback(ct)
        wanted = case["in_ct"] if "in_ct" in case else case["in_ct_bruteforce"]
        torch.testing.assert_close(found, torch.tensor(wanted), rtol=0, atol=0)
        if case.get("vjp_equals_bruteforce"):
            torch.testing.assert_close(found, torch.tensor(case["in_ct_bruteforce"]), rtol=0, atol=0)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "out" not in case])
def test_what_jax_refuses_is_refused(name):
    with vfn.simulate(4):
        f, x = mapped(CASES[name], BODIES[name])
        with pytest.raises(ValueError):  # what each says is in test_collectives.py and test_shard_map.py
            f(x)


@pytest.mark.parametrize("row", GOLDENS["order"], ids=lambda row: row["spec"])
def test_layout_of_ordered_specs(row):
    with vfn.simulate(8):
        mesh = vfn.make_mesh([size for _, size in row["mesh"]], [name for name, _ in row["mesh"]])
        x = torch.arange(64).view(row["shape"])
        blocks = vfn.shard(x, mesh, eval(row["spec"], {"P": P})).to_local().blocks
        for block, ((r0, r1), (c0, c1)) in zip(blocks, row["slices_by_flat_device"], strict=True):
            assert torch.equal(block, x[r0:r1, c0:c1])


def loss(w, d):
    return (w * d).sum()


def total(w, d):
    return vfn.psum(loss(w, d), "i")


def programs(grad, outer):
    """The rows of the table of gradients, with an inner and an outer gradient: (body, out_specs, check, outer?)."""
    return {
        "outside: grad of shard_map(psum loss)": (total, P(), True, True),
        "inside: grad of local loss wrt invarying w": (lambda w, d: grad(loss)(w, d), P(), True, False),
        "inside: grad of psum loss wrt invarying w": (lambda w, d: grad(total)(w, d), P(), True, False),
        "inside: grad of local loss then psum (double count)": (
            lambda w, d: vfn.psum(grad(loss)(w, d), "i"),
            P(),
            True,
            False,
        ),
        "inside: pcast w to varying, grad, per-shard": (
            lambda w, d: grad(loss)(vfn.pcast(w, "i", to="varying"), d)[None],
            P("i"),
            True,
            False,
        ),
        "inside: pcast w to varying, grad, psum": (
            lambda w, d: vfn.psum(grad(loss)(vfn.pcast(w, "i", to="varying"), d), "i"),
            P(),
            True,
            False,
        ),
        "check_vma=False outside psum loss": (total, P(), False, True),
        "check_vma=False inside local loss per shard": (lambda w, d: grad(loss)(w, d)[None], P("i"), False, False),
        "check_vma=False inside psum loss per shard": (lambda w, d: grad(total)(w, d)[None], P("i"), False, False),
        "psum of python 1": (lambda w, d: w / w * vfn.psum(1, "i"), P(), True, False),
    }


@pytest.mark.filterwarnings("ignore:vfn.psum over")
@pytest.mark.parametrize("grad", [vfn.grad, torch.func.grad], ids=["vfn", "torch.func"])
@pytest.mark.parametrize("name", GRADS)
def test_gradients(name, grad):
    body, out_specs, check, outer = programs(grad, grad)[name]
    with vfn.simulate(4):
        mesh = vfn.make_mesh((4,), ("i",))
        f = vfn.shard_map(body, mesh=mesh, in_specs=(P(), P("i")), out_specs=out_specs, check_vma=check)
        w, d = torch.tensor(2.0), torch.arange(1.0, 5.0)
        found = grad(lambda w: vfn.unshard(f(w, d)))(w) if outer else vfn.unshard(f(w, d))
        torch.testing.assert_close(found, GRADS[name], rtol=0, atol=0)


@pytest.mark.parametrize("grad", [vfn.grad, torch.func.grad], ids=["vfn", "torch.func"])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("check", [True, False])
def test_second_order(grad, inside, check):
    d, w = torch.arange(8.0), torch.tensor(1.0)
    with vfn.simulate(4):
        mesh = vfn.make_mesh((4,), ("i",))

        def f(w, d):
            return vfn.psum(torch.sin(w * d).sum(), "i")

        def local(w, d):  # without types, a gradient inside a body is each rank's own
            return torch.sin(w * d).sum()

        specs = dict(mesh=mesh, in_specs=(P(), P("i")), out_specs=P(), check_vma=check)
        if not inside:
            g = vfn.shard_map(f, **specs)
            found = grad(grad(lambda w: vfn.unshard(g(w, d))))(w)
        elif check:
            found = vfn.unshard(vfn.shard_map(grad(grad(f)), **specs)(w, d))
        else:
            found = vfn.unshard(vfn.shard_map(lambda w, d: vfn.psum(grad(grad(local))(w, d), "i"), **specs)(w, d))
        torch.testing.assert_close(found, -(d**2 * torch.sin(w * d)).sum())
        assert abs(found.item() - 8.1998) < 1e-4
