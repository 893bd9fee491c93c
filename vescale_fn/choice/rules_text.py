"""Specs as a few rules that a person can read: regular expressions of paths, for `spec_from_rules`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from .._core.sharding.spec import P

Rule = tuple[str, P]
_Parts = tuple[str, ...]


def rules_of(specs: Mapping[str, P]) -> list[Rule]:
    """The rules that give each path its spec, the more special ones first.

    Layers that lie alike are one rule, and so are leaves of one name that lie alike everywhere; whatever lies whole, and what
    most leaves of an odd kind do, is left to the last rule.

    Args:
        specs: by path, written with dots: ``blocks.0.attention.q``.

    >>> from vescale_fn import P
    >>> lie = {"q": P(None, "tp"), "out": P("tp"), "norm": P()}
    >>> specs = {f"blocks.{i}.{name}": spec for i in range(12) for name, spec in lie.items()} | {"embed": P("tp")}
    >>> rules_of(specs)
    [('q$', P(None, 'tp')), ('(out|embed)$', P('tp')), ('.*', P())]
    """
    if not specs:
        return []
    kinds: dict[_Parts, dict[str, P]] = {}
    for path, spec in specs.items():
        kinds.setdefault(kind_of(path), {})[path] = spec
    usual = {kind: Counter(found.values()).most_common(1)[0][0] for kind, found in kinds.items()}
    apart = {path: spec for kind, found in kinds.items() for path, spec in found.items() if spec != usual[kind]}
    rules = [*_exceptions(apart), *_of_kinds(usual)]
    return rules if given(rules, specs) == dict(specs) else _one_by_one(specs)


def given(rules: Sequence[Rule], paths: Iterable[str]) -> dict[str, P]:
    """What rules give each path that one of them matches, as `spec_from_rules` does."""
    found: dict[str, P] = {}
    for path in paths:
        spec = next((spec for pattern, spec in rules if re.search(pattern, path)), None)
        if spec is not None:
            found[path] = spec
    return found


def kind_of(path: str) -> _Parts:
    """A path without the numbers of layers."""
    return tuple("" if part.isdigit() else part for part in path.split("."))


def _of_kinds(usual: Mapping[_Parts, P]) -> list[Rule]:
    """Rules for kinds of paths, each by as few of its last names as tell it from those that lie otherwise."""
    last = P() if P() in usual.values() else None
    ends: dict[P, list[_Parts]] = {}
    for kind, spec in usual.items():
        if spec != last:
            end = next(kind[-k:] for k in range(1, len(kind) + 1) if _tells(kind[-k:], spec, usual) or k == len(kind))
            ends.setdefault(spec, []).append(end)
    rules = [
        (f"{pattern}$", spec)
        for spec, found in ends.items()
        for pattern in _joined(list(dict.fromkeys(found)), {kind: one for kind, one in usual.items() if one != spec})
    ]
    if last is None and len(rules) == 1:
        return [(".*", rules[0][1])]
    return rules if last is None else [*rules, (".*", last)]


def _tells(end: _Parts, spec: P, usual: Mapping[_Parts, P]) -> bool:
    """Whether all kinds of this end lie so."""
    return all(one == spec for kind, one in usual.items() if kind[-len(end) :] == end)


def _joined(ends: Sequence[_Parts], others: Mapping[_Parts, P]) -> list[str]:
    """Ends that differ in their last name alone, in one pattern each."""
    by_parent: dict[_Parts, list[str]] = {}
    for *parent, name in ends:
        by_parent.setdefault(tuple(parent), []).append(name)
    return [_pattern(parent, names, others) for parent, names in by_parent.items()]


def _pattern(parent: _Parts, names: Sequence[str], others: Mapping[_Parts, P]) -> str:
    """The pattern of some names below others; a name that is also the end of another's begins a word."""
    texts = [_text(name) for name in names]
    pattern = _text_of(parent) + (texts[0] if len(texts) == 1 else f"({'|'.join(texts)})")
    shown = [".".join(part or "0" for part in kind) for kind in others]
    ways = (pattern, rf"\b{pattern}")
    fits = (way for way in ways if not any(re.search(f"{way}$", path) for path in shown))
    return next(fits, rf"(^|\.){pattern}")


def _text(part: str) -> str:
    return re.escape(part) if part else r"\d+"


def _text_of(parent: _Parts) -> str:
    return "".join(f"{_text(part)}\\." for part in parent)


def _exceptions(apart: Mapping[str, P]) -> list[Rule]:
    """Rules for single paths, those that differ in one number together."""
    rows: dict[tuple[_Parts, int, P], list[str]] = {}
    for path, spec in apart.items():
        parts = path.split(".")
        at = next((i for i, part in enumerate(parts) if part.isdigit()), -1)
        key = tuple("\0" if i == at else part for i, part in enumerate(parts))
        rows.setdefault((key, at, spec), []).append(parts[at] if at >= 0 else "")
    rules: list[Rule] = []
    for (key, _, spec), numbers in rows.items():
        which = numbers[0] if len(numbers) == 1 else f"({'|'.join(numbers)})"
        path = r"\.".join(which if part == "\0" else re.escape(part) for part in key)
        rules.append((f"^{path}$", spec))
    return rules


def _one_by_one(specs: Mapping[str, P]) -> list[Rule]:
    return [(f"^{re.escape(path)}$", spec) for path, spec in specs.items()]
