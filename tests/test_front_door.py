"""What someone meets who types a name: the listing of each public module, and what a name of another library's is told."""

import functools
import importlib
import inspect
import re
import subprocess
import sys

import optree
import pytest
import torch

import vescale_fn as vfn
from vescale_fn._core.base.front_door import no_attribute
from vescale_fn._core.base.other_attributes import OTHER_ATTRIBUTES
from vescale_fn._core.base.other_names import OTHER_NAMES
from vescale_fn._core.base.other_words import OTHER_WORDS

PUBLIC = "checkpoint data debugging errors hardware lax nn ops optim optim.schedules plan precision random schedules tree".split()


@pytest.mark.parametrize("name", ["", *PUBLIC])
def test_a_public_module_lists_its_public_names_alone(name: str) -> None:
    module = importlib.import_module(f"vescale_fn.{name}".rstrip("."))
    assert {x for x in dir(module) if not re.fullmatch("__.*__", x)} == set(module.__all__)
    assert [x for x in module.__all__ if not hasattr(module, x)] == []
    modules = {x for x in module.__all__ if inspect.ismodule(getattr(module, x))}
    assert modules == {"": {x for x in PUBLIC if "." not in x}, "random": {"init"}, "optim": {"schedules"}}.get(
        name, set()
    )


def found(text: str) -> object:
    """What an expression like `vfn.random.split` in a text stands for."""
    first, *parts = text.split(".")
    return functools.reduce(getattr, parts, {"vfn": vfn, "torch": torch, "optree": optree}[first])


def faults(name: str) -> list[str]:
    """What is wrong with what a name of another library's is told: it is another text, or names something that is not there."""
    module, _, last = f"vfn.{name}".rpartition(".")
    instead, wrong = OTHER_NAMES[name], []
    with pytest.raises(AttributeError) as error:
        getattr(found(module), last)
    if str(error.value) != f"vfn.{name}: there is no such name\n  Instead: {instead}":
        wrong.append(f"{name} is told: {error.value}")
    return wrong + not_there(name, instead)


def not_there(name: str, instead: str) -> list[str]:
    """The names that a text tells of and that are not there."""
    wrong = []
    for mentioned in re.findall(r"\b(?:vfn|torch|optree)(?:\.\w+)+", instead):
        try:
            found(mentioned)
        except AttributeError:
            wrong.append(f"{name} is told of {mentioned}, which is not there")
    return wrong


def test_a_name_of_another_library_is_told_what_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [fault for name in OTHER_NAMES for fault in faults(name)] == []
    monkeypatch.setitem(OTHER_NAMES, "pjit", "vfn.jitt(f)")
    assert faults("pjit") == ["pjit is told of vfn.jitt, which is not there"]


TOLD = {
    "vfn.NamedSharding": """\
vfn.NamedSharding: there is no such name
  Instead: vfn.shard(x, mesh, vfn.P("dp")): a mesh and a spec are given side by side""",
    "vfn.PartitionSpec": """\
vfn.PartitionSpec: there is no such name
  Instead: vfn.P("dp", None): for each dim the axes that it is split over, or None""",
    "vfn.tree_map": "vfn.tree_map: there is no such name\n  Instead: vfn.tree.map",
    "vfn.random.PRNGKey": "vfn.random.PRNGKey: there is no such name\n  Instead: vfn.random.key(0)",
    "vfn.optim.AdamW": """\
vfn.optim.AdamW: there is no such name
  Instead: vfn.optim.adamw(1e-3): a pair of pure functions, init(params) and update(grads, state, params)""",
    "vfn.custom_gradient": """\
vfn.custom_gradient: there is no such name
  Instead: @vfn.custom_vjp, and f.defvjp(fwd, bwd)""",
    "vfn.vmapp": "vfn.vmapp: there is no such name; did you mean 'vmap'?",
    "vfn.random.unifrom": "vfn.random.unifrom: there is no such name; did you mean 'uniform'?",
    "vfn.normal": "vfn.normal: there is no such name\n  Instead: vfn.random.normal",
    "vfn.zzz": "vfn.zzz: there is no such name",
    "vfn.__wrapped__": "module 'vescale_fn' has no attribute '__wrapped__'",
}


