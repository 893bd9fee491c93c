"""`auto`: the fastest layout of a step's arguments and calls, found by a search and checked by the prices of plans."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .._core import torch_internals
from .._core.base import context
from .._core.base.errors import SpecError, TransformError
from .._core.base.front_door import public
from .._core.base.messages import mesh_text, report
from .._core.base.user_calls import checked_function
from .._core.distributed.abstract_mesh import AbstractMesh
from .._core.sharding.index_map import axes_of
from .._core.sharding.spec import P
from ..hardware import Hardware
from ..plan.jit import Jitted
from .agreed import agreed, met_on
from .as_written import again_ranked, as_written
from .auto_arguments import budgeted, donated, given_specs, on_meshes
from .by_name import placed
from .choice import ChosenLayout
from .given import given, in_place, own_meshes, with_own_mesh
from .held_to import with_repeats
from .in_parts import best_in_parts
from .piped import PipedStep, PipelineNotes, parted
from .recording import Recording, record
from .search.highs import highs
from .search.search import search
from .search.shapes import searched
from .verified import Verified, verified


@torch_internals.not_compiled
@public("auto")
def auto(
    step: Callable[..., Any],
    *args: Any,
    mesh: Any = None,
    memory: int | str | None = None,
    hardware: Hardware | str | None = None,
    fixed: Any = None,
    others: Mapping[str, Any] | None = None,
    donate_argnums: int | Sequence[int] = (),
    candidates: int = 6,
    microbatches: int | Sequence[int] | None = None,
    seconds: float = 60.0,
    **kwargs: Any,
) -> ChosenLayout:
    """The layout in which a step is predicted to be fastest: the specs of its arguments, and how its calls are partitioned.

    The step is traced once, as for one device and without values. For every call, the table of sharding rules says how it may
    be partitioned; an integer program (HiGHS) picks one way for each, so that the calls and the collectives between them take
    the least time within the memory. The best few layouts are then traced on an abstract mesh, optimised by all passes, and
    priced as by `price`: the fastest one that fits is the answer. Nothing is allocated, and no other process is needed.

    Args:
        step: the function.
        args: its arguments: arrays, tensors, or their shapes (`eval_shape`), and whatever else it takes. The layouts of arrays
            are ignored.
        kwargs: arguments by name, ``batch=batch``. In `fixed`, `others`, `donate_argnums` and ``choice.specs`` each has its
            position in the step's signature, or comes after all others where the step takes it by name alone.
        mesh: the sizes of the axes, ``{"dp": 8, "tp": 8}``, or a mesh of any kind; or several of them to choose from, such as
            ``mesh_shapes(64, nodes=8)``. By default, the mesh of the arguments, or the current one. If that is a mesh of
            processes, all of them must call `auto`, and all get the same answer, or an error. On a mesh with the axis of a
            `pipeline` in the step, the step runs in stages: its parameters are placed at the ranks that use them, and its calls
            are laid out by the sharding rules.
        memory: the limit for a rank: bytes, ``"70 GiB"``, or ``"90 %"`` of a device's memory. By default, all of it.
        hardware: as for `price`.
        fixed: specs that must be kept: a `P` for all arguments; or a tuple with a `P`, a prefix tree, or rules (which need not
            match all leaves) for each argument, None for one that is free. Meshes on which they do not fit are left out.
        others: layouts by name that are priced, too, so that the answer is never worse than these. Each is `specs` as for
            `price`, for the step itself, with its calls laid out by the sharding rules; or ``(step, specs)``, a step with the
            same arguments and results that states its layout itself; or ``(step, specs, mesh)``, on a mesh of its own.
        donate_argnums: arguments, by position, whose memory a call may use up; ``choice.jit()`` passes it to `jit`.
        candidates: how many of the layouts that the search finds are priced. With 0 it chooses among the `others` alone.
        microbatches: numbers of microbatches to choose from, ``(1, 2, 4)``: the step takes the number as ``microbatches=``, to
            pass it to `vfn.optim.microbatches`, say. Each is traced, searched and priced by itself.
        seconds: the most that a search may take, for all meshes and candidates together; what was found by then counts.

    Returns:
        A `ChosenLayout`; printing it shows a table. ``choice.specs`` are the specs of the arguments, ``choice.rules()`` the
        same as a few rules to paste, ``choice.jit()`` is the step in this layout as a plan.

    Raises:
        VfnError: no layout fits in the memory; HiGHS is not installed (``pip install 'vescale_fn[auto]'``).
        SpecError: specs that do not fit. MeshError: no mesh. HardwareError: a mesh of more ranks than the hardware has.
        TransformError: the step cannot be traced, or no layout of it can be carried out.

    >>> import torch, vescale_fn as vfn
    >>> def step(params, x):
    ...     grads = vfn.grad(lambda p: ((x @ p["up"]).relu() @ p["down"]).float().square().mean())(params)
    ...     return vfn.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    >>> S = lambda *sizes: vfn.ShapeDtype(sizes, torch.bfloat16)
    >>> params = {"up": S(8192, 32768), "down": S(32768, 8192)}
    >>> choice = vfn.auto(step, params, S(2048, 8192), mesh={"tp": 8}, hardware="h100", candidates=2)
    >>> choice.rules()
    [('down$', P('tp')), ('up$', P(None, 'tp'))]
    """
    how = dict(mesh=mesh, memory=memory, hardware=hardware, fixed=fixed, donate_argnums=donate_argnums)

    def choose() -> ChosenLayout:
        checked_function(step, "auto")
        if isinstance(getattr(step, "func", step), Jitted):
            raise TransformError(
                report("auto", "the step is jitted already", fix="the function itself, and choice.jit()")
            )
        at = placed(step, args, kwargs, "auto", _OPTIONS)
        rows = {name: in_place(entry, at) for name, entry in (others or {}).items()}
        more = dict(others=rows, candidates=candidates, seconds=seconds)
        return best_in_parts(at.step, microbatches, functools.partial(_chosen, args=at.args, **how, **more))

    return agreed(met_on(mesh, (args, kwargs)), getattr(step, "__name__", type(step).__name__), choose)


_OPTIONS = tuple(name for name, p in inspect.signature(auto).parameters.items() if p.kind is p.KEYWORD_ONLY)


def _chosen(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    mesh: Any,
    memory: int | str | None,
    hardware: Hardware | str | None,
    fixed: Any,
    others: Mapping[str, Any],
    donate_argnums: int | Sequence[int],
    candidates: int,
    seconds: float,
) -> ChosenLayout:
    """The layout that this process chooses."""
    if candidates:
        highs()
    donate = donated(donate_argnums, len(args))
    if not (candidates or others):
        raise SpecError(report("auto", "candidates=0 and no others= leave nothing to choose from"))
    if mesh is None and not candidates:
        mesh = own_meshes(others) or None
    meshes, found = on_meshes(mesh, args, hardware)
    budget = budgeted(memory, found)
    with context.setting(pipelines=(notes := PipelineNotes())):
        recorded = record(step, *args)
    meshes, piped = parted(step, args, notes, meshes)
    free = [(on, given_specs(recorded, fixed, on)) for on in meshes]
    usable = {on: specs for on, (specs, wrong) in free if not wrong}
    if free and not usable:
        _fixed(recorded, fixed, free[0][0])
    stays = next(iter(usable.values()), {})
    how: Any = dict(fixed=stays, candidates=candidates, seconds=seconds, left_out=(left_out := list[str]()))
    one = functools.partial(searched, recorded, [axes_of(on) for on in usable], found, **how)
    solve = functools.partial(with_repeats, one)
    others = _with_stages(piped, others, args, fixed, found, budget, seconds if candidates else None)
    rows = given(recorded, args, others, list(usable), lambda on: _fixed(recorded, fixed, on), found, budget, donate)
    ranked = verified(recorded, found, budget, solve, 5 if candidates and usable else 0, donate, rows)

    def again(on: Mapping[str, int], more: Mapping[int, P]) -> Any:
        return search(recorded, on, found, budget, {**stays, **more}, 1, seconds=seconds)[0]

    if piped is None:
        ranked = again_ranked(as_written(recorded, ranked[0], found, budget, donate), ranked[1:])
    looks = _beside_stages(again, piped, recorded, fixed, found, budget, seconds)
    choice = ChosenLayout(recorded, ranked, found, budget, looks, donate)
    choice.left_out = _not_priced(left_out, ranked)
    return choice


def _beside_stages(
    again: Callable[[Mapping[str, int], Mapping[int, P]], Any],
    piped: PipedStep | None,
    recorded: Recording,
    fixed: Any,
    hardware: Hardware,
    memory: float,
    seconds: float,
) -> Callable[[Mapping[str, int], Mapping[int, P]], Any]:
    """A function that repeats the search with more specs fixed, also on meshes on which the step runs in stages."""

    def looks(on: Mapping[str, int], more: Mapping[int, P]) -> Any:
        if piped is None or dict(on) not in [dict(axes_of(one)) for one in piped.meshes]:
            return again(on, more)
        by_leaf = {at: more[n] for n, at in enumerate(recorded.leaves) if at is not None and n in more}
        return piped.again(on, fixed, by_leaf, hardware, memory, seconds)

    return looks


def _not_priced(left_out: Sequence[str], ranked: Sequence[Verified]) -> tuple[str, ...]:
    """The meshes that searches left out, each with its reason, unless another search has found a layout on it."""
    priced, reasons = {mesh_text(one.layouts.mesh) for one in ranked}, {one.partition(": ")[0]: one for one in left_out}
    return tuple(one for mesh, one in reasons.items() if mesh not in priced)


def _with_stages(
    piped: PipedStep | None,
    others: Mapping[str, Any],
    args: tuple[Any, ...],
    fixed: Any,
    hardware: Hardware,
    memory: float,
    seconds: float | None,
) -> Mapping[str, Any]:
    """The given layouts, and those in which the step runs in stages; `seconds`: None where nothing is searched."""
    if piped is None:
        return others
    rows = {} if seconds is None else piped.rows(fixed, hardware, memory, seconds)
    return {**(with_own_mesh(others) if piped.alone else others), **piped.given(others, args), **rows}


def _fixed(recorded: Recording, fixed: Any, mesh: AbstractMesh) -> dict[int, P]:
    """The fixed specs, by placeholder; raises where they do not fit on this mesh."""
    found, wrong = given_specs(recorded, fixed, mesh)
    if wrong:
        what = f"fixed= does not fit on the {mesh_text(axes_of(mesh))}"
        raise SpecError(report("auto", what, wrong, "the axes of the mesh, each at most once, at most one entry a dim"))
    return found
