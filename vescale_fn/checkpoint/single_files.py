"""Plain files as sources of leaves: of `torch.save`, and of safetensors, alone or several with an index."""

from __future__ import annotations

import contextlib
import importlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .._core.base.errors import CheckpointError
from .._core.base.messages import report
from . import tensor_streams
from .chunks import Piece
from .names import named
from .paths import Mark, failing
from .sources import Entry, Source
from .validation import leads_out

ALONE = "model.safetensors"  # the names that Hugging Face's libraries look for
INDEX = f"{ALONE}.index.json"
SHARD = re.compile(r"(model-(?:\w+-)?)(\d{5})-of-(\d{5})\.safetensors")
VALUES = "vescale_fn"  # in the header of a safetensors file: the leaves that are no tensors, as JSON


def safetensors(where: str) -> Any:
    """The library of that name, or an error that says how to get it."""
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError:
        raise CheckpointError(
            report(
                where, "files of safetensors need the library of that name", fix="pip install vescale_fn[safetensors]"
            )
        ) from None


def opened(path: Path, where: str) -> Source | None:
    """The plain file or folder of them that lies there; None for anything else."""
    if path.is_dir():
        if (path / INDEX).is_file():
            return _Safetensors(path, where, *_indexed(path / INDEX, where))
        files = _without_index(path, where)
        return _Safetensors(path, where, files, None) if files else None
    if not path.is_file():
        return None
    if path.suffix == ".safetensors":
        return _Safetensors(path.parent, where, [path.name], None, path)
    if path.name.endswith(".safetensors.index.json"):
        return _Safetensors(path.parent, where, *_indexed(path, where), path)
    return _TorchFile(path, where)


def _without_index(folder: Path, where: str) -> list[str]:
    """The files of a folder without an index. Beside a `model.safetensors`, numbered ones are an unfinished set."""
    files = sorted(each.name for each in folder.glob("*.safetensors") if not each.name.startswith("."))
    numbered = [found for name in files if (found := SHARD.fullmatch(name))]
    if ALONE in files:
        return [name for name in files if not SHARD.fullmatch(name)]
    wanted = {
        f"{each[1]}{i:05}-of-{each[3]}.safetensors": None for each in numbered for i in range(1, int(each[3]) + 1)
    }
    if missing := [f"{name} is missing" for name in wanted if name not in files]:
        raise CheckpointError(report(where, f"{folder} is damaged", missing[:8], "another checkpoint"))
    return files


def _indexed(path: Path, where: str) -> tuple[list[str], dict[str, str]]:
    with failing(where, path):
        text = path.read_bytes()
    try:
        files = json.loads(text)["weight_map"]
        names = sorted(set(files.values()))
        if not all(isinstance(name, str) for name in (*files, *names)):
            raise TypeError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        what = f"{path} is damaged, or no index of safetensors: it has no weight_map"
        raise CheckpointError(report(where, what)) from None
    return names, files


class _TorchFile:
    """A file of `torch.save` that holds a tree of tensors; read as far as it is needed."""

    shape, stamp = None, ""
    fingerprint: Mapping[str, Any] | None = None

    def __init__(self, path: Path, where: str) -> None:
        self.path, self.mark = path, Mark(path)
        with failing(where, path):
            path.open("rb").close()
        try:
            tree = _torch_file(path)
            self._leaves = {leaf.name: leaf.value for leaf in named(tree, where, "tree")[0]}
        except CheckpointError:
            raise
        except Exception as error:
            what = (str(error) or type(error).__name__).splitlines()[0]
            what = "its containers are nested too deeply" if isinstance(error, RecursionError) else what
            raise CheckpointError(report(where, f"{path} is damaged, or no file of torch.save", [what])) from error
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
    """What is in such a file; any exception where it is none, or would take far more memory than it is long."""
    size = path.stat().st_size
    most = tensor_streams.check_zip(path, size)
    try:
        tree = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise
        tree = torch.load(path, map_location="cpu", weights_only=True)  # of the days before zip files
    _check_extent(tree, size, most)
    return tree


_EXPANDED = 2**30  # bytes: as large a tensor may become that is stored as a view of fewer numbers


