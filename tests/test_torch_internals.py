"""The door to torch's private names: what each of its functions promises, so that a new torch says by itself what it broke."""

import ast
import contextlib
import pathlib
import subprocess
import sys
import threading
import time
import types

import numpy as np
import pytest
import torch
import torch.nn.attention.flex_attention as flex
from torch import fx
from torch.distributed.tensor import DTensor, Shard

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn._core import torch_internals as door
from vescale_fn._core.arrays.array import Array
from vescale_fn._core.torch_internals import exchanges as exchanged
from vescale_fn._core.torch_internals import interception

aten = torch.ops.aten
MM = aten.mm.default


def array():
    with vfn.simulate(2):
        return vfn.shard(torch.arange(8.0).view(4, 2), vfn.make_mesh((2,), ("i",)), P("i"))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output): ...

    @staticmethod
    def backward(ctx, g):
        return g * 2


def thread_of_gloo():
    """Whether a process group has threads of that name, which they give themselves; on systems that name none, True."""
    group = torch.distributed.ProcessGroupGloo(torch.distributed.HashStore(), 0, 1)
    until = time.monotonic() + 10
    names = None
    while names is None or (names and door.GLOO_THREAD not in names and time.monotonic() < until):
        names = {path.read_text().strip() for path in pathlib.Path("/proc/self/task").glob("*/comm")}
    del group
    return not names or door.GLOO_THREAD in names


def between_two():
    """What one of two ranks receives that the other has sent."""
    store, found = torch.distributed.HashStore(), torch.zeros(2)

    def run(rank):
        group = torch.distributed.ProcessGroupGloo(store, rank, 2)
        (door.received(group, found, 0) if rank else door.sent(group, torch.tensor([3.0, 4.0]), 1)).wait()

    other = threading.Thread(target=run, args=(1,))
    other.start()
    run(0)
    other.join()
    return found.tolist()


def seen_from_vmap(what):
    """What is found of a tensor inside of a vmap over its first dim."""
    found = []
    torch.func.vmap(lambda x: (found.append(what(x)), x)[1])(torch.zeros(3, 2))
    return found[0]


def refused(error, function, *args):
    """What a call says that fails as it should."""
    with pytest.raises(error) as caught:
        function(*args)
    return str(caught.value)


def named(graph):
    """The names of nodes that ask for the same ones, with numbers and without."""
    asked = ("x", "x", "x_1", torch.ops.aten.mm.default)
    return [(graph.placeholder(one) if isinstance(one, str) else graph.call_function(one)).name for one in asked]


def inside(context, what):
    with context:
        return what()


def asked(intercept, name, run):
    """How often a handler is asked while it concerns this thread, while it does not, and after it is off."""
    counts, concerns = [], [True]

    def handler(*given):
        counts.append(given)
        return (
            given[1](*given[2], **given[3])
            if len(given) == 4
            else (given[0] if len(given) == 1 else (given[0], NOTHING))
        )

    found, before = [], interception._at_work.get(name, (None, None))
    intercept(handler, lambda: concerns[0])
    for step in (lambda: concerns.clear() or concerns.append(False), lambda: intercept(*before), lambda: None):
        run()
        found.append(len(counts))
        counts.clear()
        step()
    return tuple(found)


NOTHING = contextlib.nullcontext()


def flex_attention_asked():
    """It stays on for the whole process: another handler for a moment, and what it has for a kernel."""
    given = flex.flex_attention.__kwdefaults__["_handler"]
    door.intercept_flex_attention(lambda by_kernel, *args: ["asked", by_kernel is not flex.flex_attention])
    answer = flex.flex_attention(1, 2)
    door.intercept_flex_attention(given)
    return answer


def flex_attention_like_torch():
    q = torch.randn(1, 2, 3, 4)
    out = door.flex_attention_in_ops(q, q, q, lambda score, b, h, i, j: score + h)
    return torch.allclose(out, torch.nn.functional.scaled_dot_product_attention(q, q, q), atol=1e-6)


def as_written():
    """What is made of the compiler's work where that is concerned, and where it is not."""

    def _callback_from_stance(callback):
        return callback

    with pytest.MonkeyPatch.context() as patched:
        frames = types.SimpleNamespace(_callback_from_stance=_callback_from_stance)
        patched.setitem(sys.modules, "torch._dynamo.eval_frame", frames)
        concerns = [True, False]
        assert door.run_compiled_as_written(lambda: concerns.pop(0))
        return [frames._callback_from_stance(len), frames._callback_from_stance(len)]


def backward_numbers():
    """What is known of autograd's nodes, asked from within one."""
    found = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(
        lambda g: found.extend((door.in_backward_pass(), door.running_node(), door.current_autograd_number()))
    )
    y.sum().backward()
    return found


