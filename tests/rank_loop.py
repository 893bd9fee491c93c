"""A plain loop over ranks: what a `shard_map` body means, in torch alone, without this library.

A value is a list, one plain tensor a rank. A line of a body that communicates is a formula over such a list; any other
line runs once a rank, in that rank's own namespace. Arguments are cut by index, results are put together by index. All of
it is ordinary differentiable torch, so its derivatives are those of plain autograd.
"""

import itertools
import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F


class Ranks:
    """The ranks of a mesh in order, as their coordinates."""

    def __init__(self, shape, names):
        self.sizes = dict(zip(names, shape))
        self.coordinates = [dict(zip(names, place)) for place in itertools.product(*map(range, shape))]

    def __len__(self):
        return len(self.coordinates)

    def group(self, rank, axes):
        """The ranks that differ from `rank` along `axes` alone, the first axis major."""
        places = itertools.product(*(range(self.sizes[axis]) for axis in axes))
        return [self.coordinates.index(self.coordinates[rank] | dict(zip(axes, place))) for place in places]

    def position(self, rank, axes):
        """The place of `rank` in its group."""
        return self.group(rank, axes).index(rank)


def entries(spec, ndim):
    """For each dim the tuple of axes that split it."""
    row = [entry if isinstance(entry, tuple) else () if entry is None else (entry,) for entry in spec]
    return row + [()] * (ndim - len(row))


def cut(x, spec, ranks):
    """Each rank's block of a whole tensor."""
    blocks = []
    for rank in range(len(ranks)):
        block = x
        for dim, axes in enumerate(entries(spec, x.ndim)):
            size = x.shape[dim] // math.prod(ranks.sizes[axis] for axis in axes)
            block = block.narrow(dim, ranks.position(rank, axes) * size, size)
        blocks.append(block)
    return blocks


def paste(blocks, spec, ranks):
    """The whole tensor of these blocks: over an axis that the spec does not mention, that of the first rank; over an
    unreduced one, the sum."""
    rows = entries(spec, blocks[0].ndim)
    if spec.unreduced:
        blocks = psum(ranks, blocks, sorted(spec.unreduced))
    sizes = blocks[0].shape
    whole = torch.zeros(
        [size * math.prod(ranks.sizes[a] for a in axes) for size, axes in zip(sizes, rows)], dtype=blocks[0].dtype
    )
    mentioned = set(itertools.chain(*rows))
    for rank, block in enumerate(blocks):
        if all(place == 0 for axis, place in ranks.coordinates[rank].items() if axis not in mentioned):
            starts = [ranks.position(rank, axes) * size for size, axes in zip(sizes, rows)]
            whole[tuple(slice(start, start + size) for start, size in zip(starts, sizes))] = block
    return whole


def differs(blocks, axes, ranks):
    """Whether a value differs between ranks along these axes."""
    return any(
        not torch.allclose(blocks[rank].double(), blocks[other].double(), rtol=1e-9, atol=1e-9)
        for rank in range(len(ranks))
        for other in ranks.group(rank, axes)
    )


# --- the collectives, each a formula over the list of the ranks' values -----------------------------------------------


def psum(ranks, xs, axes):
    xs = [x.int() if x.dtype is torch.bool else x for x in xs]
    return [sum(xs[other] for other in ranks.group(rank, axes)) for rank in range(len(ranks))]


def pmean(ranks, xs, axes):
    return [total / math.prod(ranks.sizes[axis] for axis in axes) for total in psum(ranks, xs, axes)]


def pmax(ranks, xs, axes):
    return [
        torch.stack([xs[other].detach() for other in ranks.group(rank, axes)]).amax(0) for rank in range(len(ranks))
    ]


def pmin(ranks, xs, axes):
    return [
        torch.stack([xs[other].detach() for other in ranks.group(rank, axes)]).amin(0) for rank in range(len(ranks))
    ]


def all_gather(ranks, xs, axes, *, axis=0, tiled=False, to="varying"):
    join = torch.cat if tiled else torch.stack
    return [join([xs[other] for other in ranks.group(rank, axes)], axis) for rank in range(len(ranks))]


def _piece(x, dim, at, n, tiled):
    size = x.shape[dim] // n
    return x.narrow(dim, at * size, size) if tiled else x.select(dim, at)


