"""debug: what ranks do is compared before it can hang or diverge."""

from __future__ import annotations

import contextlib

from .._core.base import context
from .._core.base.front_door import no_attributes, public
from .._core.base.messages import report
from .._core.base.source_lines import quoted, user_line, warn
from .._core.distributed import divergence
from .._core.shard_map import interrupts


@public("debug")
def debug(*, timeout: float | None = None) -> contextlib.AbstractContextManager[None]:
    """Inside this ``with`` block, mistakes that cost time to find are looked for; it must be entered on every rank.

    - A random key that is used twice: a draw and a `split` use a key up. `fold_in` may be called on one key again and
      again, but not beside a draw or a split of it, whose numbers it would repeat. A key that is made twice counts as
      one. Tracers are not looked into.
    - Ranks that part ways: each collective and each `shard_map` call, forward and backward, is compared across its ranks
      (function, line, shapes, dtypes, specs, parameters) before it runs. Ranks that differ, and ranks that wait for one
      that left, died or never comes, get an error that names what each of them does, instead of a hang.
    - Plain tensors that count as the same on every rank and are not: in `shard`, `with_sharding`, `shard_map`, ops that
      they share with arrays, and the blocks that `from_local` is given along axes that its spec does not name.
    - Numbers and keys that differ by rank where one counts as the same on all of them: of ops on arrays, draws on a mesh and
      optimisers; in a `shard_map` body, with the tensors that it closes over or makes; results that a body gives as the same
      along an axis. They are noted where they are used and compared when ranks next meet, or at the end of the block.

    Ranks tell each other through the process group's store, so this works with any backend, and it is slow: every
    collective becomes a meeting of its ranks, and plain tensors are read. Collectives that `torch.distributed` is
    called for directly are not seen. On a simulated mesh there is one process, and nothing to compare.

    Args:
        timeout: how many seconds a rank waits for the others; by default a little less than a collective of the
            process group may take.

    Raises:
        RandomError: where a key is used again; it names the lines of both uses.
        DivergenceError: where ranks part ways, on every one of them, in the same words.

    Source: the ideas of `jax.experimental.key_reuse`, and of torch's ``TORCH_DISTRIBUTED_DEBUG=DETAIL``.

    >>> import vescale_fn as vfn
    >>> key = vfn.random.key(0)
    >>> with vfn.debug():
    ...     x = vfn.random.normal(key, (2,))
    ...     try:
    ...         y = vfn.random.uniform(key, (2,))
    ...     except vfn.errors.RandomError as error:
    ...         print(str(error).splitlines()[0])
    random.uniform: the key [0, 0] was used before, so the numbers are not new ones
    """
    return _Debug(timeout)


class _Debug(contextlib.ExitStack):  # which goes on leaving, where an interrupt comes while one of its contexts is left
    _entered = True

    def __init__(self, timeout: float | None) -> None:
        super().__init__()
        self._timeout, self._line = timeout, user_line()
        self._entered = False

    def __enter__(self) -> None:  # type: ignore[override]
        self._entered, saved = True, interrupts.before()
        try:
            self.callback(interrupts.undo, saved)
            self.enter_context(context.debugging())
            self.enter_context(divergence.Watch(self._timeout))
        except BaseException:
            interrupts.undo(saved)
            raise

    def __del__(self) -> None:
        if not self._entered:
            warn(
                report(
                    "debug",
                    f"the debug mode made at {quoted(self._line)} was never entered, so it did nothing",
                    fix="with vfn.debug(): around what is to be looked at",
                )
            )


no_attributes("debug", debug)