def storage_offset():
    x = array()
    view = x.detach()
    door.set_storage_offset(view, 3)
    return view.storage_offset()


def own_shape():
    x = array()
    door.own_shape(aten.t_.default, (x,))
    return tuple(x.shape)


def other_block():
    x, spec = array(), door.spec(array())
    door.set_local(x, 1)
    door.set_spec(x, spec)
    return door.local(x) == 1 and door.spec(x) is spec


def without_block():
    x = array()
    door.forget_local(x)
    door.forget_local(x)
    return refused(AttributeError, vars(DTensor)[door.LOCAL].__get__, x)


def pointer_refused(x):
    return refused(RuntimeError, x.data_ptr)


def exchanges():
    class Recorder(door.TorchDispatchMode):
        records_plan = True
        assigned = lambda self, x, value, put: found.append("assigned") or put(x, value)
        swapped = lambda self, x: found.append("swapped")

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    found = []
    door.ask_before_exchange(lambda how, x, value: found.append(how))
    with Recorder() as mode:
        assert door.recorder() is mode
        assert door.is_recorded()
        torch.zeros(2).data = torch.ones(2)
        torch.utils.swap_tensors(torch.zeros(2), torch.ones(2))
    torch.zeros(2).set_(source=torch.ones(2))
    exchanged._asked.pop()
    return found


def put_back():
    saved = door.ambient()
    door.TorchDispatchMode().__enter__()
    torch.set_grad_enabled(False)
    door.set_ambient(saved)
    return door.dispatch_modes(), torch.is_grad_enabled()


def traced_step():
    seen = []

    def f(x):
        seen.append((door.is_traced(), door.tracing()))
        return door.as_one_step(torch.sin, (x,), {}, lambda: torch.sin(x))

    graph = torch.fx.experimental.proxy_tensor.make_fx(f)(torch.zeros(2)).graph
    return [*seen, next(node.target for node in graph.nodes if node.op == "call_function")]


def called():
    graph = torch.fx.symbolic_trace(lambda x: torch.mul(torch.add(x, 1) + 2, 3)).graph
    return [node.target.__name__ for node in door.calls_of(graph, lambda target: target in (torch.mul, torch.add))]


def tree():
    class Node:
        def __init__(self, x):
            self.x = x

    door.register_tree_node(Node, lambda node: ([node.x], None), lambda children, _: Node(*children), ("x",))
    take_apart, _, names = door.tree_node(Node)
    return take_apart(Node(1))[0], names(Node(1))


def fake(x=None):
    return door.without_values(door.fake_mode(), (2,), (1,), torch.float32, torch.device("cpu"))


def converted():
    module = torch.nn.Linear(2, 2)
    with door.fake_mode(), door.conversions_by_new_parameters():
        fake_module = torch.nn.Linear(2, 2)
        before = fake_module.weight
        fake_module.half()
    return fake_module.weight is not before and module.weight.dtype == torch.float32


def typed():
    return torch.storage.TypedStorage(
        wrap_storage=torch.zeros(4).untyped_storage(), dtype=torch.float32, _internal=True
    )


def truncated():
    x = torch.zeros(2)
    with door.truncated_normals_by(lambda own, x, *_, **__: x.fill_(7)):
        torch.nn.init.trunc_normal_(x)
    return x.tolist()


def warned():
    with pytest.warns(UserWarning, match="is tested with torch"):
        door.warn_of_untested("9.9.0")
    return True


def keep_apart():
    module, p = torch.nn.Linear(2, 1), torch.nn.Parameter(torch.zeros(1, 2))
    door.hold(module, {"weight": p, "bias": None}, {}, {})
    return (
        module.weight is p and [*door.held_by(module)[0]] == ["weight", "bias"] and set(door.HELD) <= set(vars(module))
    )


def followed():
    """By which level values are followed: of a gradient in another, with more and more of them hidden; by a tangent; by nothing."""
    seen = []

    def inner(x, y):
        seen.extend(door.follower(args, hidden) for args in ([x], [x, y], [y]) for hidden in ((), (2,), (1, 2)))
        return x * y

    torch.func.grad(lambda y: torch.func.grad(inner)(y, torch.ones(()) * y))(torch.ones(()))
    torch.func.jvp(lambda x: seen.append(door.follower([x])) or x, (torch.ones(()),), (torch.ones(()),))
    torch.func.jvp(lambda x: seen.append(door.follower([x], forward=False)) or x, (torch.ones(()),), (torch.ones(()),))
    seen += [door.follower([torch.ones(2, requires_grad=True)]), door.follower([torch.ones(2)])]
    return seen == [2, 1, None, 2, 1, None, 1, 1, None, 1, None, 0, None]


