"""A layout of a whole step as data: how its arguments lie, how each of its calls is carried out, how its results lie."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..._core.sharding.spec import P


@dataclass(frozen=True)
class CallLayout:
    """How one call is carried out.

    Attributes:
        ins: how each tensor among its arguments is to lie, in order.
        outs: how each of its tensor results then lies, what is unreduced included.
    """

    ins: tuple[P, ...]
    outs: tuple[P, ...]


@dataclass(frozen=True)
class Layouts:
    """How a recorded step is carried out on a mesh.

    Attributes:
        mesh: the mesh's axes, with their sizes.
        inputs: of each placeholder of the recorded graph how it lies; None for what is no tensor.
        calls: of calls, by their nodes' names, how they are carried out; others, and those that write in place or show memory
            that is written, run as the rules vote.
        outputs: of each leaf of the result how it lies; None for what is no tensor, or stays as it comes.
        keeps: whether what moves in the forward pass is kept for the backward pass; else it moves there once more.
    """

    mesh: Mapping[str, int]
    inputs: tuple[P | None, ...]
    calls: Mapping[str, CallLayout] = field(default_factory=dict[str, CallLayout])
    outputs: tuple[P | None, ...] = ()
    keeps: bool = False

    def specs(self) -> Iterator[tuple[str, P]]:
        """All that it names, with where."""
        yield from _named("inputs", self.inputs)
        for name, call in self.calls.items():
            yield from _named(f"calls[{name!r}].ins", call.ins)
            yield from _named(f"calls[{name!r}].outs", call.outs)
        yield from _named("outputs", self.outputs)


def _named(where: str, specs: Sequence[P | None]) -> Iterator[tuple[str, P]]:
    return ((f"{where}[{i}]", spec) for i, spec in enumerate(specs) if spec is not None)
