"""What `shard` and `from_local` take besides tensors, what ranks must agree on, and whose memory a result is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import vescale_fn as vfn
from vescale_fn import P


def simulated() -> object:
    vfn.simulate(4)
    return vfn.make_mesh((4,), ("i",))


def test_numpy_arrays_are_laid_out() -> None:
    mesh, x = simulated(), np.arange(8.0)
    for array in (
        vfn.shard({"x": x}, mesh, P("i"))["x"],
        vfn.with_sharding(x, P("i"), mesh=mesh),
        vfn.from_local(lambda coord: x[2 * coord["i"] : 2 * coord["i"] + 2], mesh, P("i")),
    ):
        assert vfn.spec_of(array) == P("i")
        np.testing.assert_array_equal(np.asarray(array), x)


def test_what_a_partial_value_adds_up_to_is_not_given_away() -> None:
    mesh = simulated()
    partial = vfn.shard(torch.eye(4), mesh, P(None, "i")) @ vfn.shard(torch.ones(4, 4), mesh, P("i"))
    for give in (vfn.unshard, lambda x: torch.from_numpy(x.numpy())):
        give(partial).mul_(0)
        assert partial.sum().item() == vfn.unshard(partial).sum().item() == 16
        torch.testing.assert_close(vfn.unshard(partial.exp()), torch.ones(4, 4).exp())


def _different_trees() -> str:
    mesh = vfn.make_mesh((2,), ("i",))
    tree = {"a": torch.ones(2)} | ({"b": torch.ones(2)} if torch.distributed.get_rank() else {})
    with pytest.raises(vfn.errors.SpecError) as error:
        vfn.from_local(tree, mesh, P("i"))
    return str(error.value)


def _one_bad_spec() -> str:
    mesh = vfn.make_mesh((2,), ("i",))
    spec = {"a": P("i")} if torch.distributed.get_rank() else {"b": P()}
    tree = {"a": torch.ones(2)}
    with pytest.raises(vfn.errors.SpecError) as error:
        vfn.from_local(tree, mesh, spec)
    return str(error.value)


@pytest.mark.gloo
def test_ranks_that_bring_different_trees_all_raise(gloo) -> None:
    said = """\
from_local: the ranks must bring trees of one structure
  * rank 0 brings ["tree['a']"]
  * rank 1 brings ["tree['a']", "tree['b']"]"""
    assert gloo(2, _different_trees) == [said, said]


@pytest.mark.gloo
def test_ranks_of_which_one_fails_all_raise(gloo) -> None:
    own, other = gloo(2, _one_bad_spec)
    assert own.startswith("from_local: spec is not a prefix of tree")
    assert "rank 0 fails: from_local: spec is not a prefix of tree" in other


@pytest.mark.parametrize("spec", [P("i"), P(None, "i"), P()], ids=repr)
def test_two_views_of_one_memory_written_in_one_call(spec: P) -> None:
    a = vfn.shard(torch.arange(16.0).view(4, 4), simulated(), spec).clone()
    torch._foreach_add_([a, a.t()], 1.0)
    torch.testing.assert_close(vfn.unshard(a), torch.arange(16.0).view(4, 4) + 2)


def test_blocks_that_lie_in_memory_in_another_order_on_some_ranks() -> None:
    whole = torch.arange(12.0).view(4, 3)
    parts = whole[:2], whole[2:].t().contiguous().t()
    with vfn.simulate(2):
        x = vfn.from_local(lambda at: parts[at["dp"]], vfn.make_mesh((2,), ("dp",)), P("dp"))
    assert all(block.is_contiguous() for block in x.to_local().blocks)
    assert torch.equal(vfn.unshard(x.view(12)), whole.view(12))