def psum_scatter(ranks, xs, axes, *, scatter_dimension=0, tiled=False):
    return [
        _piece(total, scatter_dimension, ranks.position(rank, axes), len(ranks.group(rank, axes)), tiled)
        for rank, total in enumerate(psum(ranks, xs, axes))
    ]


def all_to_all(ranks, xs, axes, *, split_axis, concat_axis, tiled=False):
    join = torch.cat if tiled else torch.stack
    out = []
    for rank in range(len(ranks)):
        group, mine = ranks.group(rank, axes), ranks.position(rank, axes)
        out.append(join([_piece(xs[other], split_axis, mine, len(group), tiled) for other in group], concat_axis))
    return out


def ppermute(ranks, xs, axes, *, perm):
    sources = {destination: source for source, destination in perm}
    out = []
    for rank in range(len(ranks)):
        source = sources.get(ranks.position(rank, axes))
        out.append(torch.zeros_like(xs[rank]) if source is None else xs[ranks.group(rank, axes)[source]])
    return out


def pbroadcast(ranks, xs, axes, *, source):
    return [xs[ranks.group(rank, axes)[source]] for rank in range(len(ranks))]


def pcast(ranks, xs, axes, *, to):
    return xs


COLLECTIVES = {
    f.__name__: f for f in (psum, pmean, pmax, pmin, all_gather, psum_scatter, all_to_all, ppermute, pbroadcast, pcast)
}


def axis_index(ranks, axes):
    return [torch.tensor(ranks.position(rank, axes), dtype=torch.int32) for rank in range(len(ranks))]


# --- bodies -----------------------------------------------------------------------------------------------------------


@dataclass
class Line:
    """One line of a body: what it assigns, and its text; for one that communicates also the collective, which of the
    values it sends, and its parameters. A "sequence" and a "gradient" stand for lines of their own."""

    targets: list
    text: str
    collective: str | None = None
    operands: list = field(default_factory=list)
    axes: tuple = ()
    parameters: dict = field(default_factory=dict)


class Scaled(torch.autograd.Function):
    """A kernel of somebody's, that no registration tells anything about."""

    @staticmethod
    def forward(x, y):
        return x * y.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        return g * y.sin(), g * x * y.cos()

    @staticmethod
    def jvp(ctx, dx, dy):
        x, y = ctx.saved_tensors
        return dx * y.sin() + x * y.cos() * dy

    generate_vmap_rule = True


def dynamic_slice(x, starts, sizes):
    for dim, (start, size) in enumerate(zip(starts, sizes)):
        start = int(start) + (x.shape[dim] if int(start) < 0 else 0)
        x = x.narrow(dim, min(max(start, 0), x.shape[dim] - size), size)
    return x


class OneRank:
    """What `vfn` is in a line that runs on one rank alone."""

    grad = staticmethod(torch.func.grad)
    vmap = staticmethod(torch.func.vmap)
    remat = staticmethod(lambda f: f)
    dynamic_slice = staticmethod(dynamic_slice)


def step(line, ranks, values):
    """Run one line on all ranks; `values` maps names to lists, one tensor a rank."""
    if line.collective is None:
        out = [
            eval(
                line.text,
                {"torch": torch, "F": F, "vfn": OneRank, "Scaled": Scaled}
                | {name: blocks[rank] for name, blocks in values.items()},
            )
            for rank in range(len(ranks))
        ]
        values[line.targets[0]] = out
    elif line.collective == "axis_index":
        values[line.targets[0]] = axis_index(ranks, line.axes)
    elif line.collective == "sequence":
        values[line.targets[0]] = _last(line.parameters["lines"], ranks, values)
    elif (
        line.collective == "gradient"
    ):  # of the sum over all ranks of a loss, where ranks along `axes` share what moves
        lines, moving = line.parameters["lines"], values[line.operands[0]]
        gradient = torch.func.grad(lambda t: sum(_last(lines, ranks, values | {"t": t})))(list(moving))
        values[line.targets[0]] = psum(ranks, gradient, line.axes)
    else:
        for target, operand in zip(line.targets, line.operands, strict=True):
            values[target] = COLLECTIVES[line.collective](ranks, values[operand], line.axes, **line.parameters)


def _last(lines, ranks, values):
    """What the last of these lines gives."""
    values = dict(values)
    for line in lines:
        step(line, ranks, values)
    return values[lines[-1].targets[0]]
