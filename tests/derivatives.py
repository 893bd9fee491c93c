"""Functions with derivative rules of their own, written for jax and for us alike: `CASES` are functions of a library and its arrays.

Run by a Python that has jax, this writes what jax gives to goldens/derivatives.json: numbers, or "error".
"""

import json
from functools import partial
from pathlib import Path

GOLDENS = Path(__file__).parent / "goldens" / "derivatives.json"
CASES = {}


def case(f):
    CASES[f.__name__] = f
    return f


def product(lib, xp, calls_itself):
    """x times the sine of y, whose rule doubles the gradient by x: so it is seen where the rule is used."""

    @lib.custom_vjp
    def f(x, y):
        return x * xp.sin(y)

    def fwd(x, y):
        return f(x, y) if calls_itself else x * xp.sin(y), (x, y)

    def bwd(kept, g):
        x, y = kept
        return 2 * g * xp.sin(y), g * x * xp.cos(y)

    f.defvjp(fwd, bwd)
    return f


def sine(lib, xp, calls_itself):
    """The sine, whose rule doubles the tangent."""

    @lib.custom_jvp
    def f(x):
        return xp.sin(x)

    @f.defjvp
    def rule(primals, tangents):
        (x,), (t,) = primals, tangents
        return f(x) if calls_itself else xp.sin(x), 2 * xp.cos(x) * t

    return f


def clipped(lib, xp):
    @lib.custom_vjp
    def f(x):
        return x

    f.defvjp(lambda x: (x, None), lambda _, g: (xp.clip(g, -0.3, 0.3),))
    return f


def on_products(transform):
    def run(lib, xp, array):
        x, y = array(0.7), array(1.3)
        return [transform(lib, product(lib, xp, itself), x, y) for itself in (True, False)]

    return run


ON_PRODUCTS = {
    "value": lambda lib, f, x, y: f(x, y),
    "grad": lambda lib, f, x, y: lib.grad(f, (0, 1))(x, y),
    "value_and_grad": lambda lib, f, x, y: lib.value_and_grad(f)(x, y),
    "vjp": lambda lib, f, x, y: lib.vjp(f, x, y)[1](x),
    "grad of grad": lambda lib, f, x, y: lib.grad(lib.grad(f, 1), (0, 1))(x, y),
    "grad of grad of grad": lambda lib, f, x, y: lib.grad(lib.grad(lib.grad(f, 1), 1), (0, 1))(x, y),
    "grad of the value": lambda lib, f, x, y: lib.grad(lambda x: lib.value_and_grad(f)(x, y)[0])(x),
    "vmap": lambda lib, f, x, y: lib.vmap(f, (0, None))(x[None], y),
    "vmap of grad": lambda lib, f, x, y: lib.vmap(lib.grad(f, (0, 1)), (0, None))(x[None], y),
    "grad of vmap": lambda lib, f, x, y: lib.grad(lambda x, y: lib.vmap(f, (0, None))(x[None], y).sum(), (0, 1))(x, y),
    "vmap of vmap": lambda lib, f, x, y: lib.grad(
        lambda y: lib.vmap(lambda x: lib.vmap(f, (None, 0))(x, y[None]))(x[None]).sum()
    )(y),
    "by one argument": lambda lib, f, x, y: lib.grad(lambda x: f(x, y * 2))(x),
    "both the same": lambda lib, f, x, y: lib.grad(lambda x: f(x, x))(x),
    "keywords": lambda lib, f, x, y: lib.grad(lambda x: f(y=y, x=x))(x),
    "remat": lambda lib, f, x, y: lib.grad(lib.remat(lambda x: f(f(x, y), y).sum()))(x),
    "jit": lambda lib, f, x, y: lib.jit(lib.grad(lambda x: f(f(x, y), y)))(x),
    "jvp": lambda lib, f, x, y: lib.jvp(f, (x, y), (x, y)),
    "jvp of grad": lambda lib, f, x, y: lib.jvp(lambda x: lib.grad(f, 1)(x, y), (x,), (x,)),
    "jvp of a stopped argument": lambda lib, f, x, y: lib.jvp(lambda x: x * f(lib.lax.stop_gradient(x), y), (x,), (x,)),
}
CASES |= {f"product: {name}": on_products(f) for name, f in ON_PRODUCTS.items()}


