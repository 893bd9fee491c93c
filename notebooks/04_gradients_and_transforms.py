# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Gradients and transforms
#
# A transform takes a function and gives another: its gradient, its derivative along a direction, its batched form. Here they
# act on functions of whole values, of trees, and of sharded arrays alike, and one inside another. All of `torch.func` works
# on arrays; `vfn.grad`, `vjp`, `jvp` and `vmap` take any tree and give gradients back in the layout of what they belong to.

# %%
import warnings

import matplotlib.pyplot as plt
import torch
from IPython.display import display

import vescale_fn as vfn
from vescale_fn import P

torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
vfn.simulate(4)
mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
vfn.set_mesh(mesh)

# %% [markdown]
# ## Gradients have the form of what they belong to
#
# Structure, dtype, layout; at integers they hold zeros. `has_aux` carries anything beside the loss.

# %%
keys = vfn.random.split(vfn.random.key(0), 4)


def normal(key, *shape):
    return vfn.random.normal(key, shape, torch.float64)


params = {
    "layers": [normal(keys[0], 6, 8) / 3, normal(keys[1], 8, 1) / 3],
    "scale": torch.tensor(1.0),
    "steps": torch.tensor([3, 4]),
}
x, y = normal(keys[2], 8, 6), normal(keys[3], 8)


def predict(params, x):
    up, down = params["layers"]
    return params["scale"] * (torch.tanh(x @ up) @ down)[..., 0]


def loss(params, x, y):
    return (predict(params, x) - y).square().mean()


specs = {"layers": [P(None, "tp"), P("tp")], "scale": P(), "steps": P()}
on_mesh = vfn.shard(params, mesh, specs)
x_mesh, y_mesh = vfn.shard((x, y), mesh, P("dp"))

one = vfn.grad(loss)(params, x, y)
gradient = vfn.grad(loss)(on_mesh, x_mesh, y_mesh)
torch.testing.assert_close(vfn.unshard(gradient), one)
vfn.show(gradient)

# %% [markdown]
# ## Every transform, on one device and on the mesh
#
# The same line twice, once on plain tensors and once on arrays that are split over both axes. The results agree to 1e-12:
# sums are taken in another order, so the last bits may differ, and nothing else does. torch's own transforms leave a sum over
# ranks to whoever needs it (`unreduced`); `vfn.grad` and `vfn.vjp` finish it, so that a gradient lies as its parameter.

# %%
w, v = params["layers"][0][:, 0], torch.linspace(-1, 1, 6)
module = torch.nn.Linear(6, 1, bias=False)
warnings.filterwarnings("ignore", "Attempted to insert a get_attr")  # torch's own, of each torch.func.linearize


def f(w, x):
    return torch.tanh(x @ w).square().sum()


def by_module(w, x):
    return torch.func.functional_call(module, {"weight": w[None]}, x).sum()


