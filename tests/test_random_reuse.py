"""Debug mode finds a key that is used twice, and shows both lines."""

import linecache

import pytest
import torch

import vescale_fn as vfn
from tests.distributions import DISTRIBUTIONS
from vescale_fn import P, random
from vescale_fn.errors import RandomError

KEY = random.key(7)


def line_of(text: str) -> str:
    """Where a text stands first in this file, as a message says it."""
    for number in range(1, 400):
        line = linecache.getline(__file__, number)
        if text in line:
            return f"{__file__}:{number}: `{line.strip()}`"
    raise AssertionError(text)


def test_both_lines_are_shown() -> None:
    with vfn.debug(), pytest.raises(RandomError) as raised:
        random.uniform(KEY, (3,))  # the first
        random.normal(KEY, (3,))  # the second
    assert str(raised.value) == (
        "random.normal: the key [0, 7] was used before, so the numbers are not new ones\n"
        f"  * by random.uniform at {line_of('# the first')}\n"
        f"  * and by random.normal at {line_of('# the second')}\n"
        "  Instead: k1, k2 = vfn.random.split(key), and each of them once; vfn.random.clone(key) where it is meant"
    )


def test_a_loop_that_forgets_to_split() -> None:
    with vfn.debug(), pytest.raises(RandomError) as raised:
        for _ in range(2):
            random.dropout(KEY, torch.ones(3), 0.5)  # in a loop
    place = line_of("# in a loop")
    assert str(raised.value).splitlines()[1:3] == [
        f"  * by random.dropout at {place}",
        f"  * again by random.dropout at {place}",
    ]


REUSED = {
    "a draw and a split": lambda: (random.normal(KEY), random.split(KEY)),
    "two splits": lambda: (random.split(KEY), random.split(KEY, 3)),
    "a split and a fold": lambda: (random.split(KEY), random.fold_in(KEY, 9)),
    "a fold and a draw": lambda: (random.fold_in(KEY, 9), random.normal(KEY)),
    "a key made twice": lambda: (random.normal(random.key(7)), random.normal(random.key(7))),
    "the same child by two ways": lambda: (
        random.normal(random.split(KEY)[0]),
        random.normal(random.fold_in(random.clone(KEY), 0)),
    ),
    "one of a batch": lambda: (
        vfn.vmap(random.normal)(random.split(KEY, 3)),
        random.normal(random.wrap_key_data(random.key_data(random.split(random.clone(KEY), 3)))[1]),
    ),
    "a clone twice": lambda: (
        [random.normal(k) for k in (KEY, random.clone(KEY))],
        random.normal(KEY),
    ),
}


@pytest.mark.parametrize("case", REUSED)
def test_reuse_is_found(case: str) -> None:
    with vfn.debug(), pytest.raises(RandomError, match="was used before"):
        REUSED[case]()


def test_what_is_no_reuse() -> None:
    with vfn.debug():
        a, b = random.split(KEY)
        random.normal(a, (3,))
        steps = [random.fold_in(b, i) for i in range(4)]
        [random.uniform(step) for step in steps]
        c = random.key(99)
        assert torch.equal(random.normal(c, (2,)), random.normal(random.clone(c), (2,)))
        random.key_data(c), random.key_impl(c), repr(c), c == a
        keys = random.split(random.key(5), 3)
        vfn.vmap(lambda k: random.normal(k, (2,)))(keys)
        key = random.key(6)
        f = lambda x: random.dropout(key, x, 0.5).square().sum()
        vfn.grad(f)(torch.ones(5))  # the backward pass makes the mask again
        other = random.key(8)
        vfn.grad(vfn.remat(lambda x: (random.normal(other, (5,)) * x).square().sum()))(torch.ones(5))
    with vfn.debug():  # a block is for itself
        random.normal(KEY)
    random.normal(KEY)
    random.normal(KEY)


def test_on_a_mesh_and_in_a_body() -> None:
    with vfn.simulate(4):
        mesh = vfn.make_mesh((4,), ("dp",))

        def body(key):
            mine = random.fold_in(key, vfn.axis_index("dp"))
            return random.normal(mine, (2,)), random.normal(key, (8,), spec=P("dp"))

        with vfn.debug():
            random.normal(KEY, (8, 3), spec=P("dp"), mesh=mesh)
            with pytest.raises(RandomError, match="was used before"):
                random.split(KEY)
            with pytest.raises(RandomError, match="and by random.normal"):
                vfn.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P("dp"))(random.key(1))


OTHERS = {
    "bits": lambda key: random.bits(key, (3,)),
    "complex normal": lambda key: random.normal(key, (3,), torch.complex64),
    "dropout": lambda key: random.dropout(key, torch.ones(3), 0.5),
    "permutation": lambda key: random.permutation(key, 5),
    "permutation of rows": lambda key: random.permutation(key, torch.ones(3, 4), 1, True),
    "choice": lambda key: random.choice(key, 5, (3,)),
    "choice, p": lambda key: random.choice(key, 3, (2,), False, [0.2, 0.3, 0.5]),
    "categorical": lambda key: random.categorical(key, torch.zeros(3)),
    "orthogonal": lambda key: random.orthogonal(key, 3),
    "initial weights": lambda key: random.init.he_normal()(key, (3, 4)),
    "orthogonal weights": lambda key: random.init.orthogonal()(key, (3, 4)),
    **{d.id: lambda key, d=d: d(key, (2,)) for d in DISTRIBUTIONS if not d.vector},
}


@pytest.mark.parametrize("name", OTHERS)
def test_every_draw_uses_its_key_once(name: str) -> None:
    with vfn.debug():
        OTHERS[name](KEY)
        with pytest.raises(RandomError, match="was used before"):
            OTHERS[name](KEY)
