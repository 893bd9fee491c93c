"""Plain files as sources of leaves: of `torch.save`, and of safetensors, alone or several with an index."""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError, report
from .folders import Mark, failing
from .names import named
from .pieces import Piece
from .sources import Entry, Source

INDEX = "model.safetensors.index.json"  # the name that Hugging Face's libraries look for
VALUES = "vescale_fn"  # in the header of a safetensors file: the leaves that are no tensors, as JSON


def safetensors(where: str) -> Any:
    """The library of that name, or an error that says how to get it."""
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError:
        raise CheckpointError(report(where, "files of safetensors need the library of that name",
                                     fix="pip install vescale_fn[safetensors]")) from None  # fmt: skip


def opened(path: Path, where: str) -> Source | None:
    """The plain file or folder of them that lies there; None for anything else."""
    if path.is_dir():
        if (path / INDEX).is_file():
            return _Safetensors(path, where, *_indexed(path / INDEX, where))
        files = sorted(each.name for each in path.glob("*.safetensors"))
        return _Safetensors(path, where, files, None) if files else None
    if not path.is_file():
        return None
    if path.suffix == ".safetensors":
        return _Safetensors(path.parent, where, [path.name], None, path)
    if path.name.endswith(".safetensors.index.json"):
        return _Safetensors(path.parent, where, *_indexed(path, where), path)
    return _TorchFile(path, where)


def _indexed(path: Path, where: str) -> tuple[list[str], dict[str, str]]:
    with failing(where, path):
        text = path.read_bytes()
    try:
        files = json.loads(text)["weight_map"]
        return sorted(set(files.values())), files
    except (ValueError, KeyError, TypeError, AttributeError):
        what = f"{path} is damaged, or no index of safetensors: it has no weight_map"
        raise CheckpointError(report(where, what)) from None


class _TorchFile:
    """A file of `torch.save` that holds a tree of tensors; read as far as it is needed."""

    shape, stamp = None, ""

    def __init__(self, path: Path, where: str) -> None:
        self.path, self.mark = path, Mark(path)
        with failing(where, path):
            path.open("rb").close()
        try:
            tree = _torch_file(path)
        except Exception as error:
            what = (str(error) or type(error).__name__).splitlines()[0]
            raise CheckpointError(report(where, f"{path} is damaged, or no file of torch.save", [what])) from error
        self._leaves = {leaf.name: leaf.value for leaf in named(tree, where, "tree")[0]}
        self.entries = {
            name: Entry(None, tuple(x.shape), x.dtype)
            if isinstance(x, torch.Tensor)
            else Entry(type(x).__name__, None, None)
            for name, x in self._leaves.items()
        }

    def values(self, names: Sequence[str]) -> dict[str, Any]:
        return {name: self._leaves[name] for name in names}

    def fill(self, wanted: Mapping[str, Sequence[Piece]]) -> None:
        for name, parts in wanted.items():
            for part in parts:
                part.tensor.copy_(self._leaves[name].detach()[_slices(part)])


def _torch_file(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise
        return torch.load(path, map_location="cpu", weights_only=True)  # of the days before zip files


class _Safetensors:
    """Files of safetensors, of which slices are read."""

    shape, stamp = None, ""

    def __init__(self, folder: Path, where: str, files: Sequence[str], index: Mapping[str, str] | None,
                 path: Path | None = None) -> None:  # fmt: skip
        self.path, self._folder, self._where = path or folder, folder, where
        self.mark = Mark(folder / (INDEX if index else files[0]) if path is None else path)
        self._files, self._values, entries = dict[str, str](), dict[str, Any](), dict[str, Entry]()
        failures = [f"{name} is missing" for name in files if not (folder / name).is_file()]
        for name in files if not failures else ():
            with self._open(name) as file:
                for leaf in list(file.keys()):
                    if index is None or index.get(leaf) == name:
                        at = file.get_slice(leaf)
                        entries[leaf], self._files[leaf] = (
                            Entry(None, tuple(at.get_shape()), _dtype(at.get_dtype())),
                            name,
                        )
                self._values |= json.loads((file.metadata() or {}).get(VALUES, "{}"))
        failures += [f"{leaf} is not in {name}, where the index says it is"
                     for leaf, name in (index or {}).items() if not failures and leaf not in self._files]  # fmt: skip
        if failures:
            raise CheckpointError(report(where, f"{self.path} is damaged", failures, "another checkpoint"))
        self.entries = entries | {leaf: Entry(type(value).__name__, None, None) for leaf, value in self._values.items()}

    def values(self, names: Sequence[str]) -> dict[str, Any]:
        return {name: self._values[name] for name in names}

    def fill(self, wanted: Mapping[str, Sequence[Piece]]) -> None:
        for name in sorted({self._files[leaf] for leaf in wanted}):
            with self._open(name) as file:
                for leaf, parts in wanted.items():
                    if self._files[leaf] == name:
                        at = file.get_slice(leaf)
                        for part in parts:
                            data = at[_slices(part)] if part.offsets else file.get_tensor(leaf)
                            part.tensor.copy_(data)

    @contextlib.contextmanager
    def _open(self, name: str) -> Iterator[Any]:
        library = safetensors(self._where)
        try:
            with library.safe_open(str(self._folder / name), "pt") as file:
                yield file
        except OSError:
            with failing(self._where, self._folder / name):
                raise
        except Exception as error:
            if type(error).__name__ != "SafetensorError":
                raise
            raise CheckpointError(report(self._where, f"{self._folder / name} is damaged, or no file of safetensors",
                                         [str(error)])) from error  # fmt: skip


def _slices(part: Piece) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(part.offsets, part.sizes, strict=True))


_LETTERS = {"F": "float", "BF": "bfloat", "I": "int", "U": "uint", "C": "complex"}


def _dtype(name: str) -> torch.dtype:
    """The dtype that safetensors calls so: F32, BF16, BOOL, F8_E4M3."""
    if name.startswith("F8_"):
        return getattr(torch, f"float8_{name.removeprefix('F8_').lower().replace('e4m3', 'e4m3fn')}")
    word = name.rstrip("0123456789")
    return torch.bool if name == "BOOL" else getattr(torch, f"{_LETTERS[word]}{name[len(word) :]}")
