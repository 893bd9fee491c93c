"""Checkpoints that lie: every field of what they say of themselves is changed, and files are made to do harm. A load gives
the right value or says what is wrong, and takes no memory for what is not there."""

import copy
import json
import pickle
import resource
import warnings
import zipfile
import zlib
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from test_checkpoint import WHOLE, on, same, text_of
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn.errors import CheckpointError


@pytest.fixture(autouse=True)
def _little_memory():
    """128 MiB more than there is now: whatever takes more raises, and is seen by its words."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + 2**27, before[1]))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(disabled, unavailable or uninitialized|TypedStorage).*")
        yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def expected():
    return {"v": WHOLE.double(), "w": WHOLE, "key": vfn.random.key(3), "step": 3, "empty": torch.zeros(0, 2)}


def loaded_or_refused(path, like=None):
    """Whether it is loaded; then each value that is there is right."""
    try:
        got = vfn.load(path, like)
    except CheckpointError as error:
        assert not any(word in str(error) for word in ("MemoryError", "allocate", "stopped with")), error
        return False
    for name, value in expected().items():
        if name == "key":
            assert getattr(got[name], "data", got[name]).tolist() == [0, 3]
        elif name == "step":
            assert got[name] == 3
        else:
            same(torch.as_tensor(got[name]), value)
    return True


# --- our own manifest, with all checksums made to fit -----------------------------------------------------------------


@pytest.fixture
def ours(tmp_path):
    mesh = on("2x3")
    tree = expected()
    vfn.save(tmp_path / "c", tree | {"w": vfn.shard(tree["w"], mesh, P("a", "b"))})
    return tmp_path / "c"


def sealed(folder, there, tree):
    """Write the manifest with checksums that fit."""
    lines = [json.dumps(there).encode(), json.dumps(tree).encode()]
    first = json.dumps({"format": 2, "crc32": [zlib.crc32(line) for line in lines]}).encode()
    (folder / "vescale_fn.json").write_bytes(b"\n".join([first, *lines]))


def places(x, at=()):
    """The path of everything in a value of JSON."""
    yield at
    for key, inner in x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else ():
        yield from places(inner, (*at, key))


def changed(x, at, value):
    """A copy of `x` with another value at a path; with `...` without it."""
    out = copy.deepcopy(x)
    inner = out
    for key in at[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[at[-1]]
    else:
        inner[at[-1]] = value
    return out


def at_path(x, at):
    for key in at:
        x = x[key]
    return x


FREE = ("torch", "metadata", "fingerprint")  # what loading does not go by, or a checksum stands for


def test_every_field_of_the_manifest(ours):
    _, there, tree = (json.loads(line) for line in (ours / "vescale_fn.json").read_bytes().split(b"\n"))
    others = [
        0,
        7,
        -1,
        2**31,
        2**62,
        10**30,
        1.5,
        True,
        None,
        "",
        "f",
        "float64",
        "__1_0.distcp",
        "../x",
        "key a",
        [],
        {},
        [0] * 9,
        ["w"],
        ...,
    ]
    refused = loaded = 0
    for index, line in enumerate((there, tree)):
        for number, at in enumerate(places(line)):
            now = at_path(line, at)
            more = [now + 1, now - 1, 2 * now] if type(now) is int else []
            # a key of the user's
            if at and at[0] not in FREE and not (at[0] == "shape" and at[-1] == 0):
                for value in more + others[number % 3 :: 3]:
                    new = changed(line, at, value)
                    sealed(ours, *((new, tree) if index == 0 else (there, new)))
                    fine = loaded_or_refused(ours)
                    refused, loaded = refused + (not fine), loaded + fine
    assert refused > 800
    assert loaded < refused / 20  # a kind that is not said, a value that is the same
    sealed(ours, there, tree)
    assert loaded_or_refused(ours)


def test_manifests_that_are_no_manifest(ours):
    for text in (
        b"",
        b"[]",
        b"{}",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"format": 2, "crc32": [1, 2]}\n{}\n{}',
        b"1e999",
    ):
        (ours / "vescale_fn.json").write_bytes(text)
        assert "vescale_fn.json is damaged" in text_of(vfn.load, ours)
    deep = '{"files": {}, "metadata": ' + "[" * 50_000 + "]" * 50_000 + "}"
    lines = [deep.encode()] * 2
    first = json.dumps({"format": 2, "crc32": [zlib.crc32(line) for line in lines]}).encode()
    (ours / "vescale_fn.json").write_bytes(b"\n".join([first, *lines]))
    assert "vescale_fn.json is damaged" in text_of(vfn.load, ours)


def test_a_dtype_of_the_same_width(ours):
    """Whose numbers would be read as others."""
    _, there, tree = (json.loads(line) for line in (ours / "vescale_fn.json").read_bytes().split(b"\n"))
    index = next(i for i, leaf in enumerate(tree["leaves"]) if leaf[0] == "v")
    sealed(ours, there, changed(tree, ("leaves", index, 2), "int64"))
    chunk = tree["leaves"][index][4][0]
    assert text_of(vfn.load, ours) == (
        f"load: {ours} is damaged\n"
        f"  * v: in __0_0.distcp, bytes {chunk[3]} to {chunk[3] + chunk[4]}, f64[7, 9] is stored, and no i64[7, 9]\n"
        "  Instead: another checkpoint"
    )


# --- metadata of torch.distributed.checkpoint, which has no checksums -------------------------------------------------


@pytest.fixture
def theirs(tmp_path):
    tree = expected()
    dcp.save(tree | {"key": tree["key"].data}, checkpoint_id=tmp_path / "d")
    return tmp_path / "d"


def rewritten(folder, change):
    """Change what the metadata says; what it was is given back."""
    before = (folder / ".metadata").read_bytes()
    metadata = pickle.loads(before)
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return before


def test_every_field_of_the_metadata(theirs):
    sizes = [(7, 9), (9, 7), (8, 9), (7,), (), (0, 9), (2**40, 2**22), (2**62, 4), (6, 9), (63,), (7, 9, 1)]
    changes = []
    for name in "w", "v":
        entry = lambda m, name=name: m.state_dict_metadata[name]
        place = lambda m, name=name: m.storage_data[MetadataIndex(name, [0, 0])]
        for value in sizes:
            changes += [
                lambda m, e=entry, v=value: setattr(e(m), "size", torch.Size(v)),
                lambda m, e=entry, v=value: setattr(e(m).chunks[0], "sizes", torch.Size(v)),
                lambda m, e=entry, v=value: setattr(e(m).chunks[0], "offsets", torch.Size(v)),
                lambda m, e=entry, v=value: e(m).chunks.append(ChunkStorageMetadata(torch.Size((0, 0)), torch.Size(v))),
                lambda m, e=entry, v=value: (
                    setattr(e(m), "size", torch.Size(v)),
                    setattr(e(m).chunks[0], "sizes", torch.Size(v)),
                ),
            ]
        for value in None, 3, "f32", [7, 9], torch.float64, torch.int32, torch.int64, torch.bfloat16, torch.strided:
            changes += [
                lambda m, e=entry, v=value: setattr(e(m).properties, "dtype", v),
                lambda m, e=entry, v=value: setattr(e(m), "chunks", v),
                lambda m, n=name, v=value: m.state_dict_metadata.__setitem__(n, v),
                lambda m, n=name, v=value: m.storage_data.__setitem__(MetadataIndex(n, [0, 0]), v),
            ]
        for field, values in {
            "offset": (0, 1, -1, 2**40, 2**70, None, "0", 1.0, 300),
            "length": (0, 1, -1, 2**40, None, 10**30),
            "relative_path": ("", "x", "..", "../d/__0_0.distcp", "/etc/passwd", None, 3, "a\0b", "."),
            "transform_descriptors": (["zstd"], "zstd"),
        }.items():
            changes += [lambda m, p=place, f=field, v=value: setattr(p(m), f, v) for value in values]
        changes += [
            lambda m, e=entry: e(m).chunks.clear(),
            lambda m, e=entry: e(m).chunks.append(e(m).chunks[0]),
            lambda m, n=name: m.storage_data.pop(MetadataIndex(n, [0, 0])),
            lambda m, n=name: m.state_dict_metadata.__setitem__(n, m.state_dict_metadata["step"]),
            lambda m, n=name: m.state_dict_metadata.__setitem__(3, m.state_dict_metadata[n]),
        ]
    for field in "state_dict_metadata", "storage_data":
        changes += [lambda m, f=field, v=value: setattr(m, f, v) for value in (None, {}, [], 3)]
    whole = (theirs / ".metadata").read_bytes()
    loaded = 0
    for change in changes:
        rewritten(theirs, change)
        loaded += loaded_or_refused(theirs, expected() | {"key": expected()["key"].data})
        (theirs / ".metadata").write_bytes(whole)
    assert loaded == 7  # size and piece as they were, dtype as it was, a field that is not used, an empty piece more
    for cut in range(0, len(whole), 37):
        (theirs / ".metadata").write_bytes(whole[:cut])
        assert f"{theirs}/.metadata is damaged" in text_of(vfn.load, theirs)
    (theirs / ".metadata").write_bytes(whole)
    assert loaded_or_refused(theirs)


def test_what_is_not_covered_overlaps_or_is_of_another_dtype_is_said(theirs):
    def refused(change, said):
        before = rewritten(theirs, change)
        assert text_of(vfn.load, theirs) == f"load: {theirs} is damaged\n  * {said}\n  Instead: another checkpoint"
        (theirs / ".metadata").write_bytes(before)

    def uncovered(m):
        m.state_dict_metadata["w"].size = torch.Size((8, 9))

    def overlapping(m):
        w = m.state_dict_metadata["w"]
        w.size = torch.Size((7, 12))
        w.chunks.append(ChunkStorageMetadata(torch.Size((0, 8)), torch.Size((7, 3))))
        m.storage_data[MetadataIndex("w", [0, 8])] = m.storage_data[MetadataIndex("w", [0, 0])]

    def retyped(m):
        m.state_dict_metadata["w"].properties.dtype = torch.int32

    def outside(m):
        m.storage_data[MetadataIndex("w", [0, 0])].relative_path = "../../etc/passwd"

    def twice(m):
        m.storage_data[MetadataIndex("v", [0, 0])] = m.storage_data[MetadataIndex("w", [0, 0])]
        m.state_dict_metadata["v"].properties.dtype = torch.float32

    metadata = pickle.loads((theirs / ".metadata").read_bytes())
    at = metadata.storage_data[MetadataIndex("w", [0, 0])]
    refused(uncovered, "w: its pieces have 63 elements of 72")
    refused(overlapping, "w: the piece at (0, 0) of sizes (7, 9) and the piece at (0, 8) of sizes (7, 3) overlap")
    refused(
        retyped,
        f"w: in __0_0.distcp, bytes {at.offset} to {at.offset + at.length}, f32[7, 9] is stored, and no i32[7, 9]",
    )
    refused(outside, "../../etc/passwd leads out of the folder")
    refused(twice, "v and w share bytes of __0_0.distcp")


def test_pickles_that_do_more_than_say_something(theirs):
    class Calls:
        def __init__(self, *call):
            self.call = call

        def __reduce__(self):
            return self.call

    def built(target, state):  # a class, and attributes that it would get
        out = pickle.dumps(target, 2)[:-1]
        return out + pickle.dumps((None, state), 2)[2:-1] + b"b."

    before = set(vars(dcp.Metadata))
    harmful = {
        "a function": pickle.dumps(Calls(print, ("harm",))),
        "memory by number": b"\x80\x05\x96" + (2**40).to_bytes(8, "little") + b".",
        "a place in the memo": b"\x80\x02Nr\xff\xff\xff\x7f.",
        "a class that is changed": built(dcp.Metadata, {"planted": 1}),
        "nothing": b"",
        "another object": pickle.dumps({"w": 1}),
    }
    for data in harmful.values():
        (theirs / ".metadata").write_bytes(data)
        said = text_of(vfn.load, theirs)
        assert said.startswith(
            f"load: {theirs}/.metadata is damaged, or no metadata of torch.distributed.checkpoint\n"
        ), said
        assert "MemoryError" not in said
    assert set(vars(dcp.Metadata)) == before


def test_links_that_lead_out(ours, tmp_path):
    data = ours / "__0_0.distcp"
    (tmp_path / "elsewhere").mkdir()
    data.rename(tmp_path / "elsewhere" / "x")
    data.symlink_to(tmp_path / "elsewhere" / "x")
    assert text_of(vfn.load, ours) == (
        f"load: {ours} is damaged\n"
        f"  * __0_0.distcp leads out of the folder, to {tmp_path}/elsewhere/x\n"
        "  Instead: another checkpoint"
    )
    data.unlink()
    (tmp_path / "elsewhere" / "x").rename(ours / "x")
    data.symlink_to("x")  # within
    assert loaded_or_refused(ours)


def test_files_cut_off_at_any_place(ours, theirs):
    for folder in ours, theirs:
        for file in folder.iterdir():
            whole = file.read_bytes()
            for cut in range(0, len(whole) - 1, len(whole) // 7):
                file.write_bytes(whole[:cut])
                assert not loaded_or_refused(folder)
            file.write_bytes(whole)
        assert loaded_or_refused(folder)


# --- plain files ------------------------------------------------------------------------------------------------------


def zipped(path, pickled, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression, compresslevel=1) as archive:
        for name, parts in {"data.pkl": pickled, "version": [b"3\n"], "byteorder": [b"little"]}.items():
            with archive.open(f"archive/{name}", "w") as file:
                for part in parts:
                    file.write(part)


def test_zip_bombs(tmp_path, ours):
    parts = [b"\x80\x02", *[b"N0" * 2**20] * 80, b"N."]  # 160 MiB that say nothing
    zipped(tmp_path / "x.pt", parts, zipfile.ZIP_DEFLATED)
    size, whole = (tmp_path / "x.pt").stat().st_size, sum(map(len, parts)) + 8
    assert size < 10**6
    assert text_of(vfn.load, tmp_path / "x.pt") == (
        f"load: {tmp_path}/x.pt is damaged, or no file of torch.save\n"
        f"  * it holds {whole} bytes in {size}: it is compressed, as torch.save never does it"
    )
    _, there, tree = (json.loads(line) for line in (ours / "vescale_fn.json").read_bytes().split(b"\n"))
    data = (tmp_path / "x.pt").read_bytes()  # as a value of a checkpoint
    (ours / "__9_0.distcp").write_bytes(data)
    index = next(i for i, leaf in enumerate(tree["leaves"]) if leaf[0] == "step")
    place = [[], [], "__9_0.distcp", 0, len(data), zlib.crc32(data)]
    there["files"]["__9_0.distcp"] = len(data)
    sealed(ours, there, changed(tree, ("leaves", index, 4), [place]))
    assert f"bytes 0 to {len(data)}, it holds {whole} bytes in {size}" in text_of(vfn.load, ours)


def test_pickles_that_take_memory(tmp_path):
    class Calls:
        def __init__(self, *call):
            self.call = call

        def __reduce__(self):
            return self.call

    def refused(name, said):
        assert text_of(vfn.load, tmp_path / name) == (
            f"load: {tmp_path}/{name} is damaged, or no file of torch.save\n  * {said}"
        )

    zipped(tmp_path / "array.pt", [pickle.dumps(Calls(bytearray, (2**40,)), 2)])
    refused("array.pt", "it makes a bytearray, of any size, which no tensor and no plain value needs")
    laughs = [WHOLE]
    for _ in range(40):
        laughs = [laughs, laughs]
    torch.save(laughs, tmp_path / "laughs.pt")
    refused("laughs.pt", "its containers hold themselves, or the same ones over and over")
    itself = {}
    itself["itself"] = itself
    torch.save(itself, tmp_path / "itself.pt")
    refused("itself.pt", "its containers hold themselves, or the same ones over and over")
    torch.save({"x": torch.ones(1).expand(2**34)}, tmp_path / "expanded.pt")
    refused("expanded.pt", f"a tensor of {2**36} bytes is stored in 4")
    torch.save({"x": torch.ones(1).expand(1000, 10)}, tmp_path / "fine.pt")
    same(vfn.load(tmp_path / "fine.pt")["x"], torch.ones(1000, 10))
    zipped(tmp_path / "deep.pt", [b"\x80\x02", b"]" * 50_000, b"a" * 49_999, b"."])
    refused("deep.pt", "its containers are nested too deeply")
    torch.save({"x": WHOLE, "y": OrderedDict(z=(1, [WHOLE[0]]))}, tmp_path / "nested.pt")
    same(vfn.load(tmp_path / "nested.pt")["y.z.1.0"], WHOLE[0])


def test_an_index_that_leads_out(tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    save_file({"w": WHOLE}, tmp_path / "secret.safetensors")
    save_file({"w": WHOLE}, folder / "fine.safetensors")
    index = folder / "model.safetensors.index.json"

    def says(name):
        index.write_text(json.dumps({"weight_map": {"w": name}}))
        return [text_of(vfn.load, path) for path in (folder, index)]

    for name in "../secret.safetensors", f"{tmp_path}/secret.safetensors", "a/../../secret.safetensors":
        assert says(name) == [
            f"load: {path} is damaged\n  * {name} leads out of the folder\n  Instead: another checkpoint"
            for path in (folder, index)
        ]
    (folder / "link.safetensors").symlink_to(tmp_path / "secret.safetensors")
    assert f"link.safetensors leads out of the folder, to {tmp_path}/secret.safetensors" in says("link.safetensors")[0]
    index.unlink()
    assert "link.safetensors leads out of the folder" in text_of(vfn.load, folder)
    same(vfn.load(folder / "link.safetensors")["w"], WHOLE)  # the user's own word
    for files in {"w": 3}, {"w": ["a"]}, {"w": None}, []:
        index.write_text(json.dumps({"weight_map": files}))
        assert "no index of safetensors: it has no weight_map" in text_of(vfn.load, folder)


def test_the_cache_of_hugging_face(tmp_path):
    """Its snapshots are folders of links into a folder beside them."""
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    (tmp_path / "models--a--b" / "blobs").mkdir(parents=True)
    (snapshot / "part").mkdir(parents=True)
    save_file({"w": WHOLE}, tmp_path / "models--a--b" / "blobs" / "cafe")
    (snapshot / "model.safetensors").symlink_to("../../blobs/cafe")
    (snapshot / "part" / "model.safetensors").symlink_to("../../../blobs/cafe")
    same(vfn.load(snapshot)["w"], WHOLE)
    same(vfn.load(snapshot / "part")["w"], WHOLE)
    same(vfn.load(snapshot / "model.safetensors")["w"], WHOLE)


def test_headers_of_safetensors(tmp_path):
    def written(header, data=bytes(8)):
        text = json.dumps(header).encode()
        (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
        return text_of(vfn.load, tmp_path / "x.safetensors")

    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    assert "is damaged, or no file of safetensors" in written({"w": entry | {"shape": [2**40]}})
    assert "is damaged, or no file of safetensors" in written({"w": entry | {"data_offsets": [0, 2**40]}})
    assert "is damaged, or no file of safetensors" in written({"w": entry, "v": entry})
    assert "w has the dtype F4, which torch has not" in written({"w": entry | {"dtype": "F4", "shape": [16]}})
    for values in "[]", "3", "{", '{"x": []}', "[" * 100_000:
        said = written({"w": entry, "__metadata__": {"vescale_fn": values}})
        assert "its header has vescale_fn, and in it no plain values" in said
    assert "w is a tensor and a value" in written({"w": entry, "__metadata__": {"vescale_fn": '{"w": 1}'}})
    save_file({"w": WHOLE}, tmp_path / "y.safetensors")
    (tmp_path / "x.safetensors").unlink()
    save_file({"w": WHOLE + 1}, tmp_path / "z.safetensors")
    assert "w is in y.safetensors and in z.safetensors" in text_of(vfn.load, tmp_path)