@pytest.mark.parametrize("name", TOLD)
def test_what_a_missing_name_is_told(name: str) -> None:
    module, _, last = name.rpartition(".")
    with pytest.raises(AttributeError) as error:
        getattr(found(module), last)
    assert str(error.value) == TOLD[name]


def test_a_keyword_of_another_library_is_told_what_to_write() -> None:
    for name, words in OTHER_WORDS.items():
        f = found(f"vfn.{name}")
        for word, instead in words.items():
            assert not_there(f"{name}({word}=)", instead) == []
            with pytest.raises(TypeError) as error:
                f(**{word: 1})
            missing = "" if str(error.value).endswith(f"\n  Instead: {instead}") else str(error.value)
            assert missing == "", (name, word)


CALLS = {
    "vfn.grad(abs, argnum=0)": """\
vfn.grad: got an unexpected keyword argument 'argnum'; did you mean 'argnums'?
  Instead: vfn.grad(f, argnums=0, has_aux=False)""",
    "vfn.shard(1, vfn.P())": """\
vfn.shard: missing 1 required positional argument: 'spec'
  Instead: vfn.shard(tree, mesh, spec)""",
    "vfn.checkpoint.Manager()": """\
vfn.checkpoint.Manager: missing 1 required positional argument: 'folder'
  Instead: vfn.checkpoint.Manager(folder, keep=3, *, keep_every=None, background=False)""",
    "vfn.random.normal(key, std=2)": """\
vfn.random.normal: got an unexpected keyword argument 'std'
  Instead: vfn.random.normal(key, shape) * std + mean""",
    "vfn.checkpoint(abs)": """\
vfn.checkpoint.__call__: there is no such name
  Instead: vfn.remat(f), which computes again what it does not keep; vfn.save(path, tree)""",
    "vfn.debug.print('{}', 1)": "vfn.debug.print: there is no such name\n  Instead: vfn.debug_print",
    "key.split()": "vfn.Key.split: there is no such name\n  Instead: vfn.random.split(key, 2)",
    "key.splitt()": "'Key' object has no attribute 'splitt'",
    "vfn.jit(len(3))": "object of type 'int' has no len()",
    "vfn.vmap(f=lambda x: len(x))(torch.ones(2))": "len() of a 0-d tensor",
}


@pytest.mark.parametrize("call", CALLS)
def test_what_a_call_is_told(call: str) -> None:
    with pytest.raises((TypeError, AttributeError)) as error:
        eval(call, {"vfn": vfn, "torch": torch, "key": vfn.random.key(0)})
    assert str(error.value) == CALLS[call]


def test_an_attribute_of_another_library_is_told_what_to_write() -> None:
    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("dp",))
        x = vfn.shard(torch.ones(4), mesh, vfn.P())
    things = {"Array": x, "Mesh": mesh, "random.Key": vfn.random.key(0), "optim.Optimizer": vfn.optim.adam(1e-3)}
    for name, words in OTHER_ATTRIBUTES.items():
        for word, instead in words.items():
            assert not_there(f"{name}.{word}", instead) == []
            with pytest.raises(AttributeError) as error:
                getattr(things[name], word) if name in things else getattr(found(f"vfn.{name}"), word)()
            assert str(error.value) == str(no_attribute(name, None, word))
            assert str(error.value).endswith(f"there is no such name\n  Instead: {instead}")


def test_an_import_of_a_name_of_another_library_is_told_so_too() -> None:
    """Python puts a text of its own in the place of an AttributeError's."""
    with pytest.raises(ImportError) as error:
        from vescale_fn import NamedSharding  # noqa: F401
    assert str(error.value) == TOLD["vfn.NamedSharding"]
    from vescale_fn import recipes  # a folder that nothing imports by itself

    assert recipes.__name__ == "vescale_fn.recipes"