def dual():
    with torch.autograd.forward_ad.dual_level():
        x = torch.ones(2)
        return door.is_dual(torch.autograd.forward_ad.make_dual(x, x)), door.is_dual(x)


def edges_into_a_loop() -> list[bool]:
    """Whether a leaf and a value that were there before are found, and nothing else."""
    leaf = torch.ones(2, requires_grad=True)
    before = leaf * 2
    count = door.autograd_count()
    found = dict(door.edges_from_before([(before * leaf).sum(), leaf], count))
    return [found[before.grad_fn, 0] is None, all(x is leaf for key, x in found.items() if x is not None)]


def gradients_of_two_that_depend_on_each_other() -> list[float]:
    x = torch.ones((), requires_grad=True)
    y = x * 3
    with door.ending_at([x, y]):
        return [g.item() for g in torch.autograd.grad(x * 5 + y * 7, [x, y])]


def below_vmap() -> bool:
    """Whether a `vmap` can be taken off and put on again, and what it wraps be had and wrapped again."""

    def entry(x):
        layer = door.innermost_layer()
        with layer.off():
            (whole,) = layer.parts(x, True, 0)
            below = door.transforming(), whole.shape
            with layer.on():
                again = layer.whole(iter([whole]), True, 0)
                kept = layer.form(again), again.shape
        return x * (below == (False, (3, 2)) and kept == (True, (2,)))

    return bool(torch.func.vmap(entry)(torch.ones(3, 2)).all())


def below_jvp() -> list[float]:
    def f(x):
        layer = door.innermost_layer()
        with layer.off():
            primal, tangent = layer.parts(x, True, 0)
            with layer.on():
                return layer.whole(iter([primal * 2, tangent * 5]), layer.form(x), 0)

    return [x.item() for x in torch.func.jvp(f, (torch.ones(()),), (torch.ones(()),))]


def values_of_another_layer() -> list[list[float]]:
    """What a Function's rule for tangents, which runs under an outer `jvp`, makes of a value that an inner gradient has wrapped."""
    layers = []

    class Threefold(torch.autograd.Function):
        @staticmethod
        def forward(x, n):
            return x.clone()

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.n, ctx.level = inputs[1], door.level()

        @staticmethod
        def backward(ctx, ct):
            return ct, None

        @staticmethod
        def jvp(ctx, t, _):
            with door.layers_above(layers):
                return door.below(t * n[0], ctx.level)

    def f(x):
        n[:] = [(x > 0) * 3]
        layers[:] = door.active_layers()
        return Threefold.apply(x, 0)

    n = []
    value, tangent = torch.func.jvp(lambda x: torch.func.vjp(f, x)[0], (torch.ones(()),), (torch.ones(()),))
    return [[value.item()], [tangent.item()]]


def new_under_grad():
    """The gradient in a transform of its own, within another one that differentiates it; and what of it is left behind it."""
    kept = []

    def cubed(x):
        with door.new_gradient() as layer:
            y = door.begin_following(layer.whole(iter([x]), True, 0))
            kept.append(y)
            (g,) = torch.autograd.grad(y**3, y, create_graph=True)
            on = layer.is_on and door.below_ended(y) is None
            g = layer.parts(g, True, 0)[0]
        return g if on and layer.is_over and door.below_ended(y) is x else g * 0

    return torch.func.grad(cubed)(torch.tensor(2.0)) == 12 and door.below_ended(door.below_ended(kept[0])) is not None


def begun_under_grad() -> bool:
    def f(x):
        y = door.begin_following(x.detach())
        (g,) = torch.autograd.grad(y * 3, y)
        layer = door.innermost_layer()
        with layer.off():
            below = door.transforming()
        return x * (g == 3) * (not below and layer.followed(x) is x and layer.followed(x.detach()) is None)

    return torch.func.grad(f)(torch.ones(())).item() == 1


def hooks_around():
    def pack(x):
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        return door.saved_tensor_hooks()[0] is pack