transforms = {
    "vfn.grad": lambda w, x: vfn.grad(f)(w, x),
    "vfn.vjp": lambda w, x: vfn.vjp(lambda w: torch.tanh(x @ w), w)[1](torch.linspace(0, 1, 8))[0],
    "vfn.jvp": lambda w, x: vfn.jvp(lambda w: f(w, x), (w,), (v,))[1],
    "vfn.linearize": lambda w, x: vfn.linearize(lambda w: f(w, x), w)[1](v),
    "vfn.vmap": lambda w, x: vfn.vmap(lambda row: f(w, row[None]))(x),
    "torch.func.grad": lambda w, x: torch.func.grad(f)(w, x),
    "torch.func.vjp": lambda w, x: torch.func.vjp(lambda w: f(w, x), w)[1](torch.tensor(2.0))[0],
    "torch.func.jvp": lambda w, x: torch.func.jvp(lambda w: f(w, x), (w,), (v,))[1],
    "torch.func.linearize": lambda w, x: torch.func.linearize(lambda w: f(w, x), w)[1](v),
    "torch.func.jacrev": lambda w, x: torch.func.jacrev(lambda w: torch.tanh(x @ w))(w),
    "torch.func.jacfwd": lambda w, x: torch.func.jacfwd(lambda w: torch.tanh(x @ w))(w),
    "torch.func.hessian": lambda w, x: torch.func.hessian(f)(w, x),
    "gradient of a gradient": lambda w, x: vfn.grad(lambda w: vfn.grad(f)(w, x).square().sum())(w),
    "forward over reverse": lambda w, x: vfn.jvp(lambda w: vfn.grad(f)(w, x), (w,), (v,))[1],
    "a gradient for each row": lambda w, x: torch.func.vmap(torch.func.grad(f), (None, 0))(w, x),
    "functional_call": lambda w, x: vfn.grad(by_module)(w, x),
    "remat": lambda w, x: vfn.grad(vfn.remat(f))(w, x),
}
w_mesh, rows = vfn.shard(w, mesh, P("tp")), vfn.shard(x, mesh, P("dp", "tp"))
for name, transform in transforms.items():
    want, got = transform(w, x), transform(w_mesh, rows)
    torch.testing.assert_close(vfn.unshard(got), want, rtol=0, atol=1e-12)
    print(f"{name:24} {list(got.shape)!s:8} lies as {vfn.spec_of(got)}")

# %% [markdown]
# ## In the local view, too
#
# A transform may stand outside of a `shard_map`, or inside its body, and collectives are differentiated with the rest: the
# derivative of a sum over the ranks is the sum of the derivatives, and its transpose is a broadcast. Here a Hessian is taken
# inside the body, of each rank's part of the loss, and the parts are added; and outside, of the whole.


# %%
def parts(w, x):
    w = vfn.pvary(w, "dp")  # each rank's own from here on, so that nothing is added yet
    return vfn.psum(torch.func.hessian(f)(w, x), "dp")


def whole(w, x):
    return vfn.psum(f(w, x), "dp")


inside = vfn.shard_map(parts, in_specs=(P(), P("dp")), out_specs=P())
outside = vfn.shard_map(whole, in_specs=(P(), P("dp")), out_specs=P())
want = torch.func.hessian(f)(w, x)
torch.testing.assert_close(vfn.unshard(inside(w, x)), want)
torch.testing.assert_close(vfn.unshard(torch.func.hessian(outside)(w, x_mesh)), want)
print(want.shape)

# %% [markdown]
# ## Newton's method
#
# With second derivatives that are right, logistic regression on sharded data takes a few steps. The function is the one for
# one device; only the data is laid out.

# %%
data = normal(vfn.random.key(5), 64, 6)
labels = vfn.random.bernoulli(vfn.random.key(6), torch.sigmoid(data @ v)).double()


def logistic(w, data, labels):
    return torch.nn.functional.softplus(-(2 * labels - 1) * (data @ w)).mean() + 1e-3 * w.square().sum()


def newton(w, data, labels, steps=6):
    losses = []
    for _ in range(steps):
        value, slope = vfn.value_and_grad(logistic)(w, data, labels)
        curvature = torch.func.hessian(logistic)(w, data, labels)
        w = w - torch.linalg.solve(curvature, slope)
        losses.append(vfn.unshard(value).item())
    return losses


def descent(w, data, labels, steps=6):
    losses = []
    for _ in range(steps):
        value, slope = vfn.value_and_grad(logistic)(w, data, labels)
        w = w - slope
        losses.append(vfn.unshard(value).item())
    return losses


start = torch.zeros(6)
sharded = vfn.shard((data, labels), mesh, P(("dp", "tp")))
curves = {"Newton": newton(start, data, labels), "gradient descent": descent(start, data, labels)}
on_the_mesh = newton(start, *sharded)
torch.testing.assert_close(on_the_mesh, curves["Newton"])

figure, axes = plt.subplots(figsize=(6, 3))
for name, losses in curves.items():
    axes.plot(losses, label=f"{name}, one device")
