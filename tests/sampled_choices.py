"""Layouts that `auto` chooses for sampled steps, carried out, against the steps themselves on one device.

Steps are those of `sampled_layouts`, with and without a bound on memory, on devices so slow that it pays to split. Values,
dtypes and layouts must be those of one device, eagerly and as a plan. The long run is

    PYTHONPATH=. python tests/sampled_choices.py --cases 200 --seed 1      # on 8 simulated ranks
    PYTHONPATH=. python tests/sampled_choices.py --case 1:17               # one again
"""

import argparse
import itertools
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from dataclasses import replace

import torch
from sampled_layouts import MESHES, SMALL, _compared, case

import vescale_fn as vfn
from benchmarks.peak_memory import Accountant
from vescale_fn.choice.recording import record
from vescale_fn.errors import VfnError

# a device on which it pays to split what tests can afford; and one on which nothing pays but to need less memory
SLOW = replace(vfn.hardware.h100(), flops={"float32": 1e6}, bytes=1e6, launch=1e-9)
SLOW_LINKS = replace(vfn.hardware.h100(), launch=1e-9)


def chosen(name, meshes=MESHES, device="cuda", bounded=None):
    """A case's step, its arguments, its layout by `auto`, the memory, and what is wanted; None where it is no case."""
    rng, found = random.Random(f"choice {name}"), case(name)
    if found is None:
        return None
    step, args, _ = found
    sizes, names = rng.choice(meshes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            wanted = step(*args)
            record(step, *args)
        except Exception:
            return None  # no program, or not one that can be recorded
    if not any(isinstance(x, torch.Tensor) for x in vfn.tree.leaves(args)):
        return None
    bounded = rng.random() < 0.5 if bounded is None else bounded
    on = replace(SLOW_LINKS if bounded else SLOW, device=device)
    mesh = vfn.make_mesh(tuple(sizes), tuple(names))
    how = {"mesh": mesh, "hardware": on, "candidates": rng.choice([1, 3])}
    choice, memory = vfn.auto(step, *args, **how), None
    if bounded:
        memory = int(choice.predicted.peak * rng.uniform(0.4, 1.0))
        try:
            choice = vfn.auto(step, *args, memory=memory, **how)
        except VfnError:
            memory = None
    return args, choice, memory, wanted


def fault(found):
    """What is wrong with a chosen layout; None where nothing is."""
    args, choice, memory, wanted = found
    if memory is not None and choice.predicted.peak > memory:
        return f"{choice.predicted.peak} bytes of {memory}"
    axes = dict(choice.layouts.mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mesh = choice.mesh()
        with vfn.use_mesh(mesh):
            for how, g in (("eager", choice.applied(mesh)), ("plan", choice.jit(mesh))):
                lie = vfn.shard(args, mesh, choice.specs)
                if (wrong := _compared(g(*lie), wanted, choice.layouts, axes)) is not None:
                    return f"{how} on {axes}: {wrong}"
    return None


def alive(found):
    """The most bytes that are alive on this process while the plan of a choice runs, counted."""
    args, choice, *_ = found
    mesh = choice.mesh()
    with warnings.catch_warnings(), vfn.use_mesh(mesh):
        warnings.simplefilter("ignore")
        lie, fast = vfn.shard(args, mesh, choice.specs), choice.jit(mesh)
        fast(*lie)
        plan = next(iter(fast._plans.values()))  # itself: a jitted function runs as written where a mode looks on
        leaves = vfn.tree.leaves(lie)
        with Accountant([x.to_local() if isinstance(x, vfn.Array) else x for x in leaves]) as account:
            plan.taking(leaves, "step", "")
    return account.peak


def faults_on_ranks(names):
    """What is wrong with choices for these cases on four real processes, which choose together, and the bytes that each was
    given, predicted to need, and had."""
    faults, counted = {}, []
    for name in names:
        if (found := chosen(name, SMALL, "cpu")) is None:
            continue
        _, choice, memory, _ = found
        if wrong := fault(found):
            faults[name] = wrong
        counted.append((memory, choice.predicted.peak, alive(found)))
    return faults, counted


def _sent(price):
    """What goes over the axes, and the peak."""
    return price.peak, sorted((one.op, one.axis, one.bytes) for one in price.comms)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--bounded", action="store_true", help="all within some memory")
    parser.add_argument("--case", help="one case, as seed:number")
    options = parser.parse_args()
    torch.set_num_threads(1)
    done, counts, begin = 0, Counter(), time.process_time()
    names = [options.case] if options.case else (f"{options.seed}:{i}" for i in itertools.count(options.first))
    for name in names:
        if done == options.cases:
            break
        with vfn.simulate(8):
            try:
                found = chosen(name, bounded=options.bounded or None)
                if found is None or (options.bounded and found[2] is None):
                    continue
                wrong = fault(found)
                _, choice, memory, _ = found
                counts["split"] += any(spec for spec in choice.layouts.inputs)
                counts["bounded"] += memory is not None
                searched = [one for one in choice.ranked if one.fits and one.found is not None]
                if len(searched) > 1:
                    counts["several fit"] += 1
                    least = min(one.found.seconds for one in searched)
                    counts["of which another wins than was predicted"] += searched[0].found.seconds > least * (1 + 1e-9)
                if choice.layouts.calls:
                    counts["of calls of its own"] += 1
                    counts["of which by the rules alone"] += _sent(choice.pasted) == _sent(choice.predicted)
                    counts["of which with lines"] += _sent(choice.written) == _sent(choice.predicted)
                for one in (choice, *choice.others):
                    counts["layouts"] += 1
                    counts["refused, as the rules vote"] += not one.layouts.calls
            except Exception as error:
                wrong = f"raised {type(error).__name__}: {error}"
                if options.case:
                    traceback.print_exc()
        done += 1
        if wrong:
            counts["wrong"] += 1
            print(f"--- {name}: {wrong}", flush=True)
        if done % 10 == 0 or done == options.cases:
            print(f"{done} cases, the last {name}: {dict(counts)}, {time.process_time() - begin:.0f} s", flush=True)
    sys.exit(bool(counts["wrong"]))


if __name__ == "__main__":
    main()