def on_sines(transform):
    return lambda lib, xp, array: [transform(lib, sine(lib, xp, itself), array(0.7)) for itself in (True, False)]


ON_SINES = {
    "value": lambda lib, f, x: f(x),
    "grad": lambda lib, f, x: lib.grad(f)(x),
    "jvp": lambda lib, f, x: lib.jvp(f, (x,), (x,)),
    "linearize": lambda lib, f, x: lib.linearize(f, x)[1](x),
    "grad of grad": lambda lib, f, x: lib.grad(lambda x: lib.grad(lambda x: f(x) ** 2)(x) ** 2)(x),
    "grad of grad of grad": lambda lib, f, x: lib.grad(lib.grad(lib.grad(lambda x: f(x) ** 2)))(x),
    "jvp of grad": lambda lib, f, x: lib.jvp(lib.grad(lambda x: f(x) ** 2), (x,), (x,)),
    "grad of jvp": lambda lib, f, x: lib.grad(lambda x: lib.jvp(lambda x: f(x) ** 2, (x,), (x,))[1])(x),
    "jvp of jvp": lambda lib, f, x: lib.jvp(lambda x: lib.jvp(lambda x: f(x) ** 2, (x,), (x,))[1], (x,), (x,)),
    "vmap of grad": lambda lib, f, x: lib.vmap(lib.grad(f))(x[None]),
    "grad of vmap": lambda lib, f, x: lib.grad(lambda x: lib.vmap(f)(x[None]).sum())(x),
    "jvp of vmap": lambda lib, f, x: lib.jvp(lambda x: lib.vmap(f)(x[None]).sum(), (x,), (x,)),
    "remat": lambda lib, f, x: lib.grad(lib.remat(lambda x: f(f(x))))(x),
    "jit": lambda lib, f, x: lib.jit(lib.grad(lambda x: f(f(x))))(x),
}
CASES |= {f"sine: {name}": on_sines(f) for name, f in ON_SINES.items()}


@case
def clipping(lib, xp, array):
    f = clipped(lib, xp)
    return [lib.grad(lambda x: xp.sin(f(x)))(array(x)) for x in (0.2, 1.5)]


@case
def clipping_twice(lib, xp, array):
    f = clipped(lib, xp)
    return [lib.grad(lib.grad(lambda x: xp.sin(f(x))))(array(x)) for x in (0.2, 1.5)]


@case
def clipping_under_a_value(lib, xp, array):
    f = clipped(lib, xp)
    inner = lambda x: lib.value_and_grad(lambda x: xp.sin(f(x)))(x)[0]
    return [lib.grad(inner)(array(x)) for x in (0.2, 1.5)]


@case
def trees_and_nones(lib, xp, array):
    @lib.custom_vjp
    def f(w, scale, rest):
        return {"y": w["a"] * w["b"][0] * scale, "z": (w["a"] + rest["n"], rest["n"])}

    f.defvjp(
        lambda w, scale, rest: (f(w, scale, rest), (w, scale)),
        lambda kept, g: ({"a": g["y"] * kept[1] + g["z"][0], "b": None}, None, None),
    )
    w = {"a": array(2.0), "b": [array(3.0)]}
    loss = lambda w, s: f(w, s, {"n": array(5.0)})["y"] ** 2
    return [lib.grad(loss)(w, array(0.5)), lib.grad(loss, 1)(w, array(0.5))]


@case
def nondiff(lib, xp, array):
    @partial(lib.custom_vjp, nondiff_argnums=(0, 2))
    def apply(f, x, times):
        for _ in range(times):
            x = f(x)
        return x

    apply.defvjp(lambda f, x, times: (apply(f, x, times), x), lambda f, times, x, g: (g * times * f(x),))
    return lib.grad(lambda x: apply(xp.cos, x, 3))(array(0.4))


@case
def nondiff_that_is_differentiated(lib, xp, array):
    f = lib.custom_vjp(lambda a, x: a * x, nondiff_argnums=(0,))
    f.defvjp(lambda a, x: (a * x, None), lambda a, _, g: (g * a,))
    return lib.grad(lambda x: f(x, x))(array(0.4))