axes.plot(on_the_mesh, "o", label="Newton, 4 ranks")
axes.set_xlabel("step")
axes.set_ylabel("loss")
axes.legend()
plt.show()

# %% [markdown]
# ## What is kept, and what is computed again
#
# `remat` keeps the arguments of a function and computes the rest again in the backward pass, collectives included. With
# weights that are gathered inside, that is FSDP: a whole weight exists only while it is used, and is gathered twice.


# %%
def layer(w, x):
    return torch.tanh(x @ vfn.with_sharding(w, P()))


weights = vfn.shard([normal(k, 6, 6) for k in keys], mesh, P(("dp", "tp")))
batch = vfn.shard(x, mesh, P(("dp", "tp")))


def deep(weights, x, layer=layer):
    for w in weights:
        x = layer(w, x)
    return x.square().mean()


for name, kind in {"kept": layer, "computed again": vfn.remat(layer)}.items():
    with vfn.comm_log() as log:
        got = vfn.grad(deep)(weights, batch, layer=kind)
    print(f"{name:16}", log.count("all_gather"), "gathers,", log.count("reduce_scatter"), "reduce-scatters")
    torch.testing.assert_close(vfn.unshard(got), vfn.grad(deep)(vfn.unshard(weights), x))

# %% [markdown]
# ## Code that knows nothing of ranks
#
# An `autograd.Function` from elsewhere runs in a body as it is. Nobody can see what it does, so its result is taken to vary,
# and what it is given is promoted: the gradient of `w` is added over the ranks all the same.


# %%
class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w, x):
        ctx.save_for_backward(w, x)
        return w**3 * x

    @staticmethod
    def backward(ctx, ct):
        w, x = ctx.saved_tensors
        return (3 * w**2 * x * ct).sum(), w**3 * ct


def theirs(w, x):
    y = Cubed.apply(w, x)
    display(vfn.show({"w": w, "x": x, "y": y}))
    return vfn.psum(y.sum(), ("dp", "tp"))


data = torch.arange(8.0)
on_ranks = vfn.shard_map(theirs, in_specs=(P(), P(("dp", "tp"))), out_specs=P())
print(vfn.grad(on_ranks)(torch.tensor(2.0), data), 3 * 2.0**2 * data.sum())

# %% [markdown]
# ## Is it the same program?
#
# `check_parity` runs a function on one device and on the mesh and compares every result and gradient. Here is a layer with its
# weight split by rows, so that the product must be added up over `tp`: right, and then with the bias on the wrong side of
# the sum.


# %%
def right(x, w, b):
    return vfn.psum(x @ w, "tp") + b


def wrong(x, w, b):
    return vfn.psum(x @ w + b, "tp")


arguments = x, params["layers"][0], torch.linspace(0, 1, 8)
layout = {"in_specs": (P(None, "tp"), P("tp"), P()), "out_specs": P()}
print(vfn.check_parity(vfn.shard_map(right, **layout), *arguments))

# %%
try:
    vfn.check_parity(vfn.shard_map(wrong, **layout), *arguments)
except vfn.errors.ParityError as error:
    print(error)

# %% [markdown]
# ## The same on real processes
#
# Every transform once more, by four processes that exchange their blocks over gloo, against one device.


# %%
def on_processes():
    warnings.filterwarnings("ignore", "Attempted to insert a get_attr")
    torch.set_default_dtype(torch.float64)
    mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
    w_mesh, rows = vfn.shard(w, mesh, P("tp")), vfn.shard(x, mesh, P("dp", "tp"))
    return {name: vfn.unshard(transform(w_mesh, rows)) for name, transform in transforms.items()}


for rank, got in enumerate(vfn.launch(on_processes, 4)):
    for name, transform in transforms.items():
        torch.testing.assert_close(got[name], transform(w, x), rtol=0, atol=1e-12)
    print(f"rank {rank}: {len(got)} transforms, the same as on one device")
assert len(transforms) == 17
