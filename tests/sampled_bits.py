"""Sampled programs under `vfn.deterministic`: the same bits on 1, 2 and 4 processes.

The programs are those of `sampled_plans`, on arrays that are split somehow, evenly or not, and of `sampled_bodies`: as they are,
differentiated once and (bodies) twice, and under `vfn.jit`. The ordinary tests take a few. The long runs are

    python tests/sampled_bits.py --cases 1000 --seed 1
    python tests/sampled_bits.py --cases 1000 --seed 1 --bodies
"""

import argparse
import functools
import hashlib
import random
import warnings

import sampled_bodies
import torch
from sampled_plans import STAYING, UNEVEN, Program, _derivative, _laid, contiguous, spec

import vescale_fn as vfn
from vescale_fn._core.base import tree

MESHES = [((4,), "a"), ((2, 2), "ab"), ((1, 4), "ab"), ((2, 1, 2), "abc")]
COUNTS = (1, 2, 4)
BODY = "body "  # what the name of a program that is a `shard_map` body begins with
TURNS = (
    "vfn.grad",
    "vfn.grad of vfn.grad",
    "vfn.jvp",
    "vfn.grad",
    "vfn.vmap",
)  # in which a body is run, beside forward


def told(out):
    """What a value is, in a line; what is no tensor as it is."""
    if not isinstance(out, torch.Tensor):
        return repr(out)
    x = vfn.unshard(out).detach().resolve_conj().contiguous()
    return f"{x.dtype} {tuple(x.shape)} {hashlib.sha256(x.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]}"


def said(call):
    """What a call gives, or which error it raises."""
    try:
        return [told(x) for x in tree.leaves(call())]
    except Exception as error:
        return [type(error).__name__]


def of_a_function(name):
    """What a sampled function gives, by the way in which it is run."""
    program, rng = Program(name, UNEVEN), random.Random(f"bits {name}")
    sizes, axes = rng.choice(MESHES)
    mesh = vfn.make_mesh(sizes, tuple(axes))
    specs = [spec(rng, len(shape), axes) for shape, _, _ in program.makers]
    rows = [[spec(rng, ndim, axes) for ndim in range(6)] for _ in STAYING]
    f = program.function({at: functools.partial(_laid, mesh, row) for at, row in zip(STAYING, rows)})
    found = {}
    for how, g in (("", f), ("derivative: ", _derivative(program, f))):
        if g is not None:
            *given, number = contiguous(program.arguments(0))
            lay = lambda given=given: [vfn.shard(x.clone(), mesh, p) for x, p in zip(given, specs)]
            found[f"{name} {how}eager"] = said(lambda g=g: g(*lay(), number))
            found[f"{name} {how}plan"] = said(lambda g=g: vfn.jit(g)(*lay(), number))
    return found


def of_a_body(name):
    """What a sampled body gives, by the way in which it is run."""
    try:
        case = sampled_bodies.sampled(name.removeprefix(BODY), [sizes for sizes, _ in MESHES])
    except RuntimeError:  # the loop over ranks, by which programs are sampled, cannot run one
        return {f"{name} cannot be sampled": ["RuntimeError"]}
    wanted, mesh = sampled_bodies.Wanted(case), vfn.make_mesh(case.shape, case.names)
    given, found = sampled_bodies.given_inputs(case, mesh), {}
    turn = int(name.rpartition(":")[2])
    for check in sampled_bodies.checks(case)[-(turn % 2) :][:1]:
        f = case.compiled(mesh, check)
        for way in ("forward", TURNS[turn % len(TURNS)]):
            through, _ = sampled_bodies.WAYS[way]
            found[f"{name} {way}: eager"] = said(lambda through=through: through(f, wanted, given))
            run = lambda *xs, through=through: tuple(through(f, wanted, xs))
            found[f"{name} {way}: plan"] = said(lambda run=run: vfn.jit(run)(*given))
    return found


def found_in(names):
    """What sampled programs give, by name and way; to be called on each process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = lambda name: of_a_body(name) if name.startswith(BODY) else of_a_function(name)
        return {way: lines for name in names for way, lines in run(name).items()}


def differences(by_count):
    """What is not the same on each number of processes."""
    first, *others = by_count.values()
    return [(way, lines, other[way]) for way, lines in first.items() for other in others if other.get(way) != lines]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--bodies", action="store_true")
    options = parser.parse_args()
    kind = BODY if options.bodies else ""
    names, wrong, ways = [f"{kind}{options.seed}:{options.first + i}" for i in range(options.cases)], 0, 0
    with vfn.deterministic(4):
        for start in range(0, len(names), 100):
            batch = names[start : start + 100]
            found = {}
            for count in COUNTS:
                found[count], *others = vfn.launch(found_in, count, batch, device="cpu", timeout=600.0)
                assert all(other == found[count] for other in others), "processes differ"
            for row in differences(found):
                wrong += 1
                print(*row, sep="\n  ", flush=True)
            ways += len(found[1])
            refused = sum(len(lines) == 1 and lines[0].isidentifier() for lines in found[1].values())
            print(
                f"{start + len(batch)} programs, {ways} ways, {wrong} differences; of the last {len(found[1])} {refused} raise",
                flush=True,
            )


if __name__ == "__main__":
    main()
