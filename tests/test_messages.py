"""What is said of each mistake in `misuses.py`, to the letter; that it is said of the user's line, and on every rank alike."""

import inspect
import re
import sys
import warnings

import misuses
import pytest
import torch

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn._core.base import tracebacks

NAMES = {f.__name__: f for f in misuses.MISUSES}


def said(f, mesh) -> tuple[str, tuple[str, int]]:
    """The class and the text of an error, or of the warning; and the file and the line that it is of."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            f(mesh)
            told, place = warned[0].message, (warned[0].filename, warned[0].lineno)
        except Exception as error:
            told, frame = error, tracebacks.shorter(error, error.__traceback__)[0]
            while frame.tb_next is not None:
                frame = frame.tb_next
            place = frame.tb_frame.f_code.co_filename, frame.tb_lineno
    text = re.sub(r"\S*misuses\.py:\d+", "misuses.py", str(told))  # where the lines of a message are
    return f"{type(told).__name__}\n{text}", place


def place_at_fault(f) -> tuple[str, int]:
    """The file and the line that are wrong: the one marked so, else the last."""
    lines, first = inspect.getsourcelines(f)
    marked = [i for i, line in enumerate(lines) if line.endswith("# here\n")]
    return inspect.getfile(f), first + (marked[0] if marked else len(lines) - 1)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_said(name: str) -> None:
    f = NAMES[name]
    with vfn.simulate(4):
        text, place = said(f, vfn.make_mesh((2, 2), ("dp", "tp")))
    assert text == inspect.cleandoc(f.__doc__)
    assert place == place_at_fault(f)


# Those that have no counterpart on real ranks: a mesh of some axes, what needs a process group, a launch in a launched process.
ONLY_SIMULATED = {
    "a_mesh_of_more_ranks_than_there_are",
    "a_part_of_a_simulated_mesh",
    "a_launch_of_a_result",
    *(name for name, f in NAMES.items() if "torch has no process group" in (f.__doc__ or "")),
}
# These run one that is right, before the mistake.
AFTER_A_COLLECTIVE = {"a_derivative_of_a_maximum", "a_sum_of_a_gradient_that_is_summed", "a_write_that_would_be_lost"}


def on_a_rank(names) -> list[tuple[str, int]]:
    """What this rank says of each mistake, and how many collectives it had run before."""
    mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
    found = []
    for name in names:
        with vfn.comm_log() as log:
            found.append((said(NAMES[name], mesh)[0], len(log)))
    return found


def test_every_rank_says_the_same_before_the_first_collective(gloo) -> None:
    names = sorted(NAMES.keys() - ONLY_SIMULATED)
    first, *others = gloo(4, on_a_rank, names)
    assert others == [first] * 3
    for name, (text, _) in zip(names, first, strict=True):
        assert text == inspect.cleandoc(NAMES[name].__doc__)
    assert {name for name, (_, collectives) in zip(names, first, strict=True) if collectives} == AFTER_A_COLLECTIVE


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes before Python 3.11")
def test_an_error_of_torchs_in_a_body_names_the_blocks() -> None:
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
        step = vfn.shard_map(lambda p, x: x @ p["w"], mesh=mesh, in_specs=(P(), P("dp", "tp")), out_specs=P("dp"))
        with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied") as error:
            step({"w": torch.ones(4, 3)}, torch.ones(6, 4))
    assert error.value.__notes__ == [
        "In the body of shard_map(<lambda>) values are one rank's blocks: args[0]['w'] is f32[4,3], "
        "args[1] is f32[3,2]{V:dp,tp}"
    ]