@torch.library.custom_op("vfn_door::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def kept_itself():
    """Whether what autograd keeps inside is the tensor, where a hook from outside would make another of it."""
    w, seen = torch.ones(2, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(x), lambda x: x):
        with door.keeping_tensors():
            y = (w * w).sum()
    y.backward()
    return not seen and w.grad.tolist() == [2, 2]


def of_a_level_that_ended():
    kept = []

    def inner(a):
        return torch.func.vmap(lambda x: kept.append(x) or x * 1)(a.expand(2)).sum()

    torch.func.grad(inner)(torch.ones(()))
    try:
        torch.func.grad(lambda x: (x * kept[0]).sum())(torch.ones(()))
    except RuntimeError as error:
        return door.is_about_levels(error) and not door.is_about_levels(RuntimeError("another"))
    return False


CASES = {
    "BARE": lambda: {torch.Tensor, type(fake())} <= door.BARE,
    "DTensorSpec": lambda: type(door.spec(array())) is door.DTensorSpec,
    "FakeTensor": lambda: type(fake()) is door.FakeTensor,
    "FrozenNumber": lambda: issubclass(door.FrozenNumber, Exception),
    "Graph": lambda: (one := named(door.Graph())) == named(fx.Graph()) and len(set(one)) == 4,
    "HELD": keep_apart,
    "GLOO_THREAD": thread_of_gloo,
    "LOCAL": lambda: door.LOCAL in vars(DTensor),
    "NO_VALUE_ERRORS": lambda: refused(
        door.NO_VALUE_ERRORS, lambda: inside(door.shapes_only(), torch.zeros(2).nonzero)
    ),
    "OpOverload": lambda: isinstance(MM, door.OpOverload),
    "TensorMeta": lambda: type(door.spec(array()).tensor_meta) is door.TensorMeta,
    "TorchDispatchMode": lambda: inside(door.TorchDispatchMode(), door.dispatch_modes) == 1,
    "alike": lambda: (
        [
            door.alike([torch.zeros(2, 3)])(x)
            for x in (torch.ones(2, 3), torch.ones(3, 2).t(), torch.ones(2, 3).double())
        ]
        == [True, False, False]
    ),
    "all_gather_single": lambda: callable(door.all_gather_single),
    "all_function_modes": lambda: (
        inside(torch.device("meta"), door.all_function_modes) != door.all_function_modes() == []
    ),
    "all_is_seen": lambda: door.all_is_seen(),
    "ambient": lambda: len(door.ambient()) == 6,
    # a class of its own: of one that we have applied, nobody is asked again
    "another": lambda: (x := fake()) is not (y := door.another(x)) and y.shape == x.shape and y.stride() == x.stride(),
    "apply": lambda: door.apply(type("Ours", (Doubled,), {}), torch.ones(2)).tolist() == [2, 2],
    "as_one_step": lambda: traced_step() == [(True, True), torch.sin],
    "as_written": lambda: door.as_written(types.SimpleNamespace(_orig_mod=1)) == 1 and door.as_written(MM) is MM,
    "ask_before_exchange": lambda: exchanges() == ["data", "assigned", "swapped", "swapped", "set_"],
    "ask_before_groups": lambda: (
        "from_local" in refused(vfn.errors.VfnError, DTensor.from_local, torch.zeros(2), door.mesh(array()), [Shard(0)])
    ),
    "asked_for": lambda: door.asked_for(torch.sin, (torch.zeros(2),), {})[0] is aten.sin.default,
    "attention_kernel": lambda: door.attention_kernel(*(torch.zeros(1, 1, 2, 8),) * 3) is not None,
    "autocasting": lambda: (
        inside(torch.autocast("cpu", torch.bfloat16), door.autocasting) == (("cpu", torch.bfloat16),)
    ),
    "autograd_count": lambda: door.made_after(torch.ones(2, requires_grad=True) * 2, 0) and door.autograd_count() > 0,
    "backward_code": lambda: door.backward_code is door.engine_code,
    "bare_dtensor": lambda: (
        type(door.bare_dtensor(Array, torch.zeros(2), door.spec(array()), requires_grad=False)) is Array
    ),
    "base": lambda: (x := torch.zeros(2)) is door.base(x[:1]) and door.base(x) is None,
    "begin_following": begun_under_grad,
    "below_ended": new_under_grad,
    "new_gradient": new_under_grad,
    "batch_dims": lambda: seen_from_vmap(door.batch_dims) == [0],
    "break_graph": lambda: door.break_graph(ValueError()) is None,
    "called_on_plain_tensors": lambda: (
        not door.called_on_plain_tensors(lambda: torch.zeros(2, requires_grad=True) * 2).requires_grad
    ),
    "calls_of": lambda: called() == ["add", "mul"],
    "casts_not_kept": lambda: inside(door.casts_not_kept(), torch.is_autocast_cache_enabled) is False,
    "changed_setting": lambda: (
        "deterministic" in door.changed_setting((now := door.kernel_settings()), (not now[0], *now[1:]))
    ),
    "checkpoint_function": lambda: issubclass(door.checkpoint_function, torch.autograd.Function),
    "checkpoint_saver": lambda: door.checkpoint_saver is None or isinstance(door.checkpoint_saver, type),
    "choices": lambda: hash(door.choices()) is not None,
    "compiled_by_inductor": lambda: callable(torch._inductor.compile),
    "conversions_by_new_parameters": converted,
    "count_write": lambda: (x := torch.zeros(2)) is not None and (door.count_write(x), door.version(x))[1] == 1,
    "current_autograd_number": lambda: door.current_autograd_number() == -1 and backward_numbers()[2] >= 0,
    "custom_op_name": lambda: door.custom_op_name(doubled) == "vfn_door::doubled" and door.custom_op_name(MM) is None,
    "default_device": lambda: inside(torch.device("meta"), door.default_device).type == "meta",
    "default_dtype": lambda: inside(door.default_dtype(torch.float64), torch.get_default_dtype) is torch.float64,
    "default_store": lambda: refused(ValueError, door.default_store),
    "direct": lambda: (
        door.direct(MM)(torch.eye(2), torch.ones(2, 1)).tolist() == [[1], [1]] and door.direct(len) is len
    ),
    "disabled_torch_function": lambda: callable(door.disabled_torch_function),
    "dispatch_modes": lambda: door.dispatch_modes() == 0,
    "dispatch_seen": lambda: torch.tensor([array().sum(), 2.0]).tolist() == [28.0, 2.0],
    "dispatch_to_own": lambda: type(array() * 2) is Array,
    "edges_from_before": lambda: edges_into_a_loop() == [True, True],
    "engine_code": lambda: door.engine_code.co_name == "_engine_run_backward",
    "fake_mode": lambda: pointer_refused(fake()),
    "flattened": lambda: door.flattened([torch.zeros(2, 2), torch.ones(1)]).tolist() == [0, 0, 0, 0, 1],
    "flex_attention_in_ops": flex_attention_like_torch,
    "forbid_data_ptr": lambda: pointer_refused(array()),
    "forget_local": lambda: without_block(),
    "ending_at": lambda: gradients_of_two_that_depend_on_each_other() == [5, 7],
    "follower": lambda: followed(),
    "following_tangents": lambda: inside(door.following_tangents(), lambda: True),
    "forward_ad_active": lambda: (
        inside(torch.autograd.forward_ad.dual_level(), door.forward_ad_active) and not door.forward_ad_active()
    ),
    "function_mode_on": lambda: inside(torch.device("cpu"), door.function_mode_on) and not door.function_mode_on(),
    "function_tables": lambda: any(hasattr(table, "matmul") for table in door.function_tables),
    "group_of_members": lambda: refused(ValueError, door.group_of_members, [0], None),  # tests/test_deterministic.py
    "group_timeout": lambda: refused(ValueError, door.group_timeout),
    "has_kernel": lambda: door.has_kernel(MM, "CPU"),
    "has_own_memory": lambda: (
        (x := torch.zeros(2)) is not None
        and door.has_own_memory(x)
        and not door.has_own_memory(x[:1])
        and not door.has_own_memory(torch.from_numpy(np.zeros(2)))
    ),
    "held_by": keep_apart,
    "held_local": lambda: (
        (x := array()) is not None and (door.held_local(x), door.forget_local(x), door.held_local(x))[2] is None
    ),
    "hold": keep_apart,
    "in_backward_pass": lambda: backward_numbers()[0] is True and not door.in_backward_pass(),
    "in_parts": lambda: door.in_parts(aten.matmul.default) is not None and door.in_parts(MM) is None,
    "in_place": lambda: door.in_place(aten.add.Tensor) is aten.add_.Tensor and door.in_place(MM) is None,
    "intercept_checkpoint": lambda: (
        asked(
            door.intercept_checkpoint,
            "checkpoint",
            lambda: torch.utils.checkpoint.checkpoint(torch.sin, torch.zeros(2), use_reentrant=False),
        )
        == (1, 0, 0)
    ),
    "intercept_flex_attention": lambda: flex_attention_asked() == ["asked", True],
    "intercept_function_apply": lambda: (
        asked(door.intercept_function_apply, "apply", lambda: Doubled.apply(torch.ones(2))) == (1, 0, 0)
    ),
    "intercept_parameters": lambda: (
        asked(door.intercept_parameters, "parameter", lambda: torch.nn.Parameter(torch.ones(2))) == (1, 0, 0)
    ),
    "intercept_reverse_mode": lambda: (
        asked(door.intercept_reverse_mode, "gradient", lambda: torch.func.grad(torch.sum)(torch.ones(2))) == (1, 0, 0)
    ),
    "is_about_hooks": lambda: door.is_about_hooks(RuntimeError("saved tensor hooks")),
    "is_bare": lambda: door.is_bare(torch.zeros(2)) and door.is_bare(fake()) and not door.is_bare(array()),
    "is_batched": lambda: seen_from_vmap(door.is_batched) and not door.is_batched(torch.zeros(2)),
    "is_compiling": lambda: door.is_compiling() is False,
    "active_layers": lambda: values_of_another_layer() == [[1], [3]],
    "below": lambda: values_of_another_layer() == [[1], [3]],
    "layers_above": lambda: values_of_another_layer() == [[1], [3]],
    "innermost_layer": lambda: door.innermost_layer() is None and below_vmap() and below_jvp() == [2, 5],
    "is_about_levels": lambda: of_a_level_that_ended(),
    "is_dual": lambda: dual() == (True, False),
    "is_lazy": lambda: door.is_lazy(torch.zeros(2, dtype=torch.cfloat).conj()) and not door.is_lazy(torch.zeros(2)),
    "is_mapped": lambda: seen_from_vmap(door.is_mapped),
    "is_operator": lambda: door.is_operator(MM) and door.is_operator(aten.mm) and not door.is_operator(torch.mm),
    "is_plain": lambda: door.is_plain(torch.zeros(2)) and not door.is_plain(array()),
    "is_recorded": lambda: not door.is_recorded(),
    "is_traced": lambda: not door.is_traced(),
    "kernel_settings": lambda: len(door.kernel_settings()) >= 10,
    "keeping_tensors": lambda: kept_itself(),
    "known_without_values": lambda: (
        door.known_without_values(x := fake()) is door.known_without_values(door.another(x)) == {}
        and door.known_without_values(torch.ones(2)) is None
    ),
    "level": lambda: seen_from_vmap(lambda x: door.level()) == 1,
    "load_forward_rules": lambda: door.load_forward_rules() is None,
    "local": lambda: [block.tolist() for block in door.local(array()).blocks] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]],
    "made_after": lambda: not door.made_after(torch.zeros(2), 0),
    "make_wrapper_subclass": lambda: callable(door.make_wrapper_subclass),
    "mark_as_parameter": lambda: (
        (x := array()) is not None and (door.mark_as_parameter(x), isinstance(x, torch.nn.Parameter))[1]
    ),
    "memory": lambda: (
        (x := torch.zeros(2)) is not None and door.memory(x) == door.memory(x.detach()) != door.memory(x[:1])
    ),
    "memory_number": lambda: (x := torch.zeros(2)) is not None and door.memory_number(x) == door.memory_number(x[1:]),
    "missing_of_flex_attention": lambda: door.missing_of_flex_attention() == [],
    "mesh": lambda: (x := array()).device_mesh is door.mesh(x),
    "named_kernel_settings": lambda: door.named_kernel_settings()["torch.set_float32_matmul_precision"] == "highest",
    "needs_gradient": lambda: (
        door.needs_gradient(torch.zeros(2, requires_grad=True)) and not door.needs_gradient(torch.zeros(2))
    ),
    "never_recorded": lambda: inside(door.TorchDispatchMode(), door.never_recorded(door.dispatch_modes)) == 0,
    "new_dtensor": lambda: pointer_refused(
        door.new_dtensor(Array, torch.zeros(2), door.spec(array()), requires_grad=False)
    ),
    "no_torch_function": lambda: (
        inside(torch.device("meta"), lambda: inside(door.no_torch_function(), lambda: torch.zeros(2).device.type))
        == "cpu"
    ),
    "no_transforms": lambda: (
        seen_from_vmap(lambda x: inside(door.no_transforms(), lambda: torch.zeros(2).sum().item())) == 0
    ),
    "no_view": lambda: (x := torch.zeros(2)) is door.no_view(x) and door.base(door.no_view(x[:1])) is None,
    "norms": lambda: [x.item() for x in door.norms([torch.tensor([3.0, 4.0])], torch.float64)] == [5],
    "not_compiled": lambda: door.not_compiled(lambda: 3)() == 3,
    "on_lists": lambda: door.on_lists("sin") is not None and door.on_lists("nothing") is None,
    "only_mapping": lambda: (
        seen_from_vmap(lambda _: door.only_mapping())
        and torch.func.grad(lambda x: x * door.only_mapping())(torch.tensor(1.0)) == 0
    ),
    "operator_name": lambda: door.operator_name(aten.add_.Tensor) == "aten::add_",
    "out_of_place": lambda: door.out_of_place(aten.add_.Tensor) is aten.add.Tensor,
    "overload_name": lambda: door.overload_name(aten.add_.Tensor) == "aten::add_.Tensor",
    "overload_named": lambda: (
        door.overload_named("aten::add_.Tensor") is aten.add_.Tensor
        and door.overload_named("aten::add_.no_such") is door.overload_named("no_such::add") is None
    ),
    "overloads": lambda: aten.add.Scalar in door.overloads(aten.add.Tensor),
    "own_shape": lambda: own_shape() == (2, 4),
    "raw_duals": lambda: not door.raw_duals() and inside(torch.autograd.forward_ad.dual_level(), door.raw_duals),
    "peel": lambda: seen_from_vmap(lambda x: tuple(door.peel(x).shape)) == (3, 2),
    "preload": lambda: door.preload() is None,
    "propagate": lambda: door.propagate(aten.sin.default, (door.spec(array()),), {}) == ([(Shard(0),)], [(Shard(0),)]),
    "rebuild_tensor": lambda: door.rebuild_tensor(typed(), 0, (2,), (1,), False, {}).shape == (2,),
    "received": lambda: between_two() == [3, 4],
    "recorder": lambda: door.recorder() is None,
    "reduce_scatter_single": lambda: callable(door.reduce_scatter_single),
    "register_tree_node": lambda: tree() == ([1], ["x"]),
    "has_groups": lambda: not door.has_groups(door.mesh(array())),
    "root_mesh": lambda: (m := door.mesh(array())) is door.root_mesh(m),
    "run_compiled_as_written": lambda: as_written() == [None, len],
    "running_node": lambda: door.running_node() is None and backward_numbers()[1] >= 0,
    "saved_tensor_hooks": hooks_around,
    "sent": lambda: callable(door.sent),  # "received"
    "schema": lambda: [a.name for a in door.schema(MM).arguments] == ["self", "mat2"],
    "set_ambient": lambda: put_back() == (0, True),
    "set_default_group_timeout": lambda: callable(door.set_default_group_timeout),
    "set_group_timeout": lambda: door.set_group_timeout(None, None) is False,
    "set_data": lambda: (x := torch.zeros(2)) is not None and [door.set_data(x, torch.ones(3)), x.sum().item()][1] == 3,
    "set_local": other_block,
    "set_spec": other_block,
    "set_storage_offset": lambda: storage_offset() == 3,
    "materialized": lambda: door.materialized(torch.tensor([1j]).conj()).tolist() == [-1j],
    "shapes_only": lambda: type(inside(door.shapes_only(), lambda: torch.zeros(2))) is door.FakeTensor,
    "spec": lambda: door.spec(array()).placements == (Shard(0),),
    "standard_gamma_grad": lambda: door.standard_gamma_grad(torch.ones(1), torch.ones(1)).item() > 0,
    "stands_for_memory": lambda: (
        door.stands_for_memory(door.storage(array())) and not door.stands_for_memory(torch.zeros(2).untyped_storage())
    ),
    "storage": lambda: (x := torch.zeros(2)) is not None and door.storage(x) is door.storage(x[:1]),
    "stored_at": lambda: [*door.stored_at().__dataclass_fields__][:3] == ["relative_path", "offset", "length"],
    "strided_shard": lambda: door.strided_shard(1, 2).split_factor == 2,
    "strided_shard_type": lambda: type(door.strided_shard(0, 2)) is door.strided_shard_type,
    "torch_function": lambda: inside(
        torch.device("meta"),
        lambda: inside(
            door.no_torch_function(),
            lambda: inside(door.torch_function(), lambda: torch.zeros(2).device.type) == "meta",
        ),
    ),
    "torch_function_on": lambda: (
        door.torch_function_on() and not inside(door.no_torch_function(), door.torch_function_on)
    ),
    "tracing": lambda: not door.tracing() and inside(door.TorchDispatchMode(), door.tracing),
    "transforming": lambda: seen_from_vmap(lambda x: door.transforming()) and not door.transforming(),
    "tree_node": lambda: tree() == ([1], ["x"]) and door.tree_node(int) is None,
    "truncated_normals_by": lambda: truncated() == [7, 7],
    "unattached_mesh": lambda: door.unattached_mesh("cpu", torch.arange(2), ("i",)).mesh_dim_names == ("i",),
    "undispatched": lambda: (
        inside(door.shapes_only(), lambda: inside(door.undispatched(), lambda: type(torch.empty(1)))) is torch.Tensor
    ),
    "unflattened": lambda: (
        [x.shape for x in door.unflattened(torch.zeros(5), [torch.zeros(2, 2), torch.ones(1)])] == [(2, 2), (1,)]
    ),
    "unrecorded": lambda: inside(door.TorchDispatchMode(), lambda: inside(door.unrecorded(), door.dispatch_modes)) == 0,
    "unseen": lambda: door.unseen() == [],
    "TorchFunctionMode": lambda: isinstance(
        inside(torch.device("meta"), door.top_function_mode), door.TorchFunctionMode
    ),
    "top_function_mode": lambda: inside(torch.device("meta"), door.top_function_mode).device.type == "meta",
    "function_modes": lambda: door.function_modes() == 0 and inside(torch.device("meta"), door.function_modes) == 1,
    "became": lambda: (x := torch.zeros(2)) is not None and door.became(x, torch.ones(2)) and x.sum().item() == 2,
    "seen_whole": lambda: door.seen_whole(len)([1]) == 1,
    "settle": lambda: door.settle() is None,
    "settle_before_autograd": lambda: (
        door.settle_before_autograd() is None and Doubled.apply(torch.ones(1)).item() == 2
    ),
    "autocasting_so": lambda: (now := (("cpu", torch.bfloat16),)) == inside(door.autocasting_so(now), door.autocasting),
    "version": lambda: door.version(torch.zeros(2).add_(1)) == 1,
    "warn_of_untested": warned,
    "watched": lambda: not door.watched() and inside(torch.device("meta"), door.watched),
    "watched_by_other_modes": lambda: not inside(torch.device("meta"), door.watched_by_other_modes),
    "without_values": lambda: fake().shape == (2,),
}


