"""`module_function`: a module of torch's as a pure function and the tree of its parameters."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ..._core import torch_internals
from ..._core.arrays.array import is_array, mesh_of
from ..._core.arrays.placement import with_sharding
from ..._core.arrays.shapes import without_values
from ..._core.base import tracebacks, tree
from ..._core.base.containers import adopted
from ..._core.base.earlier_names import earlier_name
from ..._core.base.errors import InPlaceError, RandomError, SpecError, TransformError
from ..._core.base.messages import described, report, short
from ..._core.base.saved_names import saved_as
from ..._core.shard_map import interrupts
from ..._core.sharding.spec import P
from ..._core.transforms.remat_policies import Policy
from ...random.keys import Key
from .cut_by_path import cuts_of, mark
from .keyed_mode import Keyed, memory_of
from .parameter_names import Names
from .remat_by_path import Policies, policies_of, put
from .template import Template

__tracebackhide__ = tracebacks.between  # of a user's error that only passes through here

_WHERE = "module_function"


def module_function(module: nn.Module, *, state: bool | str = False) -> tuple[Any, ...]:
    """A module as a pure function and the tree of its parameters.

    The tree follows the module's attributes; what `ModuleList` and `Sequential` hold is a list, so that
    ``params['layers'][0]['up']['weight']`` is ``layers.0.up.weight`` in a `state_dict` and for `spec_from_rules`. A tensor
    that is a parameter at several places (tied weights) is one leaf, at the first of them, and its gradient is that of all
    its uses.

    Buffers are constants of the function, and follow the parameters to their device. Those that calls change, such as a
    batch norm's running mean in training, are a tree of their own with ``state=True``; without it such a call raises.

    What the module draws, by dropout or in any other way, comes from the `key` of the call: the first draw from
    ``fold_in(key, 0)``, the next from ``fold_in(key, 1)``, and so on, so that on every mesh it drops and draws what it does
    on one device. A parameter that does not require gradients gets zeros for a gradient, and keeps its place in the tree;
    ``f.trainable`` says which do.

    Args:
        module: any module; it is not changed, neither now nor by a call. Made under ``torch.device("meta")`` it takes
            no memory, and the leaves are each a `ShapeDtype`.
        state: True for a function that takes and returns the module's buffers; a regular expression (`re.search`) for those
            whose names match. The others are constants.

    Returns:
        ``(f, params)``, or with `state` ``(f, params, state)``. The leaves share the memory of the module's own parameters
        and buffers: clone them before they are written or donated, if the module is to keep its values.
        ``f(params, *args, key=None, train=None, **kwargs)`` returns what ``module(*args, **kwargs)`` does;
        ``f(params, state, *args, ...)`` returns it with the new state. ``train`` is the mode for all of the module; by
        default each part is in its own, as it was when `module_function` was called. Attributes that a call sets are gone
        after it. ``f.state_dict(params)`` and ``f.from_state_dict(state_dict)`` convert, to all names of a leaf and from any
        of them.

    Raises:
        TransformError: no module, a lazy or scripted one, one that cannot be copied.
        RandomError: from a call, a draw without a key.
        InPlaceError: from a call, a change of a constant or of a parameter.
        SpecError: from a call, a tree of another structure.

    Source: `torch.func.functional_call`; Flax's ``init`` and ``apply``.

    >>> import torch, vescale_fn as vfn
    >>> module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
    >>> f, params = vfn.module_function(module)
    >>> vfn.spec_from_rules(params, [(r"^0\\.", vfn.P("tp")), (r"^2\\.weight", vfn.P(None, "tp")), ("", vfn.P())])
    [{'weight': P('tp'), 'bias': P('tp')}, {}, {'weight': P(None, 'tp'), 'bias': P()}]
    >>> x = torch.ones(2, 3)
    >>> gradient = vfn.grad(lambda params: f(params, x, key=vfn.random.key(0)).sum())(params)
    >>> gradient[2]["weight"].shape
    torch.Size([1, 4])
    >>> torch.equal(f(params, x, train=False), module.eval()(x))
    True
    """
    module = checked_module(module)
    template = Template(module)
    f = Functional(template, state)
    named = dict(module.named_parameters(remove_duplicate=False))
    params = f.params.tree(_leaf(named[name]) for name in f.params.names)
    if f.state is None:
        return f, params
    held = dict(module.named_buffers(remove_duplicate=False))
    return f, params, f.state.tree(_leaf(held[name]) for name in f.state.names)


def _leaf(x: torch.Tensor) -> torch.Tensor:
    return without_values(x) if x.is_meta else x.detach()


def checked_module(module: Any, where: str = _WHERE) -> nn.Module:
    """`module`, if it is one whose parameters can be exchanged."""
    if not isinstance(module, nn.Module):
        of_class = isinstance(module, type) and issubclass(module, nn.Module)
        fix = f"{module.__name__}(...), an object of the class" if of_class else ""
        raise TransformError(report(where, f"module must be a torch.nn.Module, but it is {described(module)}", fix=fix))
    module = torch_internals.as_written(module)
    if isinstance(module, torch.jit.ScriptModule):
        raise TransformError(
            report(where, "a scripted module cannot be run with other parameters", fix="the module that was scripted")
        )
    tensors = [*module.named_parameters(), *module.named_buffers()]
    if lazy := [name for name, x in tensors if nn.parameter.is_lazy(x)]:
        fix = "module(x) once, with an input of the right shape, then vfn.module_function(module)"
        raise TransformError(report(where, "a lazy module has no shapes yet", [", ".join(lazy)], fix))
    return module


@saved_as("vescale_fn.modules.functional")
class Functional:
    """A module as a function of its parameters; made by `module_function`.

    Attributes:
        params: the names of the parameters' tree.
        state: the names of the state's tree; None for a function without state.
        trainable: the parameters' tree, with a bool for each leaf: whether it required gradients in the module.
        policies: by the names of modules, what is kept of those whose values are computed again (`remat`).
        cuts: the names of the modules behind which a pipeline may cut (`cutting`).
    """

    policies: Policies = MappingProxyType({})
    cuts: frozenset[str] = frozenset()

    def __init__(self, template: Template, state: bool | str) -> None:
        self._template, self.__name__ = template, type(template.root).__name__
        self.params = Names(template.root, "parameters", "params")
        wanted = (lambda name: True) if state is True else re.compile(str(state)).search
        self.state = Names(template.root, "buffers", "state", lambda name: bool(wanted(name))) if state else None
        self._frozen = [not x.requires_grad for x in self.params.tensors]
        self.trainable = self.params.tree(not frozen for frozen in self._frozen)
        held = {id(b) for b in self.state.tensors} if self.state else set()
        self._constants = {id(b): (name, b) for name, b in template.root.named_buffers() if id(b) not in held}
        self._at_use: dict[int, P] = {}
        self._moved: dict[Any, list[torch.Tensor]] = {}
        self._module_names = dict(template.root.named_modules())
        if isinstance(state, str) and self.state is not None and not self.state.names:
            have = ", ".join(name for name, _ in template.root.named_buffers()) or "none"
            raise SpecError(report(_WHERE, f"no buffer matches state={state!r}", [f"the module's buffers: {have}"]))

    def __repr__(self) -> str:
        return f"<vescale_fn function of {self.__name__}: {len(self.params.names)} parameters>"

    def __call__(
        self, params: Any, *args: Any, key: Key | None = None, train: bool | None = None, **kwargs: Any
    ) -> Any:
        with interrupts.undone():
            return self._called(params, args, key, train, kwargs)

    def _called(self, params: Any, args: Any, key: Key | None, train: bool | None, kwargs: dict[str, Any]) -> Any:
        leaves = self.params.leaves(params, self.__name__)
        if key is not None and not (isinstance(key, Key) and not key.ndim):
            raise RandomError(
                report(self.__name__, f"key must be one key, but it is {described(key)}", fix="key=vfn.random.key(0)")
            )
        if train is not None and not isinstance(train, bool):
            raise TransformError(report(self.__name__, f"train must be True, False or None, but it is {short(train)}"))
        given = {
            id(stand_in): x.detach() if frozen and torch_internals.needs_gradient(x) else x
            for stand_in, x, frozen in zip(self.params.tensors, leaves, self._frozen)
        }
        constants = self._constants_near(leaves)
        given |= constants
        if self.state is not None:
            if not args:
                raise TransformError(report(self.__name__, "the state is missing", fix="f(params, state, *args)"))
            held, args = args[0], args[1:]
            held = self.state.leaves(held, self.__name__)
            given |= {id(stand_in): x.clone() for stand_in, x in zip(self.state.tensors, held)}
        module = self._template.filled(given, train, self._read if self._at_use else None)
        put(self.policies, module.modules(), self._module_names)
        mark(self.cuts, module.modules(), self._module_names)  # around what is computed again
        names = dict(zip(map(id, module.modules()), self._module_names))
        watched = [
            *((f"the buffer {self._constants[i][0]!r}", x) for i, x in constants.items()),
            *((f"the parameter {path}", x) for path, x in zip(self.params.paths, leaves)),
        ]
        kept = {memory_of(x): what for what, x in watched}
        before = [torch_internals.version(x) for _, x in watched], _generator_state()
        with Keyed(self.__name__, key, kept, names, self._fix()):
            out = module(*args, **kwargs)
        self._check_kept(module, constants, watched, before)
        adopted([out])
        if self.state is None:
            return out
        after = dict(module.named_buffers(remove_duplicate=False))
        return out, self.state.tree(after[name] for name in self.state.names)

    def gathering(self, specs: Any) -> Functional:
        """This function, whose module brings a parameter to where `specs` says each time that it reads it.

        So a model that is split as in FSDP never has more than some of its parameters whole: one layer's, if its layers are
        computed again in the backward pass (transformers' ``module.activation_checkpointing_enable()``, or
        `torch.utils.checkpoint` in its code), and those that the backward pass will need, if not. Gradients are
        reduce-scattered. In a plan small parameters travel together.

        Args:
            specs: how each parameter is to lie where it is used; a tree of specs, or a prefix of one: ``P()``.

        Raises:
            SpecError: specs that do not fit the tree.

        Source: Zhao et al., "PyTorch FSDP" (arXiv 2304.11277).

        >>> import torch, vescale_fn as vfn
        >>> f, params = vfn.module_function(torch.nn.Linear(4, 2))
        >>> with vfn.simulate(2), vfn.comm_log() as log:
        ...     split = vfn.shard(params, vfn.make_mesh((2,), ("dp",)), vfn.P("dp"))
        ...     y = f.gathering(vfn.P())(split, torch.ones(3, 4))
        ...     print([call.op for call in log], vfn.unshard(y).equal(f(params, torch.ones(3, 4))))
        ['all_gather', 'all_gather'] True
        """
        found = tree.broadcast(
            specs, self.params.tree(self.params.tensors), f"{self.__name__}.gathering", "specs", "params"
        )
        if wrong := [
            f"that of {path} is {described(s)}" for path, s in zip(self.params.paths, found) if not isinstance(s, P)
        ]:
            raise SpecError(report(f"{self.__name__}.gathering", "every spec must be a vfn.P", wrong))
        out = copy.copy(self)
        out._at_use = {id(stand_in): spec for stand_in, spec in zip(self.params.tensors, found, strict=True)}
        return out

    def remat(self, policies: Mapping[str, Policy | None]) -> Functional:
        """This function, parts of whose module compute their values again in the backward pass instead of keeping them.

        Each part is run again as one, so that the memory of one part at a time is needed. With `gathering` its parameters are
        gathered again too: FSDP's ``reshard_after_forward``. No bit depends on it, draws are the same.

        Args:
            policies: by the paths of modules, ``"layers.*"``, what is kept all the same: a policy as for `vfn.remat`, None for
                nothing. ``*`` stands for any one part of a path, ``**`` for any number; the first pattern that fits a module
                counts. Of modules in one another the outermost is run again, and the innermost around an op says whether
                its values are kept.

        Raises:
            SpecError: a path of no module; what is no policy.
            TransformError: a part that changes its state, which would change twice.

        Source: `torch.distributed.algorithms._checkpoint.checkpoint_wrapper`, as a function of paths.

        >>> import torch, vescale_fn as vfn
        >>> blocks = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(2)]
        >>> f, params = vfn.module_function(torch.nn.Sequential(*blocks))
        >>> again = f.remat({"*": vfn.remat_policies.dots_saveable, "1.1": vfn.remat_policies.everything_saveable})
        >>> x = torch.ones(3, 4)
        >>> gradients = [vfn.grad(lambda params: g(params, x).sum())(params) for g in (f, again)]
        >>> all(torch.equal(a, b) for a, b in zip(*map(vfn.tree.leaves, gradients)))
        True
        """
        where = f"{self.__name__}.remat"
        found = policies_of(policies, self._module_names, where)
        if self.state is not None and (
            changed := [n for n in self.state.names if any(n.startswith(f"{name}." * bool(name)) for name in found)]
        ):
            fix = "paths without it; or a state= that leaves it out, if no call changes it"
            raise TransformError(report(where, "what is computed again would change its state twice", changed, fix))
        out = copy.copy(self)
        out.policies = found
        return out

    def cutting(self, pattern: str) -> Functional:
        """This function, which `vfn.pipeline` may cut behind parts of its module: what they give goes through `vfn.cut`.

        Args:
            pattern: a regular expression (`re.search`) that finds the names of these modules; each cut has its module's name.

        Raises:
            SpecError: no regular expression, or one that finds no module.

        Source: `torch.distributed.pipelining.pipeline`, its ``split_spec``.

        >>> import torch, vescale_fn as vfn
        >>> f, params = vfn.module_function(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4)))
        >>> f = f.cutting(r"^1$")  # between the two matrices
        >>> x, piped = torch.ones(4, 4), vfn.pipeline(lambda params, x: f(params, x).sum(), "pp", microbatches=2)
        >>> with vfn.simulate(2), vfn.use_mesh(vfn.make_mesh((2,), ("pp",))):
        ...     piped.specs(params, x)
        [{'weight': P(at={'pp': 0}), 'bias': P(at={'pp': 0})}, {}, {'weight': P(at={'pp': 1}), 'bias': P(at={'pp': 1})}]
        """
        out = copy.copy(self)
        out.cuts = cuts_of(pattern, self._module_names, f"{self.__name__}.cutting")
        return out

    def _read(self, stand_in: Any, x: Any) -> Any:
        """A parameter as its module reads it; on one device it lies where it is."""
        spec = self._at_use.get(id(stand_in))
        return with_sharding(x, spec, mesh=mesh_of(x)) if spec is not None and is_array(x) else x

    def state_dict(self, params: Any, state: Any = None) -> dict[str, torch.Tensor]:
        """The parameters, and the buffers that a checkpoint has, by the names that `torch.nn.Module.state_dict` gives them.

        Args:
            params: a tree of parameters; arrays stay arrays: ``vfn.unshard(params)`` first for what torch is to load.
            state: the state; buffers that are constants are there in any case.

        >>> import torch, vescale_fn as vfn
        >>> f, params = vfn.module_function(torch.nn.Linear(2, 1))
        >>> sorted(f.state_dict(params))
        ['bias', 'weight']
        """
        where = f"{self.__name__}.state_dict"
        named = {
            name: x for name, x in self._template.root.state_dict(keep_vars=True).items() if isinstance(x, torch.Tensor)
        }
        found = self.params.flat(self.params.leaves(params, where))
        if self.state is not None:
            if state is None:
                raise TransformError(report(where, "the state is missing", fix="f.state_dict(params, state)"))
            found |= self.state.flat(self.state.leaves(state, where))
        return {name: found.get(name, x.detach()) for name, x in named.items()}

    def from_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> Any:
        """The parameters, or ``(params, state)`` of a function with state, out of a `state_dict`.

        Args:
            state_dict: tensors by dotted names. Of tied weights any one name will do; buffers that are constants are not
                read.

        Raises:
            SpecError: what is missing, unknown or of another shape; all at once.

        >>> import torch, vescale_fn as vfn
        >>> module = torch.nn.Linear(2, 1)
        >>> f, params = vfn.module_function(module)
        >>> f.from_state_dict(module.state_dict())["weight"].shape
        torch.Size([1, 2])
        """
        failures: list[str] = []
        params = self.params.picked(state_dict, failures)
        state = self.state.picked(state_dict, failures) if self.state is not None else []
        known = {*self.params.names, *self.params.aliases}
        known |= {name for name, _ in self._template.root.named_buffers(remove_duplicate=False)}
        failures += [
            f"it has {name!r} besides, which the module does not know" for name in state_dict if name not in known
        ]
        if failures:
            raise SpecError(
                report(f"{self.__name__}.from_state_dict", "the state_dict is not of this module", failures)
            )
        return self.params.tree(params) if self.state is None else (self.params.tree(params), self.state.tree(state))

    def _fix(self) -> str:
        if self.state is None:
            return (
                "f, params, state = vfn.module_function(module, state=True), then out, state = f(params, state, *args); or "
                "train=False"
            )
        return "a state= of module_function that has this buffer; or train=False"

    def _constants_near(self, leaves: list[torch.Tensor]) -> dict[int, torch.Tensor]:
        """The buffers that are constants, where the parameters are."""
        if not self._constants:
            return {}
        there = next(iter(leaves), None)
        mesh = None if there is None else mesh_of(there)
        device = None if there is None else torch.device(mesh.device_type) if mesh is not None else there.device
        found = self._moved.get(device)
        if found is None:
            held = [b for _, b in self._constants.values()]
            if device is not None and device.type != "meta":
                if missing := [name for name, b in self._constants.values() if b.device.type == "meta"]:
                    raise TransformError(
                        report(
                            self.__name__,
                            "buffers on the meta device have no values",
                            [", ".join(map(repr, missing))],
                            "vfn.deferred(lambda: Module(...)) in place of a module made under torch.device('meta')",
                        )
                    )
                held = [b if b.device.type == device.type else b.to(device) for b in held]
            found = self._moved[device] = held
        return dict(zip(self._constants, found))

    def _check_kept(
        self, module: nn.Module, constants: Mapping[int, torch.Tensor], watched: list[Any], before: Any
    ) -> None:
        """Net for what no mode sees: writes and draws by code that is not torch's Python."""
        versions, generators = before
        changed = [what for (what, x), version in zip(watched, versions) if torch_internals.version(x) != version]
        now = dict(module.named_buffers(remove_duplicate=False))
        changed += [
            f"the buffer {name!r}" for i, (name, _) in self._constants.items() if now.get(name) is not constants[i]
        ]
        if changed:
            raise InPlaceError(
                report(
                    self.__name__,
                    f"a call changes {', '.join(dict.fromkeys(changed))}, and the function is pure",
                    fix=self._fix(),
                )
            )
        if generators != _generator_state():
            what = "the module draws from torch's global generator by code that no key reaches: C++, or compiled"
            raise RandomError(
                report(self.__name__, what, fix="train=False, or a module that draws by torch's functions")
            )


def _generator_state() -> Any:
    """What tells whether torch's global generators have been used; nothing is told where calls are recorded."""
    if torch_internals.dispatch_modes() or torch_internals.transforming():
        return None
    with torch_internals.no_torch_function():
        own = torch.random.get_rng_state().numpy().tobytes()
        gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        return own, None if gpu is None else torch.cuda.default_generators[gpu].get_offset()


functionalize = earlier_name("functionalize", module_function)