def _check_extent(tree: Any, size: int, pickled: int) -> None:
    """Raise a ValueError for a tree that is far larger than a file of this size, and a pickle of that, can say: where
    containers hold themselves or are there many times, or tensors are views of a few numbers."""
    todo, count, storages = [tree], 0, dict[int, int]()
    while todo:
        x = todo.pop()
        count += 1
        if count > 10 * pickled + 100:
            raise ValueError("its containers hold themselves, or the same ones over and over")
        if isinstance(x, torch.Tensor):
            storage = x.untyped_storage()
            storages[storage.data_ptr()] = max(storages.get(storage.data_ptr(), 0), storage.nbytes())
            if x.nbytes > max(storage.nbytes(), _EXPANDED):
                raise ValueError(f"a tensor of {x.nbytes} bytes is stored in {storage.nbytes()}")
        elif isinstance(x, Mapping):
            todo += x.values()
        elif isinstance(x, (list, tuple)):
            todo += x
    if sum(storages.values()) > size:
        raise ValueError(f"its tensors have {sum(storages.values())} bytes, and the file {size}")


class _Safetensors:
    """Files of safetensors, of which slices are read."""

    shape, stamp = None, ""
    fingerprint: Mapping[str, Any] | None = None

    def __init__(
        self, folder: Path, where: str, files: Sequence[str], index: Mapping[str, str] | None, path: Path | None = None
    ) -> None:
        self.path, self._folder, self._where = path or folder, folder, where
        self.mark = Mark(folder / (INDEX if index else files[0]) if path is None else path)
        self._files, self._values, entries = dict[str, str](), dict[str, Any](), dict[str, Entry]()
        failures = [outside for name in files if name != (path and path.name) and (outside := leads_out(folder, name))]
        failures += [f"{name} is missing" for name in files if not failures and not (folder / name).is_file()]
        for name in files if not failures else ():
            entries |= self._read(name, index, failures)
        failures += [f"{leaf} is a tensor and a value" for leaf in self._values if leaf in self._files]
        failures += [
            f"{leaf} is not in {name}, where the index says it is"
            for leaf, name in (index or {}).items()
            if not failures and leaf not in self._files
        ]
        if failures:
            raise CheckpointError(report(where, f"{self.path} is damaged", failures, "another checkpoint"))
        self.entries = entries | {leaf: Entry(type(value).__name__, None, None) for leaf, value in self._values.items()}

    def _read(self, name: str, index: Mapping[str, str] | None, failures: list[str]) -> dict[str, Entry]:
        """The tensors that a file holds, or of them those that the index has there; its values are noted."""
        entries = dict[str, Entry]()
        with self._open(name) as file:
            for leaf in list(file.keys()):
                if index is not None and index.get(leaf) != name:
                    continue
                if leaf in self._files:
                    failures.append(f"{leaf} is in {self._files[leaf]} and in {name}")
                at = file.get_slice(leaf)
                dtype, self._files[leaf] = _dtype(at.get_dtype()), name
                if dtype is None:
                    failures.append(f"{leaf} has the dtype {at.get_dtype()}, which torch has not")
                entries[leaf] = Entry(None, tuple(at.get_shape()), dtype)
            self._values |= _values(file.metadata() or {}, failures)
        return entries

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
            raise CheckpointError(
                report(self._where, f"{self._folder / name} is damaged, or no file of safetensors", [str(error)])
            ) from error


def _slices(part: Piece) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(part.offsets, part.sizes, strict=True))


_LETTERS = {"F": "float", "BF": "bfloat", "I": "int", "U": "uint", "C": "complex"}


def _dtype(name: str) -> torch.dtype | None:
    """The dtype that safetensors calls so: F32, BF16, BOOL, F8_E4M3; None for one that torch has not."""
    word = name.rstrip("0123456789")
    said = "bool" if name == "BOOL" else f"{_LETTERS.get(word)}{name[len(word) :]}"
    if name.startswith("F8_"):
        said = f"float8_{name.removeprefix('F8_').lower().replace('e4m3', 'e4m3fn').replace('m0', 'm0fnu')}"
    found = getattr(torch, said, None)
    return found if isinstance(found, torch.dtype) else None


def _values(header: Mapping[str, str], failures: list[str]) -> dict[str, Any]:
    """The leaves that are no tensors, out of the header of a file."""
    try:
        found = json.loads(header.get(VALUES, "{}"))
        if isinstance(found, dict) and all(type(x) in (int, float, bool, str, type(None)) for x in found.values()):
            return found
    except (ValueError, RecursionError):
        pass
    failures.append(f"its header has {VALUES}, and in it no plain values")
    return {}