def test_every_name_of_the_door_has_a_contract():
    assert sorted(CASES) == sorted(door.__all__)


@pytest.mark.parametrize("name", CASES)
def test_what_the_door_promises(name):
    assert CASES[name]()


# What must be noticed, since without it gradients in a body are wrong: each in a torch that calls it by another name.
NOTICED = """
import sys, types
import torch, torch.distributed.tensor, torch.utils.checkpoint
from torch._functorch import eager_transforms
for old in ("grad_and_value_impl", "_vjp_with_argnums"):
    setattr(eager_transforms, "other" + old, getattr(eager_transforms, old))
    for f in vars(eager_transforms).values():
        if isinstance(f, types.FunctionType) and old in f.__code__.co_names:
            f.__code__ = f.__code__.replace(co_names=tuple("other" + n if n == old else n for n in f.__code__.co_names))
import vescale_fn as vfn
with vfn.simulate(4):
    mesh, closed = vfn.make_mesh((4,), ("i",)), torch.ones(())
    body = lambda x: torch.func.grad(lambda v: (v * x).sum())(closed)[None]
    x = vfn.shard(torch.arange(1.0, 5.0), mesh, vfn.P("i"))
    try:
        print(vfn.unshard(vfn.shard_map(body, mesh=mesh, in_specs=vfn.P("i"), out_specs=vfn.P("i"), check_vma=False)(x)))
    except vfn.errors.TransformError as error:
        print(error)
"""


