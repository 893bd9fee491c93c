"""`deferred`: a module that is made without its parameters, and a pure function of a key that makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..._core import torch_internals
from ..._core.base import context, source_lines, tracebacks
from ..._core.base.errors import RandomError
from ..._core.base.messages import report
from ..._core.base.user_calls import called, checked_function
from ..._core.shard_map import interrupts
from ...plan.jit import jit
from ...plan.tracing.recorder import Recorder, Unrecordable
from ...random.keys import Key, checked
from ...random.streams import key as seeded
from .functional import Functional, checked_module
from .keyed_mode import Keyed, truncated_normals
from .template import Template, tensors_in

__tracebackhide__ = tracebacks.between  # of a user's error that only passes through here

_WHERE = "deferred"


Initial = Callable[[Key], Any]  # from a key to parameters


def deferred(construct: Callable[[], nn.Module], *, state: bool | str = False) -> tuple[Functional, Initial]:
    """A module as a pure function, before its parameters exist; and the pure function of a key that makes them.

    The module is constructed on tensors without values, so that a model of any size takes no memory. All that its
    constructor draws (`torch.nn.init`, `torch.randn`, ...) comes from the key, draw by draw, in place of torch's global
    generator; with `init` each rank of a mesh then makes its own shards alone, bit for bit those of the whole.

    Args:
        construct: makes the module: ``lambda: Model(config)``. It is called several times.
        state: as for `module_function`.

    Returns:
        ``(f, initial)``: `f` as `module_function` gives it, and ``initial(key)``, the parameters, or with `state`
        ``(params, state)``. The numbers are those of torch's distributions, from other streams than torch's: those of a
        module that is constructed after `torch.manual_seed` are others.

    Raises:
        TransformError: `construct` returns no module.
        RandomError: a tensor that is no parameter is drawn at random.

    >>> import torch, vescale_fn as vfn
    >>> from vescale_fn import P
    >>> f, initial = vfn.deferred(lambda: torch.nn.Linear(4, 6))
    >>> whole = initial(vfn.random.key(0))
    >>> with vfn.simulate(2):
    ...     mesh = vfn.make_mesh((2,), ("tp",))
    ...     params = vfn.init(initial, vfn.random.key(0), spec=P("tp"), mesh=mesh)
    ...     print(torch.equal(vfn.unshard(params["weight"]), whole["weight"]))
    True
    """
    checked_function(construct, _WHERE)
    recorder = Recorder()
    try:
        with recorder, context.unlogged():
            skeleton = _constructed(construct, seeded(0))
        held = _held(skeleton)
        values = _values(construct, len(held))
    except Unrecordable as why:
        line = "" if why.line == "?" else f", at {source_lines.quoted(why.line)}"
        source_lines.warn(
            report(
                _WHERE,
                "the module is constructed as written, with all its parameters, to begin with",
                [f"{why.reason}{line}"],
                "numbers of Python's in the constructor, not tensors",
            )
        )
        skeleton = _constructed(construct, seeded(0))
        held = values = _held(skeleton)
    f = Functional(Template(skeleton, dict(zip(map(id, held), values))), state)

    def initial(key: Key) -> Any:
        module = _constructed(construct, checked(key, f"the initial values of {f.__name__}", use=None))
        named = dict(module.named_parameters(remove_duplicate=False))
        params = f.params.tree(named[name].detach() for name in f.params.names)
        if f.state is None:
            return params
        buffers = dict(module.named_buffers(remove_duplicate=False))
        return params, f.state.tree(buffers[name].detach() for name in f.state.names)

    return f, initial


def _constructed(construct: Callable[[], nn.Module], key: Key) -> nn.Module:
    with (
        interrupts.undone(),
        truncated_normals(),
        torch_internals.conversions_by_new_parameters(),
        Keyed(_WHERE, key, {}, {}, ""),
    ):
        return checked_module(called(construct, (), {}, _WHERE), _WHERE)


def _held(module: nn.Module) -> list[torch.Tensor]:
    """The tensors that a module holds besides its parameters: buffers, and attributes."""
    found = {id(x): x for m in module.modules() for x in tensors_in(vars(m)) if not isinstance(x, nn.Parameter)}
    return list(found.values())


def _values(construct: Callable[[], nn.Module], count: int) -> list[torch.Tensor]:
    """The values of what a module holds, computed without its parameters: a plan has no call that nothing needs."""
    if not count:
        return []
    make = jit(lambda key: tuple(x.detach() for x in _held(_constructed(construct, key))))
    values, others = make(seeded(0)), make(seeded(1))
    if any(not torch.equal(a, b) for a, b in zip(values, others)):
        raise RandomError(
            report(
                _WHERE,
                "something besides parameters that the constructor draws would be the same for all keys",
                ["a buffer, or a tensor that is an attribute"],
                "a parameter that requires no gradient, for what is drawn",
            )
        )
    return list(values)
