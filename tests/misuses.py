"""Mistakes, each with all that is said of it: the class of the error, or of the warning, then its text.

A function here is one mistake, its docstring what the user reads. The error is of its last line, or of the one that is
marked ``# here``. `test_messages.py` runs them.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from torch.distributed import _functional_collectives as functional
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import vescale_fn as vfn
from vescale_fn import P

X = torch.arange(12.0).view(4, 3)
KEY = vfn.random.key(0)
MISUSES = []


def misuse(f):
    MISUSES.append(f)
    return f


def mapped(mesh, body, in_specs=P("dp"), out_specs=P("dp"), **more):
    return vfn.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **more)


def unreduced(x):
    return vfn.pcast(x, "dp", to="unreduced")


def params():
    return {"blocks": [{"w": torch.ones(4, 6), "b": torch.ones(6)}], "scale": torch.ones(())}


# --- meshes and ranks -------------------------------------------------------------------------------------------------


@misuse
def a_mesh_of_more_ranks_than_there_are(mesh):
    """MeshError
    make_mesh: dp=2 x tp=4 = 8 ranks, but there are 4 ranks. Three ways to get them
      * vfn.simulate(8)                  this process plays all ranks (notebooks, tests)
      * vfn.launch(fn, 8)                8 processes started from here, each running fn
      * torchrun --nproc-per-node 8 your.py 8 processes started from the shell
    """
    vfn.make_mesh((2, 4), ("dp", "tp"))


@misuse
def a_mesh_without_names(mesh):
    """MeshError
    make_mesh: the shape and the names do not make a mesh
      * shape (2, 2.0) has 2 sizes, but names ('dp',) has 1
      * size 2.0 is not a positive integer (or one -1)
      Instead: for instance make_mesh((2, 4), ("dp", "tp"))
    """
    vfn.make_mesh((2, 2.0), "dp")


@misuse
def a_mesh_that_is_none(mesh):
    """MeshError
    use_mesh: the mesh must be a DeviceMesh, but it is (2, 2)
      Instead: mesh = vfn.make_mesh((2, 4), ("dp", "tp"))
    """
    vfn.use_mesh((2, 2))


@misuse
def a_part_of_a_mesh_by_no_axis(mesh):
    """MeshError
    mesh[...]: 'pt' does not name axes of the mesh (dp=2, tp=2)
      * 'pt' is no axis; did you mean 'tp'?
      Instead: names among ('dp', 'tp'), in this order, each once
    """
    _ = mesh["pt"]


@misuse
def the_number_of_a_simulated_rank(mesh):
    """MeshError
    get_rank: the ranks are simulated: this process plays all of them, and torch has no process group
      Instead: vfn.axis_index(axis) in a shard_map body: a tensor, of another value on each rank
    """
    mapped(mesh, lambda x: x * torch.distributed.get_rank())(X)


@misuse
def a_collective_of_torchs_among_simulated_ranks(mesh):
    """MeshError
    all_reduce: the ranks are simulated: this process plays all of them, and torch has no process group
      Instead: vfn.psum(x, axis) in a shard_map body, or pmax, pmin, pmean; in the global view torch.sum is the whole sum
    """
    torch.distributed.all_reduce(X)


@misuse
def a_collective_of_torchs_by_the_name_of_an_axis(mesh):
    """MeshError
    all_reduce: the ranks are simulated: this process plays all of them, and torch has no process group
      Instead: vfn.psum(x, axis) in a shard_map body, or pmax, pmin, pmean; in the global view torch.sum is the whole sum
    """
    mapped(mesh, lambda x: torch.distributed.all_reduce(x, group="dp"))(X)


@misuse
def a_functional_collective_by_the_dim_of_a_mesh(mesh):
    """MeshError
    all_gather_tensor: the ranks are simulated: this process plays all of them, and torch has no process group
      Instead: vfn.all_gather(x, axis) in a shard_map body; vfn.unshard(x) for a whole array
    """
    mapped(mesh, lambda x: functional.all_gather_tensor(x, 0, (mesh, 0)))(X)


@misuse
def a_functional_collective_of_an_array(mesh):
    """MeshError
    all_reduce: the ranks are simulated: this process plays all of them, and torch has no process group
      Instead: vfn.psum(x, axis) in a shard_map body, or pmax, pmin, pmean; in the global view torch.sum is the whole sum
    """
    functional.all_reduce(vfn.shard(X, mesh, P("dp")), "sum", "dp")


@misuse
def the_group_of_a_simulated_mesh(mesh):
    """MeshError
    get_group: the ranks of the mesh (dp=2, tp=2) are simulated: this process plays all of them, and torch has no process group
      Instead: the name of the axis: vfn.psum(x, 'tp') in a shard_map body
    """
    mesh.get_group("tp")


@misuse
def a_place_on_a_simulated_mesh(mesh):
    """MeshError
    get_local_rank: the ranks of the mesh (dp=2, tp=2) are simulated: this process plays all of them, and torch has no process group
      Instead: vfn.axis_index(axis) in a shard_map body: a tensor, of another value on each rank
    """
    mesh.get_local_rank("tp")


@misuse
def a_tensor_distributed_over_simulated_ranks(mesh):
    """MeshError
    distribute_tensor: the ranks of the mesh (dp=2, tp=2) are simulated: this process plays all of them, and torch has no process group
      Instead: vfn.shard(x, mesh, spec): P('dp') for [Shard(0), Replicate()] on a mesh of 'dp' and 'tp'
    """
    distribute_tensor(X, mesh, [Shard(0), Replicate()])


@misuse
def a_dtensor_of_one_ranks_block_on_a_simulated_mesh(mesh):
    """MeshError
    from_local: the ranks of the mesh (dp=2, tp=2) are simulated: this process plays all of them, and torch has no process group
      Instead: vfn.from_local(lambda coord: ..., mesh, spec), which is asked for each rank's block
    """
    DTensor.from_local(X, mesh, [Shard(0), Replicate()])


@misuse
def fsdp_on_simulated_ranks(mesh):
    """MeshError
    fully_shard: the ranks of the mesh (dp=2, tp=2) are simulated: this process plays all of them, and torch has no process group
      Instead: f, params = vfn.module_function(module), and vfn.shard(params, mesh, rules): vfn.fsdp_specs splits every parameter, f.gathering(specs) gathers each where it is read; the module stays as it is
    """
    fully_shard(torch.nn.Linear(3, 4), mesh=mesh)


@misuse
def ddp_on_simulated_ranks(mesh):
    """MeshError
    DistributedDataParallel: the ranks are simulated: this process plays all of them, and torch has no process group
      Instead: f, params = vfn.module_function(module), and vfn.shard(params, mesh, rules): params are replicated by P(), and the batch is split by P('dp'); the module stays as it is
    """
    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 4))


@misuse
def a_module_parallelized_over_simulated_ranks(mesh):
    """MeshError
    parallelize_module: the ranks of the mesh (tp=4) are simulated: this process plays all of them, and torch has no process group
      Instead: f, params = vfn.module_function(module), and vfn.shard(params, mesh, rules): rules split weights, (r"up\\.weight", P("tp")); the module stays as it is
    """
    parallelize_module(torch.nn.Linear(3, 4), vfn.make_mesh((4,), ("tp",)), ColwiseParallel())


@misuse
def a_launch_of_a_result(mesh):
    """MeshError
    launch: fn must be a function, but it is the tensor f32[]
      Instead: launch(fn, nprocs, *args); args are what it is called with
    """
    vfn.launch(X.sum(), 4)


# --- specs ------------------------------------------------------------------------------------------------------------


@misuse
def a_dim_in_a_spec(mesh):
    """SpecError
    P: an entry must be None, an axis name or a tuple of axis names, but one is 0
      Instead: for instance P("dp", None, ("dp", "tp"))
    """
    P(0, "dp")


@misuse
def a_spec_in_a_spec(mesh):
    """SpecError
    P: an entry must be None, an axis name or a tuple of axis names, but one is P('dp')
      Instead: P(*spec, ...) takes over the entries of spec = P('dp')
    """
    P(P("dp"), None)


@misuse
def a_flag_for_axes(mesh):
    """SpecError
    P: unreduced must be a set of axis names, but it is the bool True
      Instead: for instance P(unreduced={"dp"})
    """
    P(unreduced=True)


@misuse
def axes_that_a_mesh_has_not(mesh):
    """SpecError
    shard: 3 specs do not fit on the mesh (dp=2, tp=2)
      * tree['blocks'][0]['b'] is f32[6], its spec P('pd'): axis 'pd' (dim 0) is not an axis of the mesh (dp=2, tp=2); did you mean 'dp'?
      * tree['blocks'][0]['w'] is f32[4,6], its spec P('pd'): axis 'pd' (dim 0) is not an axis of the mesh (dp=2, tp=2); did you mean 'dp'?
      * tree['scale'] is f32[], its spec P('dp'): it has 1 entry, but the value has 0 dims
      Instead: each axis of the mesh at most once, and at most one entry a dim
    """
    tree = params()
    vfn.shard(tree, mesh, {"blocks": P("pd"), "scale": P("dp")})


@misuse
def an_axis_used_twice(mesh):
    """SpecError
    shard: 1 spec does not fit on the mesh (dp=2, tp=2)
      * X is f32[4,3], its spec P('dp', 'dp'): axis 'dp' is used twice: for dim 0 and for dim 1
      Instead: each axis of the mesh at most once, and at most one entry a dim
    """
    vfn.shard(X, mesh, P("dp", "dp"))


@misuse
def a_spec_longer_than_its_value(mesh):
    """SpecError
    with_sharding: 1 spec does not fit on the mesh (dp=2, tp=2)
      * X is f32[4,3], its spec P('dp', None, 'tp'): it has 3 entries, but the value has 2 dims
      Instead: each axis of the mesh at most once, and at most one entry a dim
    """
    vfn.with_sharding(X, P("dp", None, "tp"), mesh=mesh)


@misuse
def a_name_for_a_spec(mesh):
    """SpecError
    shard: spec must be a vfn.P, but it is the str 'dp'
      Instead: vfn.P('dp')
    """
    vfn.shard(X, mesh, "dp")


@misuse
def none_for_a_spec(mesh):
    """SpecError
    shard: spec must be a vfn.P, but it is None
      Instead: vfn.P() for a value that every rank holds whole
    """
    vfn.shard(X, mesh, None)


@misuse
def the_spec_before_the_mesh(mesh):
    """MeshError
    shard: the mesh and the spec have changed places
      * mesh is P('dp')
      * spec is the mesh (dp=2, tp=2)
      Instead: vfn.shard(tree, mesh, spec)
    """
    vfn.shard(X, P("dp"), mesh)


@misuse
def a_tensor_without_values(mesh):
    """SpecError
    shard: 1 spec does not fit on the mesh (dp=2, tp=2)
      * the value is f32[4,3], its spec P('dp'): it is on the meta device, so it has no values to lay out
      Instead: a tensor with values: made on a device, drawn with spec=, or loaded; for shapes alone vfn.ShapeDtype
    """
    vfn.shard(X.to("meta"), mesh, P("dp"))


@misuse
def dims_for_placements(mesh):
    """SpecError
    redistribute: placements must be torch's Shard(dim), Replicate() or Partial(), but there is 1, 2
      Instead: vfn.with_sharding(x, spec), which takes a P
    """
    x = vfn.shard(X, mesh, P("dp"))
    x.redistribute(mesh, [1, 2])


@misuse
def a_spec_for_placements(mesh):
    """SpecError
    redistribute: placements must be torch's Shard(dim), Replicate() or Partial(), but there is P('tp')
      Instead: vfn.with_sharding(x, spec), which takes a P
    """
    x = vfn.shard(X, mesh, P("dp"))
    x.redistribute(mesh, P("tp"))


@misuse
def specs_of_another_tree(mesh):
    """SpecError
    shard: specs is not a prefix of tree
      * specs lacks 'scale' and has besides 'scales': tree has 'blocks', 'scale'; did you mean 'scale'?
      Instead: give specs the structure of tree, or one entry for a whole subtree
    """
    tree, specs = params(), {"blocks": [{"w": P("dp"), "b": P()}, {"w": P("dp"), "b": P()}], "scales": P()}
    vfn.shard(tree, mesh, specs)


@misuse
def specs_in_a_deeper_tree(mesh):
    """SpecError
    shard: specs is not a prefix of tree
      * specs['blocks'][0]['b'] is None, but tree['blocks'][0]['b'] is a leaf (Tensor)
      * specs['blocks'][0]['w'] is a list, but tree['blocks'][0]['w'] is a leaf (Tensor)
      Instead: P() in place of None, where all ranks hold the whole value; or give specs the structure of tree, or one entry for a whole subtree
    """
    tree, specs = params(), {"blocks": [{"w": [P("dp")], "b": None}], "scale": P()}
    vfn.shard(tree, mesh, specs)


@misuse
def a_module_for_a_tree(mesh):
    """TreeError
    shard: a leaf is a container that trees do not go into, or another library's array
      * the value is a Linear
      Instead: f, params = vfn.module_function(module), of which params is a tree
    """
    vfn.shard(torch.nn.Linear(3, 4), mesh, P("dp"))


@misuse
def rules_that_do_not_fit(mesh):
    """SpecError
    spec_from_rules: the rules and the tree do not fit
      * rule ('b$', P(None, 'tp')) gives 2 entries to 'blocks.0.b', which has 1 dim
      * no rule matches 'scale' (tree['scale'])
      * rule ('wq$', P('tp')) matches no leaf
      Instead: add a rule, for instance (r".*", P()) at the end, or take the unused one away
    """
    vfn.spec_from_rules(params(), [(r"w$", P(None, "tp")), (r"b$", P(None, "tp")), (r"wq$", P("tp"))])


@misuse
def rules_that_are_none(mesh):
    """SpecError
    spec_from_rules: the rules are not (regular expression, spec) pairs
      * rules[0]: the str '*.w' is not a regular expression (nothing to repeat at position 0)
      * rules[1]: the spec of 'b$' is the str 'tp', not a vfn.P
      * rules[2] is the spec P(), not a (pattern, spec) pair
      Instead: [(r"w$", P("tp")), (r".*", P())]
    """
    vfn.spec_from_rules(params(), [(r"*.w", P()), ("b$", "tp"), P()])


@misuse
def blocks_that_do_not_make_an_array(mesh):
    """SpecError
    from_local: the ranks' blocks do not make up arrays on the mesh (dp=2, tp=2)
      * data['x'] with P('dp') would be [7, 2], split as torch.chunk does, but the blocks are rank 0: f32[3,2], rank 1: f32[3,2], rank 2: f32[4,2], rank 3: f32[4,2]
      * data['y'] with P('dp') would be [4, 3], split as torch.chunk does, but the blocks are rank 0: f32[2,2], rank 1: f32[2,3], rank 2: f32[2,2], rank 3: f32[2,3]
      Instead: give each rank the block that vfn.shard_shape and torch.chunk give it
    """
    data = {"x": lambda at: torch.ones(3 + at["dp"], 2), "y": lambda at: torch.ones(2, 2 + at["tp"])}
    vfn.from_local(data, mesh, P("dp"))


@misuse
def a_block_that_is_an_array(mesh):
    """VaryingTypeError
    from_local: a block must be data: a plain tensor that nothing transforms
      * x is an array already, f32[4@dp,3]: vfn.shard moves it
    """
    x = vfn.shard(X, mesh, P("dp"))
    vfn.from_local(x, mesh, P("dp"))


# --- arrays -----------------------------------------------------------------------------------------------------------


@misuse
def arrays_on_two_meshes(mesh):
    """MeshError
    add: arrays on different meshes do not mix
      * f32[4@dp,3] on the mesh (dp=2, tp=2)
      * f32[4@i,3] on the mesh (i=4)
      Instead: vfn.shard(x, mesh, P('dp')) brings one to the other's mesh
    """
    a, b = vfn.shard(X, mesh, P("dp")), vfn.shard(X, vfn.make_mesh((4,), ("i",)), P("i"))
    _ = a + b


@misuse
def a_draw_from_torchs_generator(mesh):
    """RandomError
    torch's bernoulli_: a stateful draw on an array: every rank would draw from a generator of its own
      Instead: a keyed draw, the same on every mesh: vfn.random.bernoulli(key, p, x.shape); for dropout vfn.random.dropout(key, x, rate)
    """
    x = vfn.shard(X, mesh, P("dp"))
    torch.nn.functional.dropout(x, 0.5)


@misuse
def a_draw_from_torchs_generator_under_strict(mesh):
    """RandomError
    torch's rand: a draw from torch's global generator, whose numbers depend on all that was drawn before
      Instead: a keyed draw, the same on every mesh: vfn.random.uniform(key, (4, 3))
    """
    with vfn.strict():
        torch.rand(4, 3)


@misuse
def a_write_that_would_be_lost(mesh):
    """InPlaceError
    zero_: a write into a view, or a resharded value, whose elements had to be moved would be lost
      * it is f32[4,3], of f32[4@dp,3]
      Instead: a new array: torch.where(mask, new, x), torch.cat, x.index_copy(...), x + y; or a layout of the source in which the view is local: x = vfn.with_sharding(x, P())
    """
    x = vfn.shard(X, mesh, P("dp"))
    vfn.with_sharding(x, P()).zero_()


@misuse
def a_move_under_strict(mesh):
    """ReshardError
    add: strict: this op needs a move of data that the program did not ask for
      * b, its argument other, is f32[4,4@dp] and would have to be f32[4@dp,4] (all-to-all over axis 'dp': 32 bytes on each rank)
      * at misuses.py: `_ = a + b`
      Instead: b = vfn.with_sharding(b, P('dp')) before it
    """
    a, b = vfn.shard(torch.ones(4, 4), mesh, P("dp")), vfn.shard(torch.ones(4, 4), mesh, P(None, "dp"))
    with vfn.strict():
        _ = a + b


# --- shard_map --------------------------------------------------------------------------------------------------------


@misuse
def a_result_for_a_body(mesh):
    """TransformError
    shard_map: f must be a function, but it is the tensor f32[4,3]
      Instead: vfn.shard_map(f, ...), with the function itself and not with what it returns
    """
    vfn.shard_map(X, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))


@misuse
def a_shape_for_the_mesh(mesh):
    """MeshError
    shard_map: the mesh must be a DeviceMesh, but it is (2, 2)
      Instead: mesh = vfn.make_mesh((2, 4), ("dp", "tp"))
    """
    vfn.shard_map(torch.sin, mesh=(2, 2), in_specs=P("dp"), out_specs=P("dp"))


@misuse
def no_mesh_anywhere(mesh):
    """MeshError
    shard_map(sin): there is no mesh: none was given, none is current, and no argument is an array on one
      Instead: shard_map(f, mesh=mesh, ...) or `with vfn.use_mesh(mesh):`
    """
    vfn.shard_map(torch.sin, in_specs=P("dp"), out_specs=P("dp"))(X)


@misuse
def arguments_that_do_not_divide(mesh):
    """SpecError
    shard_map(step): the arguments do not fit in_specs on the mesh (dp=2, tp=2)
      * args[0]['b'] of shape f32[6], where args[0] is bound to step's parameter 'params', corresponds to in_specs[0]['b'] = P(('dp', 'tp')): dim 0: 6 is not divisible by 2*2 = 4 (axes 'dp', 'tp')
      * args[0]['w'] of shape f32[5,3], where args[0] is bound to step's parameter 'params', corresponds to in_specs[0]['w'] = P('dp', 'tp'): dim 0: 5 is not divisible by 2 (axis 'dp'); dim 1: 3 is not divisible by 2 (axis 'tp')
      Instead: a spec of axes that divide the dims, None for a dim that every rank needs whole, or pad the argument
    """

    def step(params, x):
        return x

    tree = {"w": torch.ones(5, 3), "b": torch.ones(6)}
    mapped(mesh, step, ({"w": P("dp", "tp"), "b": P(("dp", "tp"))}, P("dp")))(tree, X)


@misuse
def specs_of_every_wrong_kind(mesh):
    """SpecError
    shard_map(step): the arguments do not fit in_specs on the mesh (dp=2, tp=2)
      * args[0] of shape f32[4,3], where args[0] is bound to step's parameter 'a', corresponds to in_specs[0] = 'dp': it is the str 'dp', not a vfn.P
      * args[1] of shape f32[4,3], where args[1] is bound to step's parameter 'b', corresponds to in_specs[1] = P('pd'): axis 'pd' (dim 0) is not an axis of the mesh (dp=2, tp=2); did you mean 'dp'?
      * args[2] of shape f32[4,3], where args[2] is bound to step's parameter 'c', corresponds to in_specs[2] = P('dp', None, 'tp'): it has 3 entries, but the value has 2 dims
      * args[3] of shape f32[4,3], where args[3] is bound to step's parameter 'd', corresponds to in_specs[3] = P('dp', 'dp'): axis 'dp' is used twice: for dim 0 and for dim 1
      Instead: vfn.P('dp'); axes of the mesh (dp=2, tp=2), each at most once, and at most 2 entries for 2 dims
    """

    def step(a, b, c, d):
        return a

    mapped(mesh, step, ("dp", P("pd"), P("dp", None, "tp"), P("dp", "dp")))(X, X, X, X)


@misuse
def fewer_specs_than_arguments(mesh):
    """SpecError
    shard_map(add): in_specs is not a prefix of args
      * in_specs has length 1, but args has length 2
      Instead: give in_specs the structure of args, or one entry for a whole subtree
    """
    mapped(mesh, torch.add, (P("dp"),))(X, X)


@misuse
def more_arguments_than_parameters(mesh):
    """TransformError
    shard_map(<lambda>): the function does not take these arguments
      * more_arguments_than_parameters.<locals>.<lambda>() takes 1 positional argument but 2 were given
      * it was called with (the tensor f32[2,3]{V:dp}, the tensor f32[2,3]{V:dp})
      Instead: arguments for <lambda>(x)
    """
    mapped(mesh, lambda x: x)(X, X)


@misuse
def an_argument_by_name(mesh):
    """VaryingTypeError
    shard_map(<lambda>): it takes positional arguments, but ['x'] came by keyword
      Instead: in_specs is matched by position
    """
    mapped(mesh, lambda x: x)(x=X)


@misuse
def an_argument_on_another_mesh(mesh):
    """SpecError
    shard_map(<lambda>): the arguments do not fit in_specs on the mesh (dp=2, tp=2)
      * args[0] of shape f32[4@i,3], where args[0] is bound to <lambda>'s parameter 'x', corresponds to in_specs = P('dp'): it lies on another mesh, mesh (i=4)
      Instead: vfn.shard(x, mesh, P('dp')), which brings it over
    """
    x = vfn.shard(X, vfn.make_mesh((4,), ("i",)), P("i"))
    mapped(mesh, lambda x: x)(x)


@misuse
def an_array_that_a_body_closes_over(mesh):
    """VaryingTypeError
    shard_map(<lambda>): the body uses an array from outside, of which each rank holds a part
      * it is f32[4@dp,3] on the mesh (dp=2, tp=2)
      Instead: pass it as an argument, with in_specs=P('dp') for its block or P() for the whole
    """
    w = vfn.shard(X, mesh, P("dp"))
    mapped(mesh, lambda x: x + w)(X)


@misuse
def a_spec_for_a_result_that_is_not_there(mesh):
    """SpecError
    shard_map(<lambda>): out_specs is not a prefix of the result
      * out_specs is a tuple, but the result is a leaf (Tensor)
      Instead: give out_specs the structure of the result, or one entry for a whole subtree
    """
    mapped(mesh, lambda x: x, out_specs=(P("dp"), P()))(X)


@misuse
def a_promise_that_is_not_kept(mesh):
    """SpecError
    shard_map(<lambda>): the results do not fit out_specs on the mesh (dp=2, tp=2)
      * out['loss'] is f32[]{V:dp}, for out_specs P(): it varies over 'dp', which out_specs does not mention, so it would have to be the same on all ranks
      Instead: vfn.psum(x, 'dp') or vfn.pmean(x, 'dp'), where the ranks' values are to be combined; or vfn.all_gather(x, 'dp', to='invarying'), where all ranks are to have all of them; or out_specs with 'dp' for the dim along which they are to be concatenated
    """
    mapped(mesh, lambda x: {"loss": x.sum(), "y": x}, out_specs={"loss": P(), "y": P("dp")})(X)


@misuse
def a_scalar_to_concatenate(mesh):
    """SpecError
    shard_map(<lambda>): the results do not fit out_specs on the mesh (dp=2, tp=2)
      * out is f32[]{V:dp}, for out_specs P('dp'): it has 1 entry, but the value has 0 dims
      Instead: x[None], which adds a dim to concatenate along: out_specs=P('dp') needs 1 dim
    """
    mapped(mesh, lambda x: x.sum())(X)


@misuse
def a_partial_sum_returned_as_whole(mesh):
    """SpecError
    shard_map(<lambda>): the results do not fit out_specs on the mesh (dp=2, tp=2)
      * out is f32[]{U:dp}, for out_specs P(): it is unreduced over 'dp', but out_specs says the same on all ranks
      Instead: vfn.psum(x, 'dp'), or out_specs with unreduced={'dp'}
    """
    mapped(mesh, lambda x: unreduced(x.sum()), out_specs=P())(X)


@misuse
def a_result_that_is_no_tensor(mesh):
    """SpecError
    shard_map(<lambda>): the results do not fit out_specs on the mesh (dp=2, tp=2)
      * out[1] is the int 2, not a tensor, for out_specs P('dp')
      Instead: P() for what is no tensor: it passes through
    """
    mapped(mesh, lambda x: (x, len(x)))(X)


@misuse
def an_axis_name_that_does_not_exist(mesh):
    """MeshError
    shard_map(sin): axis_names={'pd'} does not fit the mesh (dp=2, tp=2)
      * 'pd' is not one of the axes ('dp', 'tp'); did you mean 'dp'?
      Instead: the axes along which the body sees one rank's blocks; none: all of them
    """
    mapped(mesh, torch.sin, axis_names={"pd"})(X)


@misuse
def a_number_for_axis_names(mesh):
    """MeshError
    shard_map: axis_names must be a set of axis names, but it is the int 0
      Instead: for instance axis_names={"dp"}; without it all axes are mapped
    """
    vfn.shard_map(torch.sin, mesh=mesh, in_specs=P(), out_specs=P(), axis_names=0)


@misuse
def a_spec_of_an_axis_that_is_not_mapped(mesh):
    """SpecError
    shard_map(sin): the arguments do not fit in_specs on the mesh (dp=2, tp=2)
      * args[0] of shape f32[4,3] corresponds to in_specs = P('dp', 'tp'): axis 'tp' is not in axis_names={'dp'}: along it a value lies in the body as it does outside
      Instead: a spec without 'tp', or axis_names with it
    """
    mapped(mesh, torch.sin, P("dp", "tp"), axis_names={"dp"})(X)


@misuse
def a_map_in_a_map_over_the_same_axes(mesh):
    """MeshError
    shard_map(sin): it was called inside the body of another shard_map, where all axes are manual already
      Instead: call the function itself: its values are local too
    """
    inner = mapped(mesh, torch.sin)
    mapped(mesh, lambda x: inner(x))(X)


@misuse
def an_argument_that_moves_under_strict(mesh):
    """ReshardError
    shard_map(<lambda>): strict: arguments lie otherwise than in_specs says
      * args[0] of shape f32[4@tp,3], where args[0] is bound to <lambda>'s parameter 'w', corresponds to in_specs = P('dp'), but it lies as P('tp'): vfn.with_sharding(x, P('dp'))
      Instead: write the vfn.with_sharding, so that the program asks for the move
    """
    w = vfn.shard(X, mesh, P("tp"))
    with vfn.strict():
        mapped(mesh, lambda w: w)(w)


@misuse
def two_places_in_one_op(mesh):
    """SpecError
    add: x is at tp=0, y at tp=1
      * f32[4@dp,3]{at tp=0}
      * f32[4,3]{at tp=1}
      Instead: vfn.pipeline moves values between stages, vfn.with_sharding(x, P()) copies
    """
    x, y = vfn.shard(X, mesh, P("dp", at={"tp": 0})), vfn.shard(X, mesh, P(at={"tp": 1}))
    x + y


@misuse
def a_place_on_an_axis_that_splits_the_other(mesh):
    """SpecError
    mul: an array at tp=1 meets one that is split or summed over 'tp'
      * f32[4,3]{at tp=1}
      * f32[4@tp,3]
      Instead: vfn.with_sharding(x, P(..., at={'tp': 1})) of the one that is split
    """
    x, y = vfn.shard(X, mesh, P(at={"tp": 1})), vfn.shard(X, mesh, P("tp"))
    x * y


@misuse
def a_value_at_a_place_written_into_one_of_all_ranks(mesh):
    """InPlaceError
    add_: f32[4,3], which other ranks hold too, would be written at tp=1 alone
      * f32[4,3]{at tp=1} is an argument
      Instead: x = vfn.with_sharding(x, P(..., at={'tp': 1})), and write that
    """
    x, y = vfn.shard(X, mesh, P()), vfn.shard(X, mesh, P(at={"tp": 1}))
    x.add_(y)


@misuse
def a_place_in_a_body(mesh):
    """SpecError
    shard_map(<lambda>): the arguments do not fit in_specs on the mesh (dp=2, tp=2)
      * args[0] of shape f32[4,3]{at tp=1}, where args[0] is bound to <lambda>'s parameter 'x', corresponds to in_specs = P(): it is at tp=1, and the body runs on all ranks
      Instead: vfn.with_sharding(x, P()), which copies it to all of them
    """
    x = vfn.shard(X, mesh, P(at={"tp": 1}))
    mapped(mesh, lambda x: x, P(), P())(x)


@misuse
def a_place_that_is_not_there(mesh):
    """SpecError
    shard: 1 spec does not fit on the mesh (dp=2, tp=2)
      * X is f32[4,3], its spec P('tp', at={'tp': 2}): axis 'tp' is used twice: for dim 0 and for at
      * X is f32[4,3], its spec P('tp', at={'tp': 2}): coordinate 2 (at) is none of axis 'tp', which has 2
      Instead: each axis of the mesh at most once, and at most one entry a dim
    """
    vfn.shard(X, mesh, P("tp", at={"tp": 2}))


@misuse
def a_place_without_an_axis(mesh):
    """SpecError
    P: at must give axes and coordinates on them, ints from 0, but it is the str 'tp'
      Instead: for instance P("tp", at={"pp": 2}), or at={"pp": (0, 3)} for a value that exists at both
    """
    P(at="tp")


@misuse
def a_place_that_is_no_mapping(mesh):
    """SpecError
    P: at must give axes and coordinates on them, ints from 0, but it is the bool False
      Instead: for instance P("tp", at={"pp": 2}), or at={"pp": (0, 3)} for a value that exists at both
    """
    P(at=False)


@misuse
def a_place_below_0(mesh):
    """SpecError
    P: at must give axes and coordinates on them, ints from 0, but it is {'tp': -1}
      Instead: for instance P("tp", at={"pp": 2}), or at={"pp": (0, 3)} for a value that exists at both
    """
    P(at={"tp": -1})


@misuse
def a_saved_plan_of_a_place(mesh):
    """TransformError
    save_plan: a plan with values at one place, the mesh (dp=2, tp=2) at tp=1, cannot be saved
      Instead: no plans=: it is recorded anew in each job
    """
    lowered = vfn.jit(torch.sin).lower(vfn.shard(X, mesh, P(at={"tp": 1})))
    vfn.save_plan(lowered, "plan")


@misuse
def a_place_written_into_a_plain_tensor(mesh):
    """InPlaceError
    copy_: f32[4,3], which other ranks hold too, would be written at tp=1 alone
      * f32[4,3]{at tp=1} is an argument
      Instead: x = vfn.with_sharding(x, P(..., at={'tp': 1})), and write that
    """
    y = vfn.shard(X, mesh, P(at={"tp": 1}))
    torch.zeros(4, 3).copy_(y)


@misuse
def a_draw_at_a_place_in_a_body(mesh):
    """SpecError
    random.normal: spec=P(at={'tp': 1}) says at, and in a shard_map body every rank has its block
      Instead: the draw outside of the body, as an argument of the shard_map
    """
    vfn.shard_map(lambda x: vfn.random.normal(KEY, spec=P(at={"tp": 1})), mesh=mesh, in_specs=P(), out_specs=P())(X)


@misuse
def a_draw_whose_parameters_are_at_two_places(mesh):
    """RandomError
    random.beta: a is at tp=0, b at tp=1
      Instead: spec=P(..., at=...), which says where the draw is to be
    """
    vfn.random.beta(KEY, *(vfn.shard(torch.ones(4), mesh, P(at={"tp": i})) for i in (0, 1)))


@misuse
def with_sharding_in_a_body(mesh):
    """SpecError
    with_sharding: this is the body of a shard_map: its values are one rank's blocks, and its axes are manual
      * axis 'dp' of P('dp') is manual here
      Instead: a collective (vfn.all_gather, vfn.psum_scatter, ...) in the body, or the spec in in_specs or out_specs
    """
    mapped(mesh, lambda x: vfn.with_sharding(x, P("dp")))(X)


# --- local values -----------------------------------------------------------------------------------------------------


@misuse
def if_on_a_varying_value(mesh):
    """VaryingTypeError
    `if`: this asks for the truth of a value that differs by rank, so ranks could go different ways
      * the value is bool[]{V:dp} on the mesh (dp=2, tp=2)
      Instead: torch.where(condition, a, b); or one condition for all ranks, of vfn.psum(x, 'dp') or vfn.pmax(x, 'dp')
    """

    def body(x):
        if x.sum() > 0:  # here
            return x
        return -x

    mapped(mesh, body)(X)


@misuse
def if_on_the_rank(mesh):
    """VaryingTypeError
    `if`: this asks for the truth of a value that differs by rank, so ranks could go different ways
      * the value is bool[]{V:dp} on the mesh (dp=2, tp=2)
      Instead: torch.where(condition, a, b); or one condition for all ranks, of vfn.psum(x, 'dp') or vfn.pmax(x, 'dp')
    """

    def body(x):
        if vfn.axis_index("dp") == 0:  # here
            x = 2 * x
        return x

    mapped(mesh, body)(X)


@misuse
def while_on_a_varying_value(mesh):
    """VaryingTypeError
    `while`: this asks for the truth of a value that differs by rank, so ranks could go different ways
      * the value is bool[]{V:dp} on the mesh (dp=2, tp=2)
      Instead: torch.where(condition, a, b); or one condition for all ranks, of vfn.psum(x, 'dp') or vfn.pmax(x, 'dp')
    """

    def body(x):
        while x.sum() < 100:  # here
            x = 2 * x
        return x

    mapped(mesh, body)(X)


@misuse
def assert_of_a_varying_value(mesh):
    """VaryingTypeError
    `assert`: this asks for the truth of a value that differs by rank, so ranks could go different ways
      * the value is bool[]{V:dp} on the mesh (dp=2, tp=2)
      Instead: torch.where(condition, a, b); or one condition for all ranks, of vfn.psum(x, 'dp') or vfn.pmax(x, 'dp')
    """

    def body(x):
        assert (x >= 0).all()  # here
        return x

    mapped(mesh, body)(X)


@misuse
def bool_of_a_varying_value(mesh):
    """VaryingTypeError
    bool(): this asks for the truth of a value that differs by rank, so ranks could go different ways
      * the value is f32[]{V:dp} on the mesh (dp=2, tp=2)
      Instead: torch.where(condition, a, b); or one condition for all ranks, of vfn.psum(x, 'dp') or vfn.pmax(x, 'dp')
    """
    mapped(mesh, lambda x: x * bool(x.sum()))(X)


@misuse
def if_on_an_unreduced_value(mesh):
    """VaryingTypeError
    `if`: this asks for the truth of a value that is still to be added over 'dp'
      * the value is f32[]{U:dp} on the mesh (dp=2, tp=2)
      Instead: vfn.psum(x, 'dp') first, which adds it up
    """
    mapped(mesh, lambda x: x if unreduced(x.sum()) else -x)(X)


@misuse
def float_of_a_varying_value(mesh):
    """VaryingTypeError
    float(): this reads a number out of a value that differs by rank, so ranks could go different ways
      * the value is f32[]{V:dp} on the mesh (dp=2, tp=2)
      Instead: the 0-d tensor as it is, which arithmetic takes; or one number for all ranks: vfn.psum(x, 'dp'), vfn.pmean
    """
    mapped(mesh, lambda x: x * float(x.sum()))(X)


@misuse
def item_of_an_unreduced_value(mesh):
    """VaryingTypeError
    item: this reads a number out of a value that is still to be added over 'dp'
      * the value is f32[]{U:dp} on the mesh (dp=2, tp=2)
      Instead: vfn.psum(x, 'dp') first, which adds it up
    """
    mapped(mesh, lambda x: x * unreduced(x.sum()).item())(X)


@misuse
def the_rank_as_an_index(mesh):
    """VaryingTypeError
    an index: this reads a number out of a value that differs by rank, so ranks could go different ways
      * the value is i32[]{V:dp} on the mesh (dp=2, tp=2)
      Instead: torch.stack(choices)[i] or vfn.dynamic_slice(x, [i], [size]), with the tensor as it is
    """
    mapped(mesh, lambda x: [x, 2 * x][vfn.axis_index("dp")])(X)


@misuse
def the_rank_in_a_slice(mesh):
    """VaryingTypeError
    an index: this reads a number out of a value that differs by rank, so ranks could go different ways
      * the value is i32[]{V:dp} on the mesh (dp=2, tp=2)
      * the value is i32[]{V:dp} on the mesh (dp=2, tp=2)
      Instead: torch.stack(choices)[i] or vfn.dynamic_slice(x, [i], [size]), with the tensor as it is
    """
    table = torch.arange(4.0)

    def body(x):
        i = vfn.axis_index("dp")
        return x + table[i : i + 1]  # here

    mapped(mesh, body)(X)


@misuse
def the_rank_in_a_slice_that_is_written(mesh):
    """VaryingTypeError
    an index: this reads a number out of a value that differs by rank, so ranks could go different ways
      * the value is i32[]{V:dp} on the mesh (dp=2, tp=2)
      Instead: torch.stack(choices)[i] or vfn.dynamic_slice(x, [i], [size]), with the tensor as it is
    """

    def body(x):
        y = torch.zeros(4)
        y[: vfn.axis_index("dp")] = 1.0  # here
        return x + y[:3]

    mapped(mesh, body)(X)


@misuse
def numpy_of_a_varying_value(mesh):
    """VaryingTypeError
    numpy: this takes the numbers out of a value that differs by rank, so ranks could go different ways
      * the value is f32[2,3]{V:dp} on the mesh (dp=2, tp=2)
      Instead: torch ops; a torch.library.custom_op for what torch has no op for; or one value for all ranks: vfn.psum(x, 'dp')
    """
    mapped(mesh, lambda x: torch.from_numpy(np.sort(x.numpy())))(X)


@misuse
def a_comparison_of_varying_values(mesh):
    """VaryingTypeError
    torch.allclose: this compares a value that differs by rank, so ranks could go different ways
      * the value is f32[2,3]{V:dp} on the mesh (dp=2, tp=2)
      * the value is f32[2,3]{V:dp} on the mesh (dp=2, tp=2)
      Instead: torch.where((a == b).all(), ...); or one answer for all ranks: vfn.pmin((a == b).all(), 'dp')
    """
    mapped(mesh, lambda x: x if torch.allclose(x, x.round()) else -x)(X)


@misuse
def a_write_into_an_argument(mesh):
    """InPlaceError
    add_: this writes into memory that belongs to the caller, or to another value
      * the target is f32[2,3]{V:dp}
      Instead: x = x.clone() first, or the function without the underscore
    """

    def body(x):
        x += 1  # here
        return x

    mapped(mesh, body)(X)


@misuse
def a_write_into_a_view_of_an_argument(mesh):
    """InPlaceError
    zero_: this writes into memory that belongs to the caller, or to another value
      * the target is f32[3]{V:dp}
      Instead: x = x.clone() first, or the function without the underscore
    """
    mapped(mesh, lambda x: x[0].zero_())(X)


@misuse
def a_varying_value_written_into_one_from_outside(mesh):
    """VaryingTypeError
    add_: this writes a value that differs by rank into one that is the same on all of them
      * the target is f32[2,3], a value from outside the body
      * what is written makes it f32[2,3]{V:dp}
      Instead: the function without the underscore, which makes a new value
    """
    total = torch.zeros(2, 3)
    mapped(mesh, lambda x: total.add_(x))(X)


@misuse
def a_varying_value_written_into_an_invariant_one(mesh):
    """VaryingTypeError
    add_: this writes a value that differs by rank into one that is the same on all of them
      * the target is f32[2,3], which has a gradient
      * what is written makes it f32[2,3]{V:dp}
      Instead: the function without the underscore, which makes a new value
    """

    def body(w, x):
        y = w * 2
        y.add_(x)  # here
        return y

    vfn.grad(lambda w: mapped(mesh, body, (P(), P("dp")))(w, X).sum())(torch.ones(2, 3))


@misuse
def running_statistics(mesh):
    """InPlaceError
    batch_norm: this writes into a tensor from outside the body
      * it is f32[3]
      Instead: an argument of the body, cloned in it and returned; or a function that writes nothing (eval mode, no max_norm)
    """
    norm = torch.nn.BatchNorm1d(3)
    mapped(mesh, lambda x: norm(x))(X)


@misuse
def a_view_of_another_size(mesh):
    """RuntimeError
    shape '[7]' is invalid for input of size 6
    """
    mapped(mesh, lambda x: x.view(7))(X)


@misuse
def a_nonlinear_function_of_partial_sums(mesh):
    """VaryingTypeError
    relu: relu is not linear, so the sum over 'dp' must come before it
      * operand 0 is f32[2,3]{U:dp} on the mesh (dp=2, tp=2)
      Instead: vfn.psum(x, 'dp') first, or vfn.psum_scatter
    """
    mapped(mesh, lambda x: unreduced(x).relu())(X)


@misuse
def a_bias_added_to_partial_sums(mesh):
    """VaryingTypeError
    add: the invariant value would be added once a rank of 'dp'
      * operand 0 is f32[2,3]{U:dp} on the mesh (dp=2, tp=2)
      * operand 1 is f32[3] on the mesh (dp=2, tp=2)
      Instead: vfn.psum(x, 'dp') first, or vfn.psum_scatter, then add
    """
    bias = torch.ones(3)
    mapped(mesh, lambda x: unreduced(x) + bias)(X)


@misuse
def partial_sums_beside_a_varying_value(mesh):
    """VaryingTypeError
    mul: a value still to be added over the ranks meets one that differs by rank
      * operand 0 is f32[2,3]{U:dp} on the mesh (dp=2, tp=2)
      * operand 1 is f32[2,3]{V:dp} on the mesh (dp=2, tp=2)
      Instead: vfn.psum(x, 'dp') first, or vfn.psum_scatter
    """
    mapped(mesh, lambda x: unreduced(x) * x)(X)


@misuse
def a_reduced_value_beside_an_invariant_one(mesh):
    """VaryingTypeError
    add: a reduced value meets an invariant one: their cotangents differ
      * operand 0 is f32[4,3]{R:dp} on the mesh (dp=2, tp=2)
      * operand 1 is f32[4,3] on the mesh (dp=2, tp=2)
      Instead: vfn.pcast(x, 'dp', to='reduced') for the invariant one
    """
    mapped(mesh, lambda w: vfn.pcast(w, "dp", to="reduced") + w, P())(X)


# --- collectives ------------------------------------------------------------------------------------------------------


@misuse
def a_collective_outside_of_a_body(mesh):
    """CollectiveError
    psum: axis_name='dp', but no axis is manual here: this is not inside a shard_map body
      Instead: call it in the function that vfn.shard_map(f, mesh=mesh, in_specs=..., out_specs=...) maps; a whole array needs no collective: x.sum(0)
    """
    vfn.psum(X, "dp")


@misuse
def a_position_outside_of_a_body(mesh):
    """CollectiveError
    axis_index: axis_name='dp', but no axis is manual here: this is not inside a shard_map body
      Instead: call it in the function that vfn.shard_map(f, mesh=mesh, in_specs=..., out_specs=...) maps
    """
    vfn.axis_index("dp")


@misuse
def a_value_for_a_position(mesh):
    """MeshError
    axis_index: axis_name=the tensor f32[2,3]{V:dp} does not name axes of the mesh (dp=2, tp=2)
      * the tensor f32[2,3]{V:dp} is no name
      Instead: axis_name='dp', or a tuple of different axes out of ('dp', 'tp')
    """
    mapped(mesh, lambda x: x + vfn.axis_index(x))(X)


@misuse
def an_unknown_axis(mesh):
    """MeshError
    psum: axis_name=('pd', 'tp') does not name axes of the mesh (dp=2, tp=2)
      * 'pd' is not one of the axes ('dp', 'tp'); did you mean 'dp'?
      Instead: axis_name='dp', or a tuple of different axes out of ('dp', 'tp')
    """
    mapped(mesh, lambda x: vfn.psum(x, ("pd", "tp")))(X)


@misuse
def a_dim_for_an_axis(mesh):
    """MeshError
    pmean: axis_name=0 does not name axes of the mesh (dp=2, tp=2)
      * 0 is no name: axes of a mesh have names, dims of a tensor have numbers
      Instead: axis_name='dp', or a tuple of different axes out of ('dp', 'tp')
    """
    mapped(mesh, lambda x: vfn.pmean(x, 0))(X)


@misuse
def the_axis_before_the_value(mesh):
    """MeshError
    psum: axis_name=the tensor f32[2,3]{V:dp} does not name axes of the mesh (dp=2, tp=2)
      * the tensor f32[2,3]{V:dp} is no name
      Instead: vfn.psum(x, 'dp', ...): the value first, then the axis
    """
    mapped(mesh, lambda x: vfn.psum("dp", x))(X)


@misuse
def one_axis_twice(mesh):
    """MeshError
    all_gather: axis_name=('dp', 'dp') does not name axes of the mesh (dp=2, tp=2)
      * axis 'dp' is named twice
      Instead: axis_name='dp', or a tuple of different axes out of ('dp', 'tp')
    """
    mapped(mesh, lambda x: vfn.all_gather(x, ("dp", "dp")))(X)


@misuse
def an_axis_along_which_values_are_whole(mesh):
    """CollectiveError
    psum: axis_name='tp', but only ('dp',) are manual in this shard_map body
      * along 'tp' of the mesh (dp=2, tp=2) its values are whole
      Instead: x.sum(...) and its like, as on one device; or axis_names={'dp', 'tp'}
    """
    mapped(mesh, lambda x: vfn.psum(x, "tp"), axis_names={"dp"})(X)


@misuse
def leaves_that_are_no_numbers(mesh):
    """CollectiveError
    psum: x must hold tensors and numbers on the mesh (dp=2, tp=2)
      * x['f'] is the function sin
      * x['name'] is the str 'a'
      Instead: the tensors alone, of one shape on all ranks
    """
    mapped(mesh, lambda x: vfn.psum({"x": x, "name": "a", "f": torch.sin}, "dp"))(X)


@misuse
def a_sum_of_keys(mesh):
    """CollectiveError
    psum: a random key is not a number, and a reduction of its bits no key
      * x['key'] is a Key
      Instead: vfn.random.fold_in(key, vfn.axis_index(axis)), or vfn.pbroadcast of one rank's key
    """
    mapped(mesh, lambda x: vfn.psum({"x": x, "key": KEY}, "dp"))(X)


@misuse
def a_pair_too_many(mesh):
    """CollectiveError
    ppermute: perm=[(0, 1), (1, 1), (2, 0)] is not a permutation of some of the ranks
      * pair (2, 0): positions go from 0 to 1, there are 2 (axis 'dp')
      * destination 1 is in [(0, 1), (1, 1)]
      Instead: each rank at most once as source and at most once as destination
    """
    mapped(mesh, lambda x: vfn.ppermute(x, "dp", [(0, 1), (1, 1), (2, 0)]))(X)


@misuse
def destinations_without_sources(mesh):
    """CollectiveError
    ppermute: perm=[1, 0] is not a sequence of (source, destination) pairs
      Instead: a shift by one is [(i, (i + 1) % 2) for i in range(2)]
    """
    mapped(mesh, lambda x: vfn.ppermute(x, "dp", [1, 0]))(X)


@misuse
def a_dim_that_ranks_cannot_exchange(mesh):
    """CollectiveError
    all_to_all: the operand does not fit the mesh (dp=2, tp=2)
      * x['a'] of shape f32[2,3]: tiled, split_axis=1 has size 3, which is not divisible by 2 (axis 'dp')
      Instead: another split_axis, or pad the dim
    """
    mapped(mesh, lambda x: vfn.all_to_all({"a": x, "b": x[:, :2]}, "dp", 1, 0, tiled=True))(X)


@misuse
def pieces_that_do_not_divide(mesh):
    """CollectiveError
    psum_scatter: the operand does not fit the mesh (dp=2, tp=2)
      * x['b'][0] of shape f32[3,4]: tiled, scatter_dimension=0 has size 3, which is not divisible by 2 (axis 'dp')
      * x['b'][1] of shape f32[3]: tiled, scatter_dimension=0 has size 3, which is not divisible by 2 (axis 'dp')
      Instead: pad the dim, scatter along another, or vfn.psum and slice
    """
    mapped(mesh, lambda x: vfn.psum_scatter({"a": x, "b": [x.T, x[0]]}, "dp", tiled=True), P())(X)


@misuse
def pieces_without_tiled(mesh):
    """CollectiveError
    psum_scatter: the operand does not fit the mesh (dp=2, tp=2)
      * x of shape f32[4,3]: scatter_dimension=0 has size 4, but untiled it must be 2 (axis 'dp'); tiled=True cuts it into equal pieces
      Instead: pad the dim, scatter along another, or vfn.psum and slice
    """
    mapped(mesh, lambda x: vfn.psum_scatter(x, "dp"), P())(X)


@misuse
def a_gather_of_scalars_without_a_dim(mesh):
    """CollectiveError
    all_gather: the operand does not fit the mesh (dp=2, tp=2)
      * x of shape f32[]: axis=0 is not one of the 0 dims of x; tiled=False gathers scalars
    """
    mapped(mesh, lambda x: vfn.all_gather(x.sum(), "dp", tiled=True))(X)


@misuse
def a_gather_of_another_kind(mesh):
    """CollectiveError
    all_gather: to='invariant' is not one of ('varying', 'invarying', 'reduced'); did you mean 'invarying'?
      Instead: to="varying", the default; "invarying" for a result that may be returned with out_specs=P()
    """
    mapped(mesh, lambda x: vfn.all_gather(x, "dp", to="invariant"))(X)


@misuse
def a_source_that_differs_by_rank(mesh):
    """CollectiveError
    pbroadcast: source must be an int, one position for all ranks, but it is the tensor i32[]{V:dp}
      Instead: torch.where(vfn.axis_index(axis) == i, x, 0) and vfn.psum, where the source is computed
    """
    mapped(mesh, lambda x: vfn.pbroadcast(x, "dp", vfn.axis_index("dp")))(X)


@misuse
def a_cast_of_what_varies_already(mesh):
    """VaryingTypeError
    pvary: there is no such cast, to='varying'
      * x['x'] is f32[2,3]{V:dp}: it is varying over 'dp' already
      Instead: no cast where none is needed; the casts are invarying -> varying or reduced, reduced -> varying, varying -> unreduced; vfn.psum makes a varying or unreduced value invarying
    """
    mapped(mesh, lambda x: vfn.pvary({"x": x, "w": X}, "dp")["x"])(X)


@misuse
def a_cast_to_invariant(mesh):
    """VaryingTypeError
    pcast: to='invariant' is not one of ('varying', 'reduced', 'unreduced')
      Instead: vfn.psum(x, axis) or vfn.pmean, which make the ranks' values one; vfn.pbroadcast takes one rank's
    """
    mapped(mesh, lambda x: vfn.pcast(x, "dp", to="invariant"))(X)


@misuse
def a_gather_of_partial_sums(mesh):
    """VaryingTypeError
    all_gather: an unreduced value, still to be added over the ranks, may only be summed
      * x is f32[2,3]{U:dp}: unreduced over 'dp'
      Instead: vfn.psum(x, 'dp') first
    """
    mapped(mesh, lambda x: vfn.all_gather(unreduced(x), "dp"))(X)


@misuse
def a_derivative_of_a_maximum(mesh):
    """CollectiveError
    pmax: it was differentiated, but it has no derivative (nor has JAX's)
      Instead: vfn.pmax(x.detach(), ...) where the result only stabilises, as in log-sum-exp; or vfn.all_gather, then x.amax(0)
    """
    vfn.grad(lambda x: mapped(mesh, lambda x: vfn.pmax(x, "dp"), out_specs=P())(x).sum())(X)


@misuse
def an_array_in_a_collective(mesh):
    """VaryingTypeError
    psum: a whole array was used inside a shard_map body, whose values are local
      * it is the array f32[4@dp,3]
      Instead: pass it as an argument of the body, with its spec in in_specs
    """
    w = vfn.shard(X, mesh, P("dp"))
    mapped(mesh, lambda x: vfn.psum(w, "dp"))(X)


@misuse
def a_slice_of_other_dims(mesh):
    """CollectiveError
    dynamic_slice: the block does not fit x of shape f32[2,3]
      * start_indices[1] must be an int or a 0-d integer tensor, but it is the float 0.5
      * x has 2 dims, but there are 2 starts and 1 size
      * dim 0 has size 2, but sizes[0] is 3
      Instead: dynamic_slice(x, [start, ...], [size, ...]), an entry for each dim of x
    """
    mapped(mesh, lambda x: vfn.dynamic_slice(x, [vfn.axis_index("dp"), 0.5], [3]))(X)


# --- transforms -------------------------------------------------------------------------------------------------------


@misuse
def a_gradient_of_a_result(mesh):
    """TransformError
    grad: f must be a function, but it is the tensor f32[]
      Instead: vfn.grad(f, ...), with the function itself and not with what it returns
    """
    vfn.grad(X.sum())


@misuse
def arguments_for_argnums(mesh):
    """TransformError
    grad: argnums must be an int or a tuple of ints, the places of arguments, but it is the tensor f32[4,3]
      Instead: vfn.grad(f)(x, ...): the arguments go to the function that it returns
    """
    vfn.grad(torch.sum, X)


@misuse
def an_argument_that_is_not_there(mesh):
    """TransformError
    grad: argnums=(0, 2) does not fit a call with 2 arguments
      * there is no argument 2
      Instead: argnums between 0 and 1; arguments that are given by name are not counted
    """
    vfn.grad(lambda w, x: (w * x).sum(), argnums=(0, 2))(X, X)


@misuse
def a_loss_that_is_no_scalar(mesh):
    """TransformError
    grad: the function must return one floating-point number, a 0-d tensor
      * it returned f32[4@dp,3]
      Instead: reduce it: loss.mean() or loss.sum(); with more results, return (loss, aux) and has_aux=True
    """
    x = vfn.shard(X, mesh, P("dp"))
    vfn.grad(lambda x: x * 2)(x)


@misuse
def a_loss_that_is_a_number(mesh):
    """TransformError
    grad: the function must return one floating-point number, a 0-d tensor
      * it returned the float 66.0
      Instead: the tensor itself, without .item() or float(), from which no gradient comes back
    """
    vfn.grad(lambda x: x.sum().item())(X)


@misuse
def a_loss_with_something_else(mesh):
    """TransformError
    value_and_grad: the function must return one floating-point number, a 0-d tensor
      * it returned a tuple of f32[], f32[4,3]
      Instead: has_aux=True, with `return loss, aux`: only the loss is differentiated
    """
    vfn.value_and_grad(lambda x: (x.sum(), x * 2))(X)


@misuse
def a_loss_that_is_not_returned(mesh):
    """TransformError
    grad: the function must return one floating-point number, a 0-d tensor
      * it returned None
      Instead: return loss: a `return` is missing
    """
    vfn.grad(lambda x: None)(X)


@misuse
def has_aux_without_aux(mesh):
    """TransformError
    value_and_grad: with has_aux=True the function must return (value, aux)
      * it returned f32[]
      Instead: return loss, aux; or leave has_aux out, where the loss is all there is
    """
    vfn.value_and_grad(lambda x: x.sum(), has_aux=True)(X)


@misuse
def integers_to_differentiate(mesh):
    """TransformError
    grad: there is no floating-point tensor to differentiate
      * argument 0 ('batch') holds i64 tensors, int leaves
      Instead: point argnums at the parameters, or convert them with .float()
    """

    def loss(batch, w):
        return w.sum()

    vfn.grad(loss)({"tokens": torch.arange(3), "n": 3}, X)


@misuse
def a_module_to_differentiate(mesh):
    """TreeError
    grad: a leaf is a container that trees do not go into, or another library's array
      * module is a Linear
      Instead: f, params = vfn.module_function(module), of which params is a tree
    """
    vfn.grad(lambda module: module(X).sum())(torch.nn.Linear(3, 2))


@misuse
def an_argument_that_is_missing(mesh):
    """TransformError
    grad: the function does not take these arguments
      * an_argument_that_is_missing.<locals>.<lambda>() missing 1 required positional argument: 'x'
      * it was called with (the tensor f32[4,3])
      Instead: arguments for <lambda>(w, x)
    """
    vfn.grad(lambda w, x: (w * x).sum())(X)


@misuse
def a_write_into_what_is_differentiated(mesh):
    """InPlaceError
    grad: the function writes into what it is differentiated by, whose value before is needed
      Instead: x = x.clone() first, or the function without the underscore
    """

    def loss(x):
        x.mul_(2)  # here
        return x.sum()

    vfn.grad(loss)(X)


@misuse
def a_write_into_what_a_gradient_needs(mesh):
    """InPlaceError
    grad: an in-place op changed a value which the gradient needs as it was
      * it is what exp gave
      Instead: the function without the underscore, or a clone() first
    """

    def loss(x):
        y = x.exp()
        y.add_(1)
        return y.sum()

    vfn.grad(loss)(X)


@misuse
def a_loss_that_is_still_varying_under_strict(mesh):
    """VaryingTypeError
    grad: strict: this differentiates a value that differs by rank, and so the sum over the ranks
      * the value is f32[]{V:dp}
      Instead: vfn.psum(loss, 'dp') in the function
    """

    def body(w, x):
        return vfn.grad(lambda w: (w * x).sum())(w)  # here

    with vfn.strict():
        mapped(mesh, body, (P(), P("dp")), P())(torch.ones(3), X)


@misuse
def a_cotangent_of_another_shape(mesh):
    """TransformError
    vjp: pullback: the cotangent does not fit the result
      * out['y'] is f32[4,3], its cotangent f32[3]
      * out['z'][0] is f32[], its cotangent is the float 1.0, not a tensor
      Instead: a tensor of the same shape and dtype for each, torch.ones_like(x) say
    """
    _, pullback = vfn.vjp(lambda x: {"y": x * 2, "z": [x.sum()]}, X)
    pullback({"y": X[0], "z": [1.0]})


@misuse
def a_cotangent_of_another_tree(mesh):
    """SpecError
    vjp: pullback: the cotangent is not a prefix of the result
      * the cotangent lacks 'z' and has besides 'zz': the result has 'y', 'z'; did you mean 'z'?
      Instead: give the cotangent the structure of the result, or one entry for a whole subtree
    """
    _, pullback = vfn.vjp(lambda x: {"y": x * 2, "z": x.sum()}, X)
    pullback({"y": X, "zz": X})


@misuse
def tangents_that_do_not_fit(mesh):
    """TransformError
    jvp: the tangents do not fit the primals
      * primals[0]['a'] is f32[4,3], its tangent f32[3]
      * primals[1] is f32[4,3], its tangent f64[4,3]
      Instead: a tensor of the same shape and dtype for each, torch.ones_like(x) say
    """
    vfn.jvp(lambda p, y: p["a"] * y, ({"a": X}, X), ({"a": X[0]}, X.double()))


@misuse
def tangents_without_a_tuple(mesh):
    """TransformError
    jvp: primals and tangents must be tuples
      * primals is the tensor f32[4,3]
      * tangents is the tensor f32[4,3]
      Instead: jvp(f, (x,), (dx,)): one of each for each argument of f
    """
    vfn.jvp(torch.sin, X, X)


@misuse
def maps_of_two_lengths(mesh):
    """TransformError
    vmap: the arguments do not fit in_axes
      * args[0] (of 'x') has 4 along dim 0
      * args[1] (of 'y') has 3 along dim 0
      Instead: for each argument the dim that all are mapped over together, None for those that are the same in all calls
    """
    vfn.vmap(lambda x, y: x + y)(X, torch.ones(3))


@misuse
def a_scalar_to_map_over(mesh):
    """TransformError
    vmap: the arguments do not fit in_axes
      * args[1] (of 'rate') is the tensor f32[], which has no dim 0; None for a scalar
      Instead: for each argument the dim that all are mapped over together, None for those that are the same in all calls
    """
    vfn.vmap(lambda x, rate: x * rate)(X, torch.tensor(0.5))


@misuse
def one_key_to_map_over(mesh):
    """TransformError
    vmap: the arguments do not fit in_axes
      * args[0] (of 'key') is the Key of shape (), which has no dim 0; vfn.random.split(key, n) makes an array of keys
      Instead: for each argument the dim that all are mapped over together, None for those that are the same in all calls
    """
    vfn.vmap(lambda key, x: vfn.random.normal(key, (3,)) + x)(KEY, X)


@misuse
def in_axes_of_another_tree(mesh):
    """SpecError
    vmap: in_axes is not a prefix of args
      * in_axes[0] lacks 'weight' and has besides 'weigth': args[0] has 'weight'; did you mean 'weight'?
      Instead: give in_axes the structure of args, or one entry for a whole subtree
    """
    vfn.vmap(lambda p: p["weight"], in_axes=({"weigth": 0},))({"weight": X})


@misuse
def a_place_that_a_result_has_not(mesh):
    """TransformError
    vmap: the results do not fit out_axes
      * out['y'] is the tensor f32[3] in each call, so out_axes may be from -2 to 1, not 3
      Instead: out_axes=0, the place where vmap puts the entries by default
    """
    vfn.vmap(lambda x: {"y": x}, out_axes=3)(X)


@misuse
def a_result_that_differs_between_entries(mesh):
    """TransformError
    vmap: out_axes=None is for results that are the same for all entries
      * out[1] differs between entries, but out_axes is None for it
      Instead: out_axes=0 there, or reduce the result over the entries after vmap
    """
    vfn.vmap(lambda x: (x, x.sum()), out_axes=(0, None))(X)


@misuse
def if_in_a_vmap(mesh):
    """TransformError
    vmap: this asks for the truth of a value that differs between entries, so they could go different ways
      Instead: torch.where(condition, a, b)
    """
    vfn.vmap(lambda x: x if x.sum() > 0 else -x)(X)


@misuse
def item_in_a_vmap(mesh):
    """TransformError
    vmap: this reads a number out of a value that differs between entries
      Instead: the 0-d tensor as it is: arithmetic takes it, x.index_select(0, i[None]) and torch.where as well
    """
    vfn.vmap(lambda x: x * x.sum().item())(X)


@misuse
def a_draw_of_torchs_in_a_vmap(mesh):
    """TransformError
    vmap: this draws from torch's generator: the same numbers for all entries, or others for each?
      Instead: keys = vfn.random.split(key, n), mapped over as well, and vfn.random's draws from each of them
    """
    vfn.vmap(lambda x: x + torch.rand(3))(X)


# --- keys and draws ---------------------------------------------------------------------------------------------------


@misuse
def a_seed_for_a_key(mesh):
    """RandomError
    random.normal: the first argument must be a key, but it is the int 0
      Instead: vfn.random.key(0)
    """
    vfn.random.normal(0, (3,))


@misuse
def bits_for_a_key(mesh):
    """RandomError
    random.normal: the first argument must be a key, but it is the tensor i64[2]
      Instead: vfn.random.wrap_key_data(...) around the raw bits
    """
    vfn.random.normal(torch.tensor([0, 42]), (3,))


@misuse
def keys_for_a_key(mesh):
    """RandomError
    random.normal: it takes one key, but was given an array of keys of shape (2,)
      Instead: key[0], or vfn.vmap(lambda key: vfn.random.normal(key, ...))(keys)
    """
    vfn.random.normal(vfn.random.split(KEY), (3,))


@misuse
def arithmetic_on_a_key(mesh):
    """RandomError
    Key: `+` is not for keys: arithmetic would make keys whose streams overlap
      Instead: vfn.random.split(key) for several keys, vfn.random.fold_in(key, i) for the i-th
    """
    _ = KEY + 1


@misuse
def one_key_unpacked(mesh):
    """RandomError
    Key: iterating needs an array of keys, but this is one key, of shape ()
      Instead: k1, k2 = vfn.random.split(key)
    """
    _first, _second = KEY


@misuse
def a_seed_that_is_no_integer(mesh):
    """RandomError
    random.key: seed must be an integer, but it is the float 1.5
      Instead: any int: vfn.random.key(0)
    """
    vfn.random.key(1.5)


@misuse
def a_name_folded_in(mesh):
    """RandomError
    random.fold_in: data must be an integer, but it is the str 'dropout'
      Instead: a number for each use, 0, 1, ...; vfn.axis_index(axis) for one for each rank; or keys of vfn.random.split
    """
    vfn.random.fold_in(KEY, "dropout")


@misuse
def numbers_for_a_dtype(mesh):
    """RandomError
    random.uniform: dtype must be one of float64, float32, float16, bfloat16, but it is 0.0
      Instead: dtype=torch.float32, say; numbers that come after dtype by name, minval=0.0
    """
    vfn.random.uniform(KEY, (3,), 0.0, 1.0)


@misuse
def a_dtype_by_name(mesh):
    """RandomError
    random.normal: dtype must be one of float64, float32, float16, bfloat16, complex64, complex128, but it is 'float32'
      Instead: dtype=torch.float32
    """
    vfn.random.normal(KEY, (3,), "float32")


@misuse
def a_dtype_by_name_that_is_not_for_it(mesh):
    """RandomError
    random.normal: dtype must be one of float64, float32, float16, bfloat16, complex64, complex128, but it is 'uint8'
      Instead: dtype=torch.float32, say
    """
    vfn.random.normal(KEY, (3,), "uint8")


@misuse
def a_float_for_a_dtype_of_integers(mesh):
    """RandomError
    random.bits: dtype must be one of uint8, uint16, uint32, uint64, but it is 'float32'
      Instead: dtype=torch.uint8, say
    """
    vfn.random.bits(KEY, (3,), "float32")


@misuse
def a_number_for_the_dtype_of_an_initializer(mesh):
    """RandomError
    random.init.normal: dtype must be one of float64, float32, float16, bfloat16, but it is 0.0
      Instead: dtype=torch.float32, say; numbers that come after dtype by name, minval=0.0
    """
    vfn.random.init.normal()(KEY, (3, 3), 0.0)


@misuse
def one_key_cut_in_two(mesh):
    """SpecError
    shard_map(<lambda>): the arguments do not fit in_specs on the mesh (dp=2, tp=2)
      * args[0].data of shape i32[2], where args[0] is bound to <lambda>'s parameter 'key', corresponds to in_specs = P('dp'): these are the numbers of one key, and dim 0, those of a single key, must stay together
      Instead: P() for a key that all ranks share; vfn.random.split(key, n) with P('dp'), say, for a key on each rank
    """
    mapped(mesh, lambda key: vfn.random.normal(key, (2,)))(KEY)


@misuse
def keys_cut_in_two(mesh):
    """SpecError
    shard: 1 spec does not fit on the mesh (dp=2, tp=2)
      * keys.data is i32[4,2], its spec P(None, 'tp'): these are the numbers of keys, and dim 1, those of a single key, must stay together
      Instead: P() for a key that all ranks share; vfn.random.split(key, n) with P('dp'), say, for a key on each rank
    """
    keys = vfn.random.split(KEY, 4)
    vfn.shard(keys, mesh, P(None, "tp"))


@misuse
def a_rate_in_percent(mesh):
    """RandomError
    random.dropout: rate must be in [0, 1], but it is 10.0
      Instead: 0.1 for 10 %
    """
    vfn.random.dropout(KEY, X, 10)


@misuse
def a_draw_along_an_unknown_axis(mesh):
    """SpecError
    random.normal: the spec P('pd') of a draw of shape (4, 3) does not fit
      * axis 'pd' (dim 0) is not an axis of the mesh (dp=2, tp=2); did you mean 'dp'?
      Instead: use the axes of the mesh (dp=2, tp=2), each at most once, at most one entry a dim
    """
    vfn.random.normal(KEY, (4, 3), spec=P("pd"), mesh=mesh)


@misuse
def a_draw_in_a_body_that_does_not_divide(mesh):
    """SpecError
    random.normal: the spec P('dp') does not fit a draw of shape (5, 3) inside a shard_map body on the mesh (dp=2, tp=2)
      * dim 0 of size 5 is split 2 times by ('dp',), and 5 % 2 = 1
      Instead: sizes that the axes divide; outside of bodies any size will do
    """
    mapped(mesh, lambda x: x + vfn.random.normal(KEY, (5, 3), spec=P("dp")))(X)


@misuse
def a_draw_in_a_body_on_another_mesh(mesh):
    """SpecError
    random.normal: the spec P('i') does not fit a draw of shape (2, 3) inside a shard_map body on the mesh (dp=2, tp=2)
      * mesh is the mesh (i=4), not that of the body: leave it out
      Instead: sizes that the axes divide; outside of bodies any size will do
    """
    other = vfn.make_mesh((4,), ("i",))
    mapped(mesh, lambda x: x + vfn.random.normal(KEY, (2, 3), spec=P("i"), mesh=other))(X)


@misuse
def a_tensor_for_a_shape(mesh):
    """RandomError
    random.normal: shape must be integers, but it is the tensor f32[4,3]
      Instead: shape=x.shape
    """
    vfn.random.normal(KEY, X)


@misuse
def a_key_used_twice(mesh):
    """RandomError
    random.uniform: the key [0, 0] was used before, so the numbers are not new ones
      * by random.normal at misuses.py: `vfn.random.normal(KEY, (3,))`
      * and by random.uniform at misuses.py: `vfn.random.uniform(KEY, (3,))`
      Instead: k1, k2 = vfn.random.split(key), and each of them once; vfn.random.clone(key) where it is meant
    """
    with vfn.debug():
        vfn.random.normal(KEY, (3,))
        vfn.random.uniform(KEY, (3,))


@misuse
def a_key_used_after_it_was_split(mesh):
    """RandomError
    random.normal: the key [0, 0] was used before, so the numbers are not new ones
      * by random.split at misuses.py: `vfn.random.split(KEY)`
      * and by random.normal at misuses.py: `vfn.random.normal(KEY, (3,))`
      Instead: k1, k2 = vfn.random.split(key), and each of them once; vfn.random.clone(key) where it is meant
    """
    with vfn.debug():
        vfn.random.split(KEY)
        vfn.random.normal(KEY, (3,))


# --- training ---------------------------------------------------------------------------------------------------------


@misuse
def a_rate_that_is_a_string(mesh):
    """VfnError
    sgd: these arguments must be numbers
      * lr is the str '0.1'
      Instead: a number, or for lr a schedule: vfn.optim.cosine(1e-3, 1000)
    """
    vfn.optim.sgd("0.1")


@misuse
def a_norm_that_is_a_string(mesh):
    """VfnError
    clip_by_global_norm: these arguments must be numbers
      * max_norm is the str '1'
      Instead: a number
    """
    vfn.optim.clip_by_global_norm("1")


@misuse
def a_schedule_of_strings(mesh):
    """VfnError
    cosine: these arguments must be numbers
      * peak is the str '1e-3'
      Instead: a number
    """
    vfn.optim.cosine("1e-3", 100)


@misuse
def a_list_for_a_chain(mesh):
    """VfnError
    chain: each part must be an Optimizer
      * part 0 is a list
      Instead: chain(clip_by_global_norm(1.0), sgd(0.1)); chain(*parts) of a list
    """
    vfn.optim.chain([vfn.optim.sgd(0.1)])


@misuse
def gradients_of_other_parameters(mesh):
    """VfnError
    sgd: a tree lacks the structure of params
      * grads lacks 'w' and has besides 'v': params has 'w'
      Instead: give gradients and state as `grad` and `init` return them for these params
    """
    opt = vfn.optim.sgd(0.1)
    opt.update({"v": X}, opt.init({"w": X}), {"w": X})


@misuse
def updates_of_another_shape(mesh):
    """VfnError
    apply_updates: the updates do not fit the parameters
      * params['w'] is the tensor f32[4,3], its update the tensor f32[3]
      Instead: the updates that opt.update(grads, state, params) returns for these params
    """
    vfn.optim.apply_updates({"w": X, "b": X[0]}, {"w": X[0], "b": X[0]})


@misuse
def a_spec_for_an_argument_that_is_not_there(mesh):
    """SpecError
    check_parity(<lambda>): spec is not a prefix of args
      * spec has length 2, but args has length 1
      Instead: give spec the structure of args, or one entry for a whole subtree
    """
    vfn.check_parity(lambda x: x.sum(), X, mesh=mesh, spec=(P("dp"), P()))


@misuse
def an_axis_that_an_audit_cannot_find(mesh):
    """SpecError
    check_parity(<lambda>): 1 spec does not fit on the mesh (dp=2, tp=2)
      * args[0] is f32[4,3], its spec P('pd'): axis 'pd' (dim 0) is not an axis of the mesh (dp=2, tp=2); did you mean 'dp'?
      Instead: each axis of the mesh at most once, and at most one entry a dim
    """
    vfn.check_parity(lambda x: x.sum(), X, mesh=mesh, spec=P("pd"))


@misuse
def a_log_asked_for_another_name(mesh):
    """VfnError
    comm_log: op='psum' is not an op of the log
      Instead: all_reduce, all_gather, reduce_scatter, reduce, all_to_all, permute, broadcast, send, receive: psum is an all_reduce, psum_scatter a reduce_scatter
    """
    with vfn.comm_log() as log:
        pass
    log.count("psum")


@misuse
def an_audit_of_a_result(mesh):
    """TransformError
    check_parity: f must be a function, but it is the tensor f32[4,3]
      Instead: vfn.check_parity(f, ...), with the function itself and not with what it returns
    """
    vfn.check_parity(X, X, mesh=mesh)


# --- warnings ---------------------------------------------------------------------------------------------------------


@misuse
def a_sum_of_what_is_the_same(mesh):
    """UserWarning
    vfn.psum over 'dp', 'tp': a value that is the same on all ranks is multiplied by 4
      * x['b'] is f32[3]
      * x['w'] is f32[4,3]
      Instead: x as it is: a gradient with respect to such a value is already summed; or 4 * x, which says so
    """
    mapped(mesh, lambda w: vfn.psum(w, ("dp", "tp")), P(), P())({"b": X[0], "w": X})


@misuse
def a_sum_of_a_gradient_that_is_summed(mesh):
    """UserWarning
    vfn.psum over 'dp': a value that is the same on all ranks is multiplied by 2
      * x is f32[3]
      Instead: x as it is: a gradient with respect to such a value is already summed; or 2 * x, which says so
    """

    def body(w, x):
        gradient = vfn.grad(lambda w: (w * x).sum())(w)
        return vfn.psum(gradient, "dp")  # here

    mapped(mesh, body, (P(), P("dp")), P())(X[0], X)


@misuse
def the_same_mask_on_every_rank(mesh):
    """UserWarning
    random.dropout: the same numbers are drawn on all ranks along axis 'dp', where x differs
      * x is f32[2,3]{V:dp}
      * the key is the same on all of them
      Instead: vfn.random.fold_in(key, vfn.axis_index('dp')) for numbers of each rank's own; spec=... for one rank's block of a whole draw; vfn.pvary(key, 'dp'), if the same numbers are meant
    """
    mapped(mesh, lambda x: vfn.random.dropout(KEY, x, 0.5))(X)


@misuse
def the_same_noise_for_every_ranks_logits(mesh):
    """UserWarning
    random.categorical: the same numbers are drawn on all ranks along axis 'dp', where logits differs
      * logits is f32[2,3]{V:dp}
      * the key is the same on all of them
      Instead: vfn.random.fold_in(key, vfn.axis_index('dp')) for numbers of each rank's own; spec=... for one rank's block of a whole draw; vfn.pvary(key, 'dp'), if the same numbers are meant
    """
    mapped(mesh, lambda x: vfn.random.categorical(KEY, x))(X)


# --- names and layouts as JAX has them --------------------------------------------------------------------------------


@misuse
def an_axis_that_a_mesh_has_not(mesh):
    """MeshError
    mesh.shape: there is no axis 'pd'; did you mean 'dp'?
      * this is the mesh (dp=2, tp=2)
    """
    mesh.shape["pd"]


@misuse
def a_mesh_of_names_by_both_words(mesh):
    """MeshError
    make_mesh: names and axis_names are one parameter, and both are given
      * names=('dp',)
      * axis_names=('tp',)
      Instead: names alone
    """
    vfn.make_mesh((4,), ("dp",), axis_names=("tp",))


@misuse
def a_type_of_a_tree(mesh):
    """TreeError
    typeof: x must be one tensor, key, number or string, but it is a dict with keys 'w'
      Instead: vfn.tree.map(vfn.typeof, tree), or vfn.show(tree), for a whole tree
    """
    vfn.typeof({"w": X})


@misuse
def a_sharding_on_another_mesh(mesh):
    """MeshError
    shard: the shardings are not on one mesh
      * spec is on the mesh (a=4)
      * mesh is the mesh (dp=2, tp=2)
      Instead: x.sharding.spec, a spec for any mesh
    """
    x = vfn.shard(X, vfn.make_mesh((4,), ("a",)), P("a"))
    vfn.shard(X, mesh, x.sharding)


@misuse
def a_sharding_in_in_specs(mesh):
    """SpecError
    shard_map(<lambda>): the arguments do not fit in_specs on the mesh (dp=2, tp=2)
      * args[0] of shape f32[4@dp,3], where args[0] is bound to <lambda>'s parameter 'x', corresponds to in_specs = Sharding(mesh (dp=2, tp=2), P('dp')): it is the Sharding Sharding(mesh (dp=2, tp=2), P('dp')), not a vfn.P
      Instead: vfn.P('dp'), which is its .spec
    """
    x = vfn.shard(X, mesh, P("dp"))
    mapped(mesh, lambda x: x, in_specs=x.sharding)(x)


@misuse
def an_argument_that_a_jitted_function_has_not(mesh):
    """TransformError
    jit: static_argnames names 'nn', but <lambda> takes no argument of this name; did you mean 'n'?
      Instead: one of x, n
    """
    vfn.jit(lambda x, n: x, static_argnames="nn")


@misuse
def a_place_for_a_name(mesh):
    """TransformError
    jit: donate_argnames must be a name or a tuple of names of arguments, but it is 0
      Instead: donate_argnames="n" for the argument n
    """
    vfn.jit(lambda x, n: x, donate_argnames=0)


@misuse
def a_name_that_is_taken_by_position(mesh):
    """TransformError
    jit: static_argnames names 'n', which <lambda> takes by position alone
      Instead: static_argnums=1
    """
    vfn.jit(lambda x, n, /: x, static_argnames="n")


@misuse
def an_argument_static_and_donated(mesh):
    """TransformError
    jit: n cannot be static and donated
      Instead: one of the two: a static argument is a Python value, and has no memory to use up
    """
    vfn.jit(lambda x, n: x, static_argnums=-1, donate_argnums=1)


@misuse
def no_amount_of_memory(mesh):
    """TransformError
    jit: memory='8 gigabytes' is no amount of memory
      Instead: bytes, as an int or as memory="8 GiB"; or a share of what the plan needs without it, memory="60 %"
    """
    vfn.jit(lambda x: x, memory="8 gigabytes")


@misuse
def a_limit_on_memory_that_inductor_would_not_hold(mesh):
    """TransformError
    jit: memory='60 %' cannot be held with backend='inductor', whose code takes memory of its own
      Instead: backend="torch", or leave memory out
    """
    vfn.jit(lambda x: x, memory="60 %", backend="inductor")


@misuse
def less_memory_than_any_plan_needs(mesh):
    """TransformError
    jit: no plan was found that needs at most 64 B at once (memory='64 B')
      * the least is 96 B, of which arguments and constants alone are 50 %: 48 B
      * 48 B at its peak from misuses.py: `vfn.jit(lambda x: torch.exp(x), memory="64 B")(X)`
      Instead: memory="96 B"; or donate_argnums, a smaller batch, a mesh that splits what is large
    """
    vfn.jit(lambda x: torch.exp(x), memory="64 B")(X)


@misuse
def a_layout_by_both_words(mesh):
    """TransformError
    jit: out_specs and out_shardings are one parameter, and both are given
      * out_specs=P('dp')
      * out_shardings=P()
      Instead: out_specs alone
    """
    vfn.jit(lambda x: x, out_specs=P("dp"), out_shardings=P())


@misuse
def arguments_of_a_jitted_function_that_lie_otherwise(mesh):
    """SpecError
    jit(<lambda>): the arguments do not fit in_specs on the mesh (dp=2, tp=2)
      * x['a'], of which in_specs says P('tp'): it lies otherwise, f32[4@dp,3] on the mesh (dp=2, tp=2)
      * x['b'], of which in_specs says P('tp', None, 'dp'): it has 3 entries, but the value has 2 dims
      * x['c'], of which in_specs says 'tp': it is the str 'tp', not a vfn.P
      * x['d'], of which in_specs says P('tp'): it is the int 3, which has no dims
      Instead: vfn.with_sharding(x, spec), which moves it, before the call or in the function; each axis of the mesh at most once, and at most one entry a dim; vfn.P('tp'); torch.tensor(x) for a list of numbers; P() for a number that all ranks have
    """
    specs = {"a": P("tp"), "b": P("tp", None, "dp"), "c": "tp", "d": P("tp")}
    vfn.jit(lambda x: x, in_specs=(specs,))({"a": vfn.shard(X, mesh, P("dp")), "b": X, "c": X, "d": 3})


@misuse
def in_specs_for_fewer_arguments(mesh):
    """SpecError
    jit(<lambda>): in_specs must be one spec, or a tuple with one for each argument that is not static, which are 2
      * it is the tuple (P('dp'),)
      Instead: a tuple in the order of the arguments: in_specs=(P(...), None), None for one that stays as it is
    """
    vfn.jit(lambda x, n, y: x, in_specs=(P("dp"),), static_argnums=1)(X, 2, X)


@misuse
def in_specs_and_an_argument_by_name(mesh):
    """SpecError
    jit(<lambda>): in_specs says how arguments by position lie, but 'y' is given by name
      Instead: all arguments that are not static by position
    """
    vfn.jit(lambda x, y: x, in_specs=P("dp"))(X, y=X)


# --- loops and branches -----------------------------------------------------------------------------------------------


@misuse
def a_carry_that_changes_its_types(mesh):
    """TransformError
    scan: the carry must keep its structure, shapes, dtypes, layouts and types, and f returns another one
      * init['a'] is f32[3] and comes back as f64[3]
      * init['b'] is f32[2,3] and comes back as f32[1,3]
      * init['c'] is f32[4,3] and comes back as f32[4@dp,3]
      Instead: init['a'].to(torch.float64), or .to(torch.float32) for what comes back; vfn.shard(init['c'], mesh, P('dp'))
    """
    init = {"a": X[0], "b": X[:2], "c": X, "n": 0}
    new = {"a": X[0].double(), "b": X[:1], "c": vfn.shard(X, mesh, P("dp")), "n": 1.5}
    vfn.scan(lambda c, _: (new, None), init, length=2)


@misuse
def a_carry_that_changes_its_structure(mesh):
    """TransformError
    scan: the carry must keep its structure, shapes, dtypes, layouts and types, and f returns another one
      * the carry that f returns lacks 'count': init has 'count', 'total'
      Instead: the same types from f as in init
    """
    vfn.scan(lambda c, x: ({"total": c["total"] + x}, x), {"total": X[0], "count": 0}, X)


@misuse
def a_carry_that_begins_to_vary(mesh):
    """TransformError
    scan: the carry must keep its structure, shapes, dtypes, layouts and types, and f returns another one
      * init is f32[3] and comes back as f32[3]{V:dp}
      Instead: vfn.pvary(init, 'dp')
    """
    mapped(mesh, lambda x: vfn.scan(lambda c, row: (c + row, None), torch.zeros(3), x)[0], out_specs=P("dp"))(X)


@misuse
def a_scan_that_returns_the_carry_alone(mesh):
    """TransformError
    scan: f must return a pair, the new carry and what is collected
      * it returned the tensor f32[3]
      Instead: return carry, y; or carry, None where nothing is collected
    """
    vfn.scan(lambda c, x: c + x, X[0], X)


@misuse
def a_scan_over_what_has_no_slices(mesh):
    """TransformError
    scan: xs has leaves without a leading dim to go over
      * xs['lr'] is f32[]
      Instead: close over what is the same in all iterations, or make it a part of the carry
    """
    vfn.scan(lambda c, x: (c, None), 0, {"a": X, "lr": torch.tensor(0.1)})


@misuse
def a_scan_over_different_lengths(mesh):
    """TransformError
    scan: the leaves of xs have leading dims of different sizes
      * xs['a'] is f32[4,3]
      * xs['b'] is f32[3,4]
      Instead: leaves with one leading size: x.unsqueeze(0).expand(n, ...) for what is the same in all iterations
    """
    vfn.scan(lambda c, x: (c, None), 0, {"a": X, "b": X.T})


@misuse
def a_scan_of_unknown_length(mesh):
    """TransformError
    scan: there are no xs to go over, and no length
      Instead: length=n, the number of iterations
    """
    vfn.scan(lambda c, x: (c, None), 0)


@misuse
def a_scan_of_another_length(mesh):
    """TransformError
    scan: length=3 is not the number of slices
      * xs is f32[4,3]
      Instead: leave length out, where xs has leaves
    """
    vfn.scan(lambda c, x: (c, None), 0, X, length=3)


@misuse
def a_scan_whose_length_is_a_tensor(mesh):
    """TransformError
    scan: length must be an int, but it is the tensor i64[]
      Instead: a Python int: the number of iterations is a part of the plan
    """
    vfn.scan(lambda c, x: (c, None), 0, length=torch.tensor(3))


@misuse
def a_scan_with_a_string_in_its_carry(mesh):
    """TransformError
    scan: the leaves of init must be tensors or numbers
      * init['name'] is the str 'adam'
      Instead: close over what is no number, or leave it out of the tree
    """
    vfn.scan(lambda c, x: (c, None), {"name": "adam", "w": X}, X)


@misuse
def a_scan_over_a_split_dim_under_strict(mesh):
    """ReshardError
    scan: strict: each slice would have to be brought to all ranks, for the leading dim is split
      * xs is f32[4@dp,3]
      Instead: vfn.with_sharding(xs, P(None, ...)) before the loop, which splits another dim or none
    """
    with vfn.strict():
        vfn.scan(lambda c, x: (c, x), 0, vfn.shard(X, mesh, P("dp")))


@misuse
def a_gradient_of_a_while_loop(mesh):
    """TransformError
    while_loop: it has no gradient, for a backward pass would have to keep the values of an unknown number of iterations
      Instead: vfn.scan, or fori_loop between ints, which run for a known number of times; or vfn.jvp
    """
    vfn.grad(lambda x: vfn.while_loop(lambda c: c < 9, lambda c: c * x, x))(torch.tensor(2.0))


@misuse
def a_collective_under_a_condition_of_each_rank(mesh):
    """VaryingTypeError
    psum: axis_name='dp', but the condition of the cond around varies over 'dp', so ranks go different ways
      Instead: the collective before or after the cond; or one condition for all ranks, of vfn.pmax(..., 'dp')
    """

    def body(x):
        return vfn.cond(vfn.axis_index("dp") == 0, lambda x: vfn.psum(x, "dp"), torch.sin, x)  # here

    mapped(mesh, body)(X)


@misuse
def a_condition_with_dims(mesh):
    """TransformError
    cond: pred must be a 0-d tensor or a bool, but it is the tensor bool[4,3]
      Instead: x.all() or x.any() of a condition with dims; torch.where(x, a, b) for one choice per element
    """
    vfn.cond(X > 0, torch.sin, torch.cos, X)


@misuse
def branches_of_different_types(mesh):
    """TransformError
    cond: true_fun and false_fun must give the same structure, shapes and dtypes
      * out is f32[4,3] of true_fun and f32[3,4] of false_fun
      Instead: a.to(b.dtype), torch.zeros_like(b) where nothing is computed
    """
    vfn.vmap(lambda p: vfn.cond(p, lambda: X, lambda: X.T))(torch.tensor([True, False]))


@misuse
def branches_of_different_dtypes_under_jit(mesh):
    """TransformError
    cond: true_fun and false_fun must give the same structure, shapes, dtypes, layouts and types
      * out is f32[4@dp,3] of true_fun and f64[4@dp,3] of false_fun
      Instead: a.to(b.dtype), torch.zeros_like(b) where nothing is computed
    """
    split = vfn.shard(X, mesh, P("dp"))
    vfn.jit(lambda p: vfn.cond(p, lambda: split, lambda: split.double()))(torch.tensor(True))


@misuse
def a_plan_of_branches_of_different_layouts(mesh):
    """TransformError
    jit: <lambda> cannot be recorded
      * cond has to read which branch runs: out is f32[4@dp,3] of true_fun and f32[4,3] of false_fun; with vfn.with_sharding(out, P('dp')) in false_fun it is a call of the plan, at misuses.py: `f = lambda p: vfn.cond(p > 0, lambda: split, lambda: other)`
      Instead: torch.where for `if`, tensors for numbers; or leave the jit out
    """
    split = vfn.shard(X, mesh, P("dp"))
    other = vfn.shard(X, mesh, P())
    f = lambda p: vfn.cond(p > 0, lambda: split, lambda: other)
    vfn.jit(f).lower(torch.tensor(1.0))


@misuse
def an_index_that_is_a_float(mesh):
    """TransformError
    switch: index must be a 0-d integer tensor or an int, but it is the tensor f32[]
    """
    vfn.switch(torch.tensor(1.0), [torch.sin, torch.cos], X)


@misuse
def a_switch_without_branches(mesh):
    """TransformError
    switch: branches must be a list of functions, at least one, but it is the list []
      Instead: switch(index, [f, g, ...], *operands)
    """
    vfn.switch(0, [], X)


@misuse
def an_associative_scan_of_different_sizes(mesh):
    """TransformError
    associative_scan: the leaves of elems have different sizes along axis=0
      * elems[0] is f32[4,3]
      * elems[1] is f32[3,4]
      Instead: leaves with one element for each place
    """
    vfn.associative_scan(lambda a, b: a, (X, X.T))


@misuse
def an_associative_function_that_drops_a_dim(mesh):
    """TransformError
    associative_scan: fn must give what it is given, a tree of the same structure, shapes and dtypes
      * elems is f32[2,3] and comes back as f32[2]
      Instead: the same types from fn
    """
    vfn.associative_scan(lambda a, b: (a + b).sum(1), X)


@misuse
def unrolling_between_tensors(mesh):
    """TransformError
    fori_loop: unroll is for loops between ints, whose length is known
      Instead: leave unroll out, or give both bounds as ints
    """
    vfn.fori_loop(0, torch.tensor(3), lambda i, x: x, X, unroll=2)


# --- schedules of pipelines -------------------------------------------------------------------------------------------


def scheduled(*rows):
    """A schedule with a stage for each row, which are in letters: f, b, w and d (for BW), each followed by the microbatch."""
    kinds = {"f": "F", "b": "B", "w": "W", "d": "BW"}
    parts = [[vfn.schedules.Action(kinds[task[0]], s, int(task[1])) for task in r.split()] for s, r in enumerate(rows)]
    return vfn.schedules.Schedule(range(len(rows)), parts)


@misuse
def a_schedule_that_is_not_complete(mesh):
    """ScheduleError
    Schedule.check: the schedule is not complete
      * rank 0 runs 0BW1 and also 0W1
      * rank 1 runs 1F0 2 times
      * rank 1 never runs 1F1
      * rank 1 never runs 1W1
      * rank 1 runs 1BW0 before 1F0
    """
    scheduled("f0 f1 d0 d1 w1", "d0 f0 f0 b1").check()


@misuse
def a_schedule_without_tasks(mesh):
    """ScheduleError
    Schedule.check: the schedule is not complete
      * there is no task
    """
    vfn.schedules.Schedule((0, 1), ((), ())).check()


@misuse
def a_schedule_with_stages_elsewhere(mesh):
    """ScheduleError
    Schedule.check: the schedule is not complete
      * stage 1 is on rank 4, but there are rows for 2 ranks
      * rank 1 runs 1F0, but stage 1 is on rank 4
      * rank 1 runs 1BW0, but stage 1 is on rank 4
    """
    vfn.schedules.Schedule((0, 4), scheduled("f0 d0", "f0 d0").order).check()


@misuse
def a_schedule_that_deadlocks(mesh):
    """ScheduleError
    Schedule.check: deadlock: each of these waits for the next
      * rank 0 runs 0BW0 when it has 1BW0 from rank 1
      * rank 1 runs 1BW0 after 1F0, after 1BW1, after 1F1
      * rank 1 runs 1F1 when it has 0F1 from rank 0
      * rank 0 runs 0F1 after 0BW0
    """
    scheduled("f0 d0 f1 d1", "f1 d1 f0 d0").check()


@misuse
def a_schedule_that_deadlocks_by_rendezvous(mesh):
    """ScheduleError
    Schedule.check: deadlock where sends wait for their receives: each of these waits for the next
      * rank 1 runs 1F0 after 1BW1, after 1F1
      * rank 1 runs 1F1 when it has 0F1 from rank 0
      * rank 1 has room for 0F1 when it has run 1F0
      Instead: Schedule.check(blocking=False), if each rank goes on before what it sends is received
    """
    scheduled("f0 f1 d0 d1", "f1 d1 f0 d0").check()


@misuse
def a_schedule_with_sends_in_its_file(mesh):
    """ScheduleError
    Schedule.from_csv: rank 0 has the entry '0SEND_F0', which is no task of a stage
      Instead: the schedule that has tasks alone (compute_only), as 0F3, 0I3, 0W3, 0B3 or (0F3;1B0)OVERLAP_F_B
    """
    path = Path(tempfile.mkdtemp()) / "schedule.csv"
    path.write_text("0F0,0SEND_F0,1RECV_B0,0B0")
    vfn.schedules.Schedule.from_csv(path)


@misuse
def a_schedule_whose_file_lacks_a_stage(mesh):
    """ScheduleError
    Schedule.from_csv: stages are missing
      * no rank runs stage 1
    """
    path = Path(tempfile.mkdtemp()) / "schedule.csv"
    path.write_text("0F0,0B0\n2F0,2B0\n")
    vfn.schedules.Schedule.from_csv(path)


@misuse
def a_schedule_of_too_few_microbatches(mesh):
    """ScheduleError
    schedules.dualpipev: 4 ranks need 8 microbatches, not 6
      Instead: more microbatches, or schedules.zbv, which takes any number of them
    """
    vfn.schedules.dualpipev(4, 6)


@misuse
def hardware_that_cannot_be(mesh):
    """HardwareError
    Hardware: 'mine' cannot be
      * flops['bfloat16'] is '7e14', and has to be above 0
      * bytes is 0, and has to be above 0
      * links[0].protocols[0].bytes is -1.0, and has to be above 0
      * flops has no float32, only bfloat16
      * links[0] has 'all_reduced'; did you mean 'all_reduce'?; kinds are all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, permute, send, receive
      * links[1] joins 12, which is no multiple of the 8 of links[0]
    """
    way = vfn.hardware.Protocol(1e-5, 1e-6, -1.0)
    links = (vfn.hardware.Link(8, (way,), {"all_reduced": ()}), vfn.hardware.Link(12, ()))
    vfn.hardware.Hardware("mine", {"bfloat16": "7e14"}, 0, 1e-6, 1e9, links)


@misuse
def hardware_of_too_few_ranks(mesh):
    """HardwareError
    Hardware.collective: 1 node of 8 H100 has 8 ranks, and the mesh (dp=2, tp=8) 16
      Instead: a preset of more nodes, as in vfn.hardware.h100(nodes=...)
    """
    vfn.hardware.h100().collective("all_reduce", 1e6, {"dp": 2, "tp": 8}, ["tp"])


@misuse
def hardware_from_another_text(mesh):
    """HardwareError
    Hardware.from_json: this is not what Hardware.to_json writes: KeyError: 'links'
    """
    vfn.hardware.Hardware.from_json('{"name": "mine"}')


@misuse
def a_collective_that_is_none(mesh):
    """HardwareError
    Hardware.collective: 'allreduce' is no kind of collective; did you mean 'all_reduce'?
      * there are all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, permute, send, receive
    """
    vfn.hardware.h100().collective("allreduce", 1e6, {"tp": 8}, ["tp"])


SHAPE = vfn.ShapeDtype((9, 7), torch.float32)


@misuse
def a_price_without_a_mesh(mesh):
    """MeshError
    price: there is no mesh
      Instead: mesh={"dp": 8, "tp": 8}, say: the sizes of its axes
    """
    vfn.price(torch.sum, SHAPE)


@misuse
def a_price_of_fewer_specs_than_arguments(mesh):
    """SpecError
    price: specs= is a tuple of 1 for 2 arguments
      Instead: one for each, None for those as they are; or one P for all
    """
    vfn.price(torch.add, SHAPE, SHAPE, specs=(P(),), mesh={"dp": 4})


@misuse
def a_price_of_specs_that_do_not_fit(mesh):
    """SpecError
    price: the specs do not fit on the mesh (dp=4)
      * args[0] is f32[9,7], its spec P('tp', None, 'dp'): axis 'tp' (dim 0) is not an axis of the mesh (dp=4)
      * args[0] is f32[9,7], its spec P('tp', None, 'dp'): it has 3 entries, but the value has 2 dims
      Instead: the axes of the mesh, each at most once, at most one entry a dim
    """
    vfn.price(torch.relu, SHAPE, specs=(P("tp", None, "dp"),), mesh={"dp": 4})


@misuse
def a_price_of_a_step_that_reads_values(mesh):
    """TransformError
    price: <lambda> cannot be recorded
      * a value is read in Python, at misuses.py: `vfn.price(lambda x: x * x.sum().item(), SHAPE, mesh={"dp": 4})`
      Instead: torch.where for `if`, tensors for numbers; what cannot be recorded, outside of the step
    """
    vfn.price(lambda x: x * x.sum().item(), SHAPE, mesh={"dp": 4})


@misuse
def a_price_of_a_step_that_raises(mesh):
    """TransformError
    price: <lambda> cannot be recorded
      * recording it raised KeyError: 'lr'
      Instead: torch.where for `if`, tensors for numbers; what cannot be recorded, outside of the step
    """
    vfn.price(lambda x: x * {}["lr"], SHAPE, mesh={"dp": 4})


@misuse
def a_layout_of_a_step_whose_branch_depends_on_an_argument(mesh):
    """TransformError
    auto: <lambda> cannot be recorded
      * a truth value of arguments is read in Python, and of them only shapes are known, at misuses.py: `vfn.auto(lambda x, n: x if n > 2 else -x, X, torch.tensor(3), mesh={"dp": 4})`
      Instead: torch.where for `if`, tensors for numbers; what cannot be recorded, outside of the step
    """
    vfn.auto(lambda x, n: x if n > 2 else -x, X, torch.tensor(3), mesh={"dp": 4})


@misuse
def a_price_on_hardware_that_nobody_knows(mesh):
    """HardwareError
    price: hardware='h10' is none that is known; did you mean 'h100'?
      * there are h100, a100, b200, cpu
      Instead: vfn.hardware.Hardware(...) for others
    """
    vfn.price(torch.sum, SHAPE, mesh={"dp": 4}, hardware="h10")


@misuse
def a_choice_for_a_jitted_step(mesh):
    """TransformError
    auto: the step is jitted already
      Instead: the function itself, and choice.jit()
    """
    vfn.auto(vfn.jit(torch.sum), SHAPE, mesh={"dp": 4})


@misuse
def a_choice_on_more_ranks_than_there_are(mesh):
    """HardwareError
    auto: 1 node of 8 H100 has 8 ranks, and the mesh (dp=16) 16
      Instead: a preset of more nodes, as in vfn.hardware.h100(nodes=...)
    """
    vfn.auto(torch.sum, SHAPE, mesh=[{"dp": 4}, {"dp": 16}], hardware=vfn.hardware.h100())


@misuse
def a_choice_among_no_meshes(mesh):
    """MeshError
    auto: mesh= is an empty list
      Instead: mesh={"dp": 8, "tp": 8}, or vfn.mesh_shapes(64)
    """
    vfn.auto(torch.sum, SHAPE, mesh=[])


@misuse
def a_pipelines_axis_among_the_other_names(mesh):
    """MeshError
    mesh_shapes: the axis 'dp' of the pipeline is among names=('dp', 'tp')
    """
    vfn.mesh_shapes(8, pipeline="dp")


@misuse
def a_choice_within_no_amount_of_memory(mesh):
    """TransformError
    auto: memory='70 gigs' is no amount of memory
      Instead: bytes, as an int or as memory="70 GiB"; or a share of what a device has, memory="90 %"
    """
    vfn.auto(torch.sum, SHAPE, mesh={"dp": 4}, memory="70 gigs")


@misuse
def a_choice_with_specs_for_other_axes(mesh):
    """SpecError
    auto: fixed= does not fit on the mesh (dp=4)
      * args[0] is f32[9,7], its spec P('tp'): axis 'tp' (dim 0) is not an axis of the mesh (dp=4)
      Instead: the axes of the mesh, each at most once, at most one entry a dim
    """
    vfn.auto(torch.relu, SHAPE, mesh={"dp": 4}, fixed=P("tp"))


@misuse
def a_choice_with_specs_that_do_not_divide(mesh):
    """SpecError
    auto: args[0] is given as P('dp'), in which it is not looked for
      * sizes that do not divide, axes of a dim in another order than the mesh's, and equal layers that lie differently are left out
      Instead: vfn.price of the whole layout
    """
    vfn.auto(torch.relu, SHAPE, mesh={"dp": 4}, fixed=P("dp"))


@misuse
def a_choice_with_rules_that_match_nothing(mesh):
    """SpecError
    auto: rules of fixed[0] match no leaf
      * 'up$'
    """
    vfn.auto(lambda p: p["w"].relu(), {"w": SHAPE}, mesh={"dp": 4}, fixed=([("up$", P("dp"))],))


@misuse
def a_choice_among_others_than_are_fixed(mesh):
    """SpecError
    auto: others['rows'] lies otherwise than fixed=
      * args[0]: P('dp'), and fixed as P()
    """
    vfn.auto(torch.relu, SHAPE, mesh={"dp": 3}, fixed=P(), others={"rows": P("dp")})


@misuse
def a_choice_among_a_step_without_specs(mesh):
    """SpecError
    auto: others['mine'] is a tuple of 1, a step the first
      Instead: specs, as for vfn.price; (step, specs), a step that states its layout itself; or (step, specs, mesh)
    """
    vfn.auto(torch.relu, SHAPE, mesh={"dp": 3}, others={"mine": (torch.relu,)})


@misuse
def a_choice_among_others_that_fit_on_no_mesh(mesh):
    """SpecError
    auto: others['mine']: the specs do not fit on the mesh (dp=3)
      * args[0] is f32[9,7], its spec P('tp'): axis 'tp' (dim 0) is not an axis of the mesh (dp=3)
      Instead: the axes of the mesh, each at most once, at most one entry a dim
    """
    vfn.auto(torch.relu, SHAPE, mesh={"dp": 3}, others={"mine": (torch.relu, (P("tp"),))})


@misuse
def a_choice_among_nothing(mesh):
    """SpecError
    auto: candidates=0 and no others= leave nothing to choose from
    """
    vfn.auto(torch.relu, SHAPE, mesh={"dp": 4}, candidates=0)


@misuse
def a_choice_with_a_place_to_use_up_that_is_none(mesh):
    """TransformError
    auto: donate_argnums=1, of 1 arguments
      * 1 is no position of an argument
    """
    vfn.auto(torch.relu, SHAPE, mesh={"dp": 4}, donate_argnums=1)


@misuse
def a_measurement_of_no_ranks(mesh):
    """MeshError
    hardware.measure: no rank of an abstract mesh is there
      Instead: vfn.make_mesh, or a preset
    """
    vfn.hardware.measure(vfn.abstract_mesh(4, "dp"))


@misuse
def costs_of_stages_for_other_ranks(mesh):
    """ScheduleError
    schedules.auto: the costs are of 3 stages, but 2 ranks have an equal number each
      Instead: costs of 2 or 4 stages
    """
    vfn.schedules.auto(vfn.schedules.Costs(F=[1, 2, 3], B=[1, 1, 1]), p=2, m=4)


@misuse
def a_schedule_without_memory(mesh):
    """ScheduleError
    schedules.auto: a microbatch needs 2 chunks on each of 2 ranks, but memory is [1, 4]
      Instead: at least 2 for each rank
    """
    vfn.schedules.auto(vfn.schedules.Costs(F=[1, 1, 1, 1]), p=2, m=4, memory=[1, 4])


@misuse
def a_schedule_of_no_ranks(mesh):
    """ScheduleError
    schedules.one_f_one_b: sizes are whole numbers from 1 on
      * p is 0
      * m is 2.5
    """
    vfn.schedules.one_f_one_b(0, 2.5)


@misuse
def costs_of_other_stages(mesh):
    """ScheduleError
    Costs: they do not fit a schedule of 2 stages
      * F has 3 entries for 2 stages
      * p2p is -1: no time is negative
      * overlap is 2: it is a part, from 0 to 1
    """
    vfn.schedules.gpipe(2, 2).simulate(vfn.schedules.Costs(F=[1, 2, 3], p2p=-1, overlap=2))


# --- pipelines --------------------------------------------------------------------------------------------------------


def layers(params, x):
    for w in params:
        x = vfn.cut(torch.tanh(x @ w), "layer")
    return x.square().mean()


def two(f=layers, **more):
    """A function in two stages along "dp"."""
    return vfn.pipeline(f, "dp", **{"microbatches": 2, **more})


def three(mesh, spec=P()):
    return vfn.shard([torch.eye(3)] * 3, mesh, spec)


@misuse
def a_pipeline_without_cuts(mesh):
    """TooFewCuts
    pipeline: 2 stages need 1 cut, one behind the other, and the function has 0
      Instead: x = vfn.cut(layer(x)) behind each layer; or fewer stages
    """
    vfn.grad(two(lambda params, x: (x @ params[0]).sum()))(three(mesh), X)


@misuse
def a_pipeline_with_other_cuts(mesh):
    """TransformError
    pipeline: there is no cut 3, 'block'
      * the function has 3 cuts, with the names layer
    """
    vfn.grad(two(cuts=["layer", 3, "block"]))(three(mesh), X)


@misuse
def a_pipeline_with_more_cuts_than_stages(mesh):
    """TransformError
    pipeline: the cuts [0, 1] make 3 stages, and the schedule has 2
      Instead: 1 cut, one behind the other
    """
    vfn.grad(two(cuts=[0, 1]))(three(mesh), X)


@misuse
def a_pipeline_of_rows_that_do_not_divide(mesh):
    """VfnError
    pipeline: the batch has no 3 equal parts
      * batch[0] is the tensor f32[4,3]: 4 rows are no multiple of 3
      Instead: a count that divides the rows; what is no batch by keyword
    """
    vfn.grad(two(microbatches=3))(three(mesh), X)


@misuse
def a_pipeline_with_a_schedule_for_others(mesh):
    """TransformError
    pipeline: the schedule does not fit
      * it is for 3 ranks, and the axis 'dp' has 2
      * it has 4 microbatches, and the function 2
    """
    vfn.grad(two(schedule=vfn.schedules.gpipe(3, 4)))(three(mesh), X)


@misuse
def a_pipeline_by_an_unknown_schedule(mesh):
    """TransformError
    pipeline: there is no schedule '1F1B'
      Instead: one of 'gpipe', '1f1b', 'interleaved', 'zb-h1', 'zb-h2', 'zbv', 'dualpipev', 'auto'; a vfn.schedules.Schedule; or a function (ranks, microbatches) -> Schedule
    """
    vfn.pipeline(layers, "dp", microbatches=2, schedule="1F1B")


@misuse
def a_pipeline_that_gathers_by_layer(mesh):
    """TransformError
    pipeline: gather must be "step" or "microbatch", but it is 'layer'
    """
    vfn.pipeline(layers, "dp", microbatches=2, gather="layer")


@misuse
def a_pipeline_within_a_share_of_memory(mesh):
    """TransformError
    pipeline: memory='60 %' is no amount of memory
      Instead: bytes, as an int or as memory="8 GiB"
    """
    vfn.pipeline(layers, "dp", microbatches=2, memory="60 %")


@misuse
def a_pipeline_whose_cuts_are_a_number(mesh):
    """TransformError
    pipeline: cuts must be "balanced", or a list of numbers or names of cuts, but it is 3
    """
    vfn.pipeline(layers, "dp", microbatches=2, cuts=3)


@misuse
def a_pipeline_with_costs_for_a_named_schedule(mesh):
    """TransformError
    pipeline: costs=Costs(F=1, B=1, W=1, p2p=0, blocking=False, overlap=0) does not go with schedule='1f1b'
      Instead: schedule="auto", costs=vfn.schedules.Costs(F=..., B=..., W=...), as measured
    """
    vfn.pipeline(layers, "dp", microbatches=2, costs=vfn.schedules.Costs())


@misuse
def a_pipeline_run_on_an_abstract_mesh(mesh):
    """TransformError
    pipeline: stages do not run on an abstract mesh
      Instead: vfn.price(step, ...), or piped.plan(params, *batch), says beforehand what a step takes; vfn.make_mesh, to run it
    """
    vfn.grad(two())(three(vfn.abstract_mesh((2,), ("dp",)), P()), X)


@misuse
def a_pipeline_along_an_axis_that_splits_a_parameter(mesh):
    """SpecError
    pipeline: arguments are whole along the axis 'dp' of the mesh (dp=2, tp=2), or at coordinates of it
      * params[0] is f32[3@dp,3] on the mesh (dp=2, tp=2)
      Instead: vfn.with_sharding(x, a spec that 'dp' does not split)
    """
    vfn.grad(two())(three(mesh, P("dp")), X)


@misuse
def a_pipeline_whose_parameters_are_elsewhere(mesh):
    """TransformError
    pipeline: a stage uses parameters that its rank does not have
      * params[0] is at dp=1, and used at 0
      Instead: specs = vfn.pipeline(...).specs(params, *batch); vfn.with_sharding(params, specs)
    """
    vfn.grad(two(cuts=[0]))(three(mesh, P(at={"dp": 1})), X)


@misuse
def a_cut_in_what_is_computed_again(mesh):
    """TransformError
    cut: a pipeline cannot cut what is computed again for the backward pass
      Instead: vfn.cut(vfn.remat(f)(x)): the cut around the remat
    """

    def f(params, x):
        return vfn.cut(x @ params[0]).sum()  # here

    vfn.grad(two(vfn.remat(f)))(three(mesh), X)


@misuse
def a_cut_of_a_module_that_is_not_there(mesh):
    r"""SpecError
    Sequential.cutting: no module is called 'layers\\.\\d+$'
      Instead: a regular expression for names as in named_modules(): r'layers\.\d+$'
    """
    f, _ = vfn.module_function(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    f.cutting(r"layers\.\d+$")


@misuse
def a_cut_of_modules_by_no_pattern(mesh):
    r"""SpecError
    Sequential.cutting: pattern must be a regular expression, but it is the list ['0']
      Instead: a regular expression for names as in named_modules(): r'layers\.\d+$'
    """
    f, _ = vfn.module_function(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    f.cutting(["0"])


@misuse
def a_cut_in_a_module_that_is_computed_again(mesh):
    """TransformError
    cut: a pipeline cannot cut what is computed again for the backward pass
      Instead: vfn.cut(vfn.remat(f)(x)): the cut around the remat
    """
    f, params = vfn.module_function(torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(3, 3))))
    f = f.cutting(r"^0\.0$").remat({"0": None})
    vfn.grad(two(lambda params, x: f(params, x).sum()))(vfn.shard(params, mesh, P()), X)


@misuse
def a_cut_in_a_body(mesh):
    """TransformError
    cut: a pipeline cuts the whole program, not what each rank does in a shard_map body
      Instead: vfn.cut around the shard_map, of its result
    """

    def body(params, x):
        return vfn.cut(x @ params[0]).sum()  # here

    vfn.grad(two(vfn.shard_map(body, mesh=mesh["tp"], in_specs=P(), out_specs=P())))(three(mesh), X)


@misuse
def a_pipeline_in_a_body(mesh):
    """TransformError
    pipeline: a pipelined function runs on all ranks, and cannot be called in a shard_map body
      Instead: the shard_map in the function; or vfn.optim.microbatches(f, m), which any transform takes
    """
    mapped(mesh, lambda x: vfn.pipeline(layers, "dp", microbatches=2)([x], x), P(), P())(torch.eye(2))


@misuse
def a_pipeline_in_a_pipeline(mesh):
    """TransformError
    pipeline: a pipelined function runs by a schedule of its own, and is no part of another one's stages
      Instead: one pipeline, along one axis; or vfn.optim.microbatches(f, m), which any transform takes
    """
    vfn.grad(two(vfn.pipeline(layers, "tp", microbatches=2)))(three(mesh), X)


@misuse
def a_pipeline_under_vmap(mesh):
    """TransformError
    pipeline: a pipelined function has a value and a gradient, and no other derivative; nor can it be mapped
      Instead: vfn.optim.microbatches(f, m), which any transform takes
    """
    vfn.vmap(two(), in_axes=(None, 0))(three(mesh), torch.stack([X, X]))


@misuse
def a_gradient_of_a_pipelines_gradient(mesh):
    """TransformError
    pipeline: a pipelined function has a gradient, and that has none
      Instead: vfn.optim.microbatches(f, m), which any transform takes
    """
    vfn.grad(lambda params: vfn.grad(two())(params, X)[0].sum())(three(mesh))


@misuse
def a_gradient_of_a_pipelines_batch(mesh):
    """TransformError
    pipeline: gradients are taken by its first argument alone, the parameters
      Instead: vfn.optim.microbatches(f, m), which any transform takes
    """
    vfn.grad(two(), argnums=1)(three(mesh), X)


@misuse
def a_pipeline_that_prints(mesh):
    """TransformError
    pipeline: debug_print does something besides giving a value
      * at misuses.py: `vfn.debug_print("{}", x)`
      Instead: vfn.optim.microbatches(f, m); or the function without it
    """

    def f(params, x):
        vfn.debug_print("{}", x)
        return layers(params, x)

    vfn.grad(two(f))(three(mesh), X)


@misuse
def a_pipeline_that_reads_a_value(mesh):
    """TransformError
    pipeline: f cannot be recorded
      * a value is read in Python, at misuses.py: `return layers(params, x) if x.sum() > 0 else x.sum()`
      Instead: vfn.cond or torch.where for `if`, vfn.while_loop for `while`, tensors for numbers
    """

    def f(params, x):
        return layers(params, x) if x.sum() > 0 else x.sum()

    vfn.grad(two(f))(three(mesh), X)


@misuse
def a_pipeline_of_eager_experts(mesh):
    """TransformError
    pipeline: f cannot be recorded
      * torch's nonzero gives a result whose shape, or whether it can run, depends on values, at misuses.py: `expert_hit = (x > 0).nonzero()`
      Instead: experts_implementation="batched_mm" in the config of the model, whose "eager" experts are a loop over values
    """

    def f(params, x):
        expert_hit = (x > 0).nonzero()
        return layers(params, x) + expert_hit.sum()

    vfn.grad(two(f))(three(mesh), X)


@misuse
def a_cut_in_a_branch(mesh):
    """TransformError
    cut: a pipeline cuts the whole program, not a branch of a choice or the body of a while_loop
      Instead: vfn.cut around it, of its result
    """

    def f(params, x):
        half = lambda x: vfn.cut(x / 2)  # here
        return layers(params, vfn.cond(x.sum() > 0, half, torch.sin, x))

    two(f)(three(mesh), X)


@misuse
def a_pipeline_that_writes_through_a_view(mesh):
    """TransformError
    pipeline: a value is written in place through a view of it, or where another value has its memory
      * at misuses.py: `x[0] = 1.0`
      Instead: vfn.optim.microbatches(f, m); or the function with a new value: torch.where, torch.cat, index_put
    """

    def f(params, x):
        x = x @ params[0]
        x[0] = 1.0
        return layers(params, x)

    vfn.grad(two(f))(three(mesh), X)


@misuse
def a_sparse_tensor_across_a_cut(mesh):
    """TransformError
    pipeline: a sparse tensor goes from stage 0 to stage 1
      * at misuses.py: `x = vfn.cut((x @ params[0]).to_sparse())`
      Instead: x.to_dense() before the cut
    """

    def f(params, x):
        x = vfn.cut((x @ params[0]).to_sparse())
        return (x.to_dense() @ params[1]).sum()

    vfn.grad(two(f))(three(mesh), X)


@misuse
def a_pipeline_that_is_computed_again(mesh):
    """TransformError
    pipeline: vfn.remat does not go around a pipelined function
      Instead: vfn.remat around the layers in it
    """
    piped = two()
    vfn.grad(vfn.remat(lambda params: piped(params, X)))(three(mesh))


@misuse
def a_pipeline_with_chunks_of_one_stage(mesh):
    """TransformError
    pipeline: chunks=2 does not go with schedule='1f1b'
      Instead: schedule="interleaved", chunks=2, for two stages a rank; other schedules say it themselves
    """
    vfn.pipeline(layers, "dp", microbatches=2, chunks=2)
