"""A program of a user's that is only read: pyright is to know its types, and to find each line that is marked as wrong."""

from typing import reveal_type

import torch

import vescale_fn as vfn
from vescale_fn import P

Params = dict[str, torch.Tensor]
mesh = vfn.make_mesh((2, 4), ("dp", "tp"))
params: Params = {"w": torch.zeros(4, 4)}
x = torch.zeros(8, 4)


def loss(params: Params, x: torch.Tensor) -> torch.Tensor:
    return (x @ params["w"]).square().mean()


@vfn.jit
def step(params: Params, x: torch.Tensor) -> Params:
    return vfn.grad(loss)(params, x)


@vfn.jit(static_argnums=1)
def scaled(x: torch.Tensor, n: int) -> torch.Tensor:
    return x * n


@vfn.jit(static_argnames="n", in_shardings=P("dp"), out_shardings=P())
def times(x: torch.Tensor, n: int) -> torch.Tensor:
    return x * n


@vfn.shard_map(mesh=mesh, in_specs=P("dp"), out_specs=P())
def summed(x: torch.Tensor) -> torch.Tensor:
    return vfn.psum(x, "dp")


reveal_type(mesh)  # Mesh
reveal_type(mesh.shape["dp"])  # int
reveal_type(mesh.shape[:1])  # tuple[int, ...]
reveal_type(mesh.axis_names)  # tuple[str, ...]
reveal_type(vfn.shard(x, mesh, P("dp")).sharding)  # Sharding
reveal_type(vfn.typeof(x))  # ValueType
reveal_type(vfn.shard(x, mesh, P("dp")))  # Array
reveal_type(vfn.shard(params, mesh, P("dp")))  # dict[str, Tensor]
reveal_type(vfn.unshard(vfn.shard(x, mesh, P("dp"))))  # Tensor
reveal_type(vfn.grad(loss)(params, x))  # dict[str, Tensor]
reveal_type(vfn.value_and_grad(loss)(params, x))  # tuple[Tensor, dict[str, Tensor]]
reveal_type(vfn.jit(loss)(params, x))  # Tensor
reveal_type(vfn.jit(vfn.grad(loss))(params, x))  # dict[str, Tensor]
reveal_type(vfn.jit(loss, donate_argnums=0).lower(params, x).text())  # str
reveal_type(vfn.vmap(loss)(params, x))  # Tensor
reveal_type(vfn.remat(loss)(params, x))  # Tensor
reveal_type(vfn.shard_map(loss, mesh, P(), P())(params, x))  # Tensor
reveal_type(vfn.psum(params, "dp"))  # dict[str, Tensor]
reveal_type(vfn.launch(loss, 2, params, x))  # list[Tensor]
reveal_type(vfn.init(lambda key: {"w": vfn.random.normal(key, (2,))}, vfn.random.key(0)))  # dict[str, Tensor]
reveal_type(step(params, x))  # dict[str, Tensor]
reveal_type(scaled(x, 2))  # Tensor
reveal_type(times(x, n=2))  # Tensor
reveal_type(summed(x))  # Tensor

vfn.make_mesh((2, 4), 3)  # wrong
vfn.make_mesh(axis_shapes=(2, 4))  # wrong
vfn.shard(params, P("dp"), mesh)  # wrong
step(params)  # wrong
step(x, params)  # wrong
vfn.grad(loss)(params, "x")  # wrong
vfn.value_and_grad(loss)(params, x)[1].nothing  # noqa: B018  # wrong
vfn.shrad  # noqa: B018  # wrong
vfn.jit(loss, static_args=1)  # wrong
vfn.jit(loss, static_argnames=1)  # wrong
times(x, m=2)  # wrong
vfn.remat(loss)(params, x, x)  # wrong
vfn.shard_map(loss, mesh, P())  # wrong
summed(x, x)  # wrong
vfn.launch(loss, "2")  # wrong
vfn.shard(x, mesh, P("dp")).shards  # noqa: B018  # wrong
mesh.device_ids  # noqa: B018  # wrong
vfn.random.key(0).split()  # wrong
vfn.optim.adamw(1e-3).step()  # wrong