def test_python_adds_no_question_of_its_own() -> None:
    ran = subprocess.run([sys.executable, "-c", "import vescale_fn\nvescale_fn.vmapp"], capture_output=True, text=True)
    assert ran.stderr.splitlines()[-1] == "AttributeError: " + TOLD["vfn.vmapp"]


def test_trees() -> None:
    a = {"b": [1, None], "a": (2,)}
    assert vfn.tree.map(lambda x, y: x * y, a, a) == {"a": (4,), "b": [1, None]}
    leaves, treedef = vfn.tree.flatten(a)
    assert (leaves, vfn.tree.leaves(a), vfn.tree.structure(a)) == ([2, 1], [2, 1], treedef)
    assert vfn.tree.unflatten(treedef, leaves) == a
    assert (vfn.tree.reduce(lambda x, y: x + y, a), vfn.tree.all(a), vfn.tree.all([1, 0])) == (3, True, False)
    assert vfn.tree.leaves_with_path(a) == [(("a", 0), 2), (("b", 0), 1)]
    told = vfn.tree.map_with_path(lambda path, x, y: (path, x + y), a, a)
    assert told == {"a": ((("a", 0), 4),), "b": [(("b", 0), 2), None]}
    state = vfn.optim.sgd(0.1, momentum=0.9).init({"w": torch.zeros(2)})
    assert [".".join(map(str, path)) for path, _ in vfn.tree.leaves_with_path(state)] == ["count", "momentum.w"]
    assert len(vfn.tree.leaves(vfn.random.key(0))) == 1


EARLIER = {
    "functionalize": "module_function",
    "export": "export_weights",
    "checkpoint.export": "checkpoint.export_weights",
    "check": "check_parity",
    "debugging.check": "check_parity",
    "spec_by_size": "fsdp_specs",
    "optim.ema": "optim.params_ema",
    "precision.master": "precision.master_weights",
    "precision.scaled": "precision.loss_scaled",
}


@pytest.mark.parametrize("name", EARLIER)
def test_an_earlier_name_is_the_same_function_and_says_so(name: str) -> None:
    old, new = found(f"vfn.{name}"), found(f"vfn.{EARLIER[name]}")
    assert inspect.signature(old) == inspect.signature(new)
    assert (old.__name__, old.__code__, old.__module__) == (name.split(".")[-1], new.__code__, new.__module__)
    assert old.__doc__ == f"`{new.__name__}`, by its earlier name, which stays: see there."
    assert vfn.errors.TypingError is vfn.errors.VaryingTypeError


def test_schedules_under_the_names_of_optax_have_its_values() -> None:
    """By hand, from the formulas of its documentation."""
    s = vfn.optim.schedules
    at = lambda schedule, steps: [round(float(schedule(step)), 6) for step in steps]
    assert at(s.constant_schedule(0.3), (0, 5)) == [0.3, 0.3]
    assert at(s.linear_schedule(1.0, 0.1, 10, 5), (0, 5, 10, 15, 20)) == [1.0, 1.0, 0.55, 0.1, 0.1]
    assert at(s.cosine_decay_schedule(2.0, 10, 0.1, 2.0), (0, 5, 10, 11)) == [2.0, 0.65, 0.2, 0.2]
    warm = s.warmup_cosine_decay_schedule(0.1, 1.1, 4, 12, 0.2)
    assert at(warm, (0, 2, 4, 8, 12, 20)) == [0.1, 0.6, 1.1, 0.65, 0.2, 0.2]
    both = s.join_schedules([s.constant_schedule(1.0), s.constant_schedule(2.0)], [3])
    assert at(both, (2, 3)) == [1.0, 2.0]
    for call, text in (
        (
            lambda: s.linear_schedule(1.0, 0.0, 0),
            "linear_schedule: needed is transition_steps > 0, but transition_steps=0",
        ),
        (
            lambda: s.warmup_cosine_decay_schedule(0.0, 1.0, 9, 9),
            "warmup_cosine_decay_schedule: needed is 0 <= warmup_steps < decay_steps, but warmup_steps=9 and decay_steps=9",
        ),
    ):
        with pytest.raises(vfn.errors.VfnError) as error:
            call()
        assert str(error.value) == text