def test_gradients_that_this_torch_hides_are_refused_not_wrong():
    ran = subprocess.run([sys.executable, "-c", NOTICED], capture_output=True, text=True, timeout=300)
    assert "a body cannot see how" in ran.stdout, ran.stdout + ran.stderr
    assert "torch.func takes gradients: gradients would be wrong" in ran.stdout


@pytest.mark.parametrize(
    ("seen", "intercept"),
    [
        (interception._functions_are_seen, "intercept_function_apply"),
        (interception._gradients_are_seen, "intercept_reverse_mode"),
        (interception._checkpoints_are_seen, "intercept_checkpoint"),
    ],
)
def test_an_interception_that_does_nothing_is_noticed(seen, intercept, monkeypatch):
    with torch.inference_mode(), torch.autograd.graph.save_on_cpu():
        assert seen.__wrapped__()
    monkeypatch.setattr(interception, intercept, lambda *_: None)
    assert not seen.__wrapped__()


# What a release may lack: each is another way to the same, or asked for where it is needed. Nothing else may be off unsaid.
OPTIONAL = {
    "_cpp_dispatch_handle",  # `_op` itself is called where there are no others
    "_dim_group_names",
    "_orig_mod",
    "tags",
    "_SingleLevelFunction",
    "_bind_default_args",
    "_call_custom_function_call",
    "_NoopSaveInputs",
    "_engine_run_backward",
    "_is_any_autocast_enabled",
    "_dtensor__new__",
    "_get_root_mesh",
    "_illegal_names",  # torch's own way to a name
    "all_gather_single",
    "reduce_scatter_single",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "default_pg_nccl_timeout",
    "flatten_with_keys_fn",
    "op_to_schema_info_for_single_dim_strategy",
    "use_val_from_redistribute_schema",
}


def test_no_private_name_of_torch_is_missed_in_silence():
    """`in_backward_pass` and four others said no, or did nothing, where torch has no such name."""
    fallbacks = set()
    for path in pathlib.Path(door.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr" and len(node.args) == 3:
                owner, name = ast.unparse(node.args[0]), node.args[1]
                if isinstance(name, ast.Constant) and owner not in (
                    "mode",
                    "key",
                    "context_fn",
                    "_detouring",
                    "storage",
                ):
                    fallbacks.add(name.value)
    assert fallbacks - OPTIONAL == set()


def test_a_compiler_whose_results_run_unseen_is_noticed(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._dynamo.eval_frame", types.ModuleType("frames"))
    assert door.unseen() == ["torch.compile runs what it has made"]
    assert not door.all_is_seen()