@case
def nondiff_of_custom_jvp(lib, xp, array):
    @partial(lib.custom_jvp, nondiff_argnums=(0,))
    def apply(f, x):
        return f(x)

    @apply.defjvp
    def rule(f, primals, tangents):
        return apply(f, *primals), 3 * tangents[0]

    x = array(0.4)
    return [lib.grad(lambda x: apply(xp.cos, x))(x), lib.jvp(lambda x: apply(xp.cos, x), (x,), (x,))]


@case
def one_rule_for_each_argument(lib, xp, array):
    @lib.custom_jvp
    def f(x, y, z):
        return x * y + z

    f.defjvps(lambda t, out, x, y, z: 5 * y * t, None, lambda t, out, x, y, z: t + 0 * out)
    args = array(2.0), array(3.0), array(4.0)
    return [lib.grad(f, (0, 1, 2))(*args), lib.jvp(f, args, args)]


@case
def closed_over(lib, xp, array):
    def outer(w):
        f = lib.custom_vjp(lambda x: x * w)
        f.defvjp(lambda x: (x * w, None), lambda _, g: (g,))
        return f(w)

    return lib.grad(outer)(array(2.0))


@case
def closed_over_with_a_constant(lib, xp, array):
    def outer(w):
        f = lib.custom_vjp(lambda x: x * w)
        f.defvjp(lambda x: (x * w, None), lambda _, g: (g,))
        return f(array(3.0))

    return lib.grad(outer)(array(2.0))


@case
def closed_over_by_custom_jvp(lib, xp, array):
    def outer(w):
        f = lib.custom_jvp(lambda x: x * w)
        f.defjvp(lambda primals, tangents: (primals[0] * w, tangents[0]))
        return f(w)

    return lib.grad(outer)(array(2.0))


@case
def closed_over_from_an_outer_gradient(lib, xp, array):
    def outer(w, derive):
        f = lib.custom_vjp(lambda x: x * w)
        f.defvjp(lambda x: (x * w, w), lambda w, g: (g * w * w,))
        return derive(f)(array(3.0))

    inner = lib.grad, lambda f: lambda x: lib.value_and_grad(f)(x)[0]
    return [lib.grad(lambda w, derive=derive: outer(w, derive))(array(2.0)) for derive in inner]


def within_a_rule(transform):
    """A function with a rule that takes a derivative of another one with a rule."""

    def run(lib, xp, array):
        f = sine(lib, xp, True)

        def around(inner):
            outer = lib.custom_jvp(lambda x: x * inner(x))
            outer.defjvps(lambda t, out, x: 3 * t * inner(x) + 0 * out)
            return transform(lib, outer, array(0.7))

        return [around(lib.grad(f)), around(lambda x: lib.jvp(f, (x,), (x,))[1])]

    return run


CASES |= {f"within a rule: {name}": within_a_rule(f) for name, f in ON_SINES.items()}


WRONG = {
    "no tuple": lambda _, g: g,
    "too many": lambda _, g: (g, g),
    "another shape": lambda _, g: (g[None],),
    "another tree": lambda _, g: ({"a": g},),
    "a list": lambda _, g: [g],
}


def with_wrong_rule(bwd):
    def run(lib, xp, array):
        f = lib.custom_vjp(lambda x: x * 2)
        f.defvjp(lambda x: (x * 2, None), bwd)
        return lib.grad(f)(array(1.0))

    return run


CASES |= {f"wrong: {name}": with_wrong_rule(bwd) for name, bwd in WRONG.items()}


def text_of(result):
    """Numbers in a tree, as nested lists; trees as jax and we go through them are the same."""
    if isinstance(result, dict):
        return [text_of(result[key]) for key in sorted(result)]
    if isinstance(result, (tuple, list)):
        return [text_of(x) for x in result]
    return result.tolist()


def found(name, lib, xp, array, errors):
    try:
        return text_of(CASES[name](lib, xp, array))
    except errors:
        return "error"


if __name__ == "__main__":
    import jax

    jax.config.update("jax_enable_x64", True)
    errors = (TypeError, ValueError, jax.errors.UnexpectedTracerError)
    made = {name: found(name, jax, jax.numpy, jax.numpy.float64, errors) for name in CASES}
    GOLDENS.write_text(json.dumps({"jax": jax.__version__, "cases": made}, indent=1) + "\n")
