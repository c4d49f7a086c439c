"""The GGUF reader on good files: against the `gguf` package's own reader, and by hand where that cannot judge."""

from __future__ import annotations

import gc
import os
import random
import resource
import struct
import sys
from pathlib import Path

import gguf as oracle
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType, GGUFValueType

from quire.layouts import Affine, Dense
from quire.observe.errors import BadModelFile, NotFound
from quire.weights.gguf import strings as gguf_strings
from quire.weights.gguf.file import GGUF, Strings, describe
from tests.effort import at_most
from tests.fuzz import maker
from tests.fuzz.maker import ARRAY, STRING, TYPES, U32, Maker
from tests.readers import Reader


def plain(value: object) -> object:
    """Our value as plain Python."""
    if isinstance(value, Strings | np.ndarray):
        return value.tolist()
    return [plain(item) for item in value] if isinstance(value, list) else value


def their_value(field: oracle.ReaderField) -> object:
    """The oracle's field as plain Python, from its raw parts."""
    last = field.types[-1]
    items = [
        bytes(field.parts[i]).decode("utf-8", "surrogateescape")
        if last == GGUFValueType.STRING
        else field.parts[i][0].item()
        for i in field.data
    ]
    return items if field.types[0] == GGUFValueType.ARRAY else items[0]


def agree(path: Path, numbers: int = 100) -> None:
    """Same metadata, same tensors, the same bytes in each, and the same numbers in the first few."""
    theirs = Reader(path)
    with GGUF.open(path) as ours:
        fields = {k: f for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
        assert list(ours.metadata) == list(fields)
        for key, field in fields.items():
            if key == "nested":  # theirs flattens arrays of arrays and takes all for the first one's type
                continue
            assert plain(ours.metadata[key]) == their_value(field), key
        assert list(ours.tensors) == [t.name for t in theirs.tensors]
        assert ours.data_start == theirs.data_offset
        for t in theirs.tensors:
            info = ours.tensors[t.name]
            assert info.shape == tuple(reversed(t.shape.tolist()))
            assert (info.type, info.offset, info.nbytes) == (t.tensor_type.name, t.data_offset, t.n_bytes)
            layout = ours.tensor(t.name)
            assert layout.data.tobytes() == t.data.tobytes()
            if t.name in list(ours.tensors)[:numbers]:
                with np.errstate(all="ignore"):
                    want = oracle.quants.dequantize(t.data, t.tensor_type)
                np.testing.assert_array_equal(layout.dequantize(), want.reshape(info.shape))


def write(tmp_path: Path, made: Maker | bytes) -> Path:
    path = tmp_path / "made.gguf"
    path.write_bytes(made if isinstance(made, bytes) else made.build())
    return path


def written_by_the_oracle(path: Path) -> None:
    w = oracle.GGUFWriter(path, "llama")
    w.add_name("a name — ünï")
    w.add_context_length(4096)
    w.add_uint8("k.u8", 200)
    w.add_int8("k.i8", -5)
    w.add_uint16("k.u16", 60000)
    w.add_int16("k.i16", -30000)
    w.add_uint32("k.u32", 4_000_000_000)
    w.add_int32("k.i32", -2_000_000_000)
    w.add_uint64("k.u64", 2**63 + 5)
    w.add_int64("k.i64", -(2**62))
    w.add_float32("k.f32", 1.5)
    w.add_float64("k.f64", 0.1)
    w.add_bool("k.yes", True)
    w.add_bool("k.no", False)
    w.add_array("k.ints", list(range(100)))
    w.add_array("k.floats", [0.5, -0.25])
    w.add_array("k.bools", [True, False, True])
    w.add_token_list(["<s>", "", "Ġthe", "模型", "x" * 400] + [f"tok{i}" for i in range(3000)])
    w.add_token_merges(["a b", "c d"])
    rng = np.random.default_rng(0)
    for i, (name, (_, block, nbytes)) in enumerate(TYPES.items()):
        shape = (3, 2 * nbytes) if i % 2 else (2, 3, nbytes)
        data = rng.integers(0, 256, shape, np.uint8)
        if block == 1:
            data = data.view({"F32": np.float32, "F16": np.float16, "BF16": np.uint8}[name])
        w.add_tensor(f"t.{name}", data, raw_dtype=GGMLQuantizationType[name])
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def test_a_file_of_the_oracles_writer(tmp_path: Path) -> None:
    path = tmp_path / "theirs.gguf"
    written_by_the_oracle(path)
    agree(path)
    with GGUF.open(path) as ours:
        assert ours.version == 3
        assert {info.type for info in ours.tensors.values()} == set(TYPES)


@pytest.mark.parametrize("name", list(maker.SAMPLES))
def test_files_made_by_hand(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, maker.SAMPLES[name]())
    agree(path)
    if name == "every_type":
        with GGUF.open(path) as ours:
            nested = ours.metadata["nested"]
            assert isinstance(nested, list)
            assert [plain(v) for v in nested] == [[1, 2, 3], ["a", "b"], [[True]]]
            assert ours.metadata["not_utf8"] == "caf\udce9\udcff"


@pytest.mark.parametrize("version", [2, 3])
def test_both_versions_say_the_same(tmp_path: Path, version: int) -> None:
    path = write(tmp_path, maker.every_type(version))
    agree(path)
    with GGUF.open(path) as ours:
        assert ours.version == version
        assert ours.size == path.stat().st_size
        assert ours.metadata["scalar.4"] == 2**32 - 1
        assert ours.metadata["scalar.7"] is True
        assert isinstance(ours.metadata["array.7"], np.ndarray)
        assert ours.metadata["array.7"].dtype == np.bool_


def test_the_default_model(model_path: Path) -> None:
    agree(model_path, numbers=12)
    with GGUF.open(model_path) as ours:
        assert ours.architecture == "llama"
        told = describe(ours)
        assert told["parameters"] == 134_515_008
        assert (told["layers"], told["heads"], told["kv_heads"], told["vocabulary"]) == (30, 9, 3, 49152)
        assert list(told["types"]) == ["Q4_1", "Q8_0", "F32"]


def test_the_default_model_opens_fast(model_path: Path) -> None:
    """A few milliseconds; the bound is loose, for busy machines. A loop per byte would take a second."""
    GGUF.open(model_path)
    with at_most(0.3):
        for _ in range(5):
            GGUF.open(model_path).close()


def test_a_vocabulary_beside_the_checkout(shared_data: Path) -> None:
    path = shared_data / "tokenizers" / "ggml-vocab-llama-spm.gguf"
    if not path.is_file():
        pytest.skip("needs tokenizers/ggml-vocab-llama-spm.gguf in the shared data folder")
    agree(path)


def test_tensors_are_views(tmp_path: Path) -> None:
    with GGUF.open(write(tmp_path, maker.every_type())) as ours:
        for name, info in ours.tensors.items():
            layout = ours.tensor(name)
            assert isinstance(layout, Dense if TYPES[info.type][1] == 1 else Affine)
            assert not layout.data.flags.owndata
            assert not layout.data.flags.writeable
            address = layout.data.ctypes.data
            assert address == ours.tensor(name).data.ctypes.data
            assert address % 32 == 0
            assert info.elements == np.prod(info.shape)


def test_layouts_outlive_close(tmp_path: Path) -> None:
    path = write(tmp_path, maker.vocabulary())
    ours = GGUF.open(path)
    layout = ours.tensor("token_embd.weight")
    before = layout.dequantize()
    tokens = ours.metadata.get_strings("tokenizer.ggml.tokens")
    ours.close()
    ours.close()
    os.unlink(path)
    np.testing.assert_array_equal(layout.dequantize(), before)
    assert tokens[0] == ""
    with pytest.raises(ValueError, match="is closed"):
        ours.tensor("token_embd.weight")
    ours.release("token_embd.weight")  # too late, and harmless


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc")
def test_close_unmaps(tmp_path: Path) -> None:
    path = write(tmp_path, maker.stacked())

    def mapped() -> bool:
        gc.collect()
        return str(path) in Path("/proc/self/maps").read_text()

    with GGUF.open(path) as ours:
        layout = ours.tensor("experts")
        assert mapped()
    del ours
    assert mapped()
    del layout
    assert not mapped()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's accounting of resident pages")
def test_release_gives_pages_back(tmp_path: Path) -> None:
    size = 64 << 20
    path = write(tmp_path, Maker().tensor("small", [32], "F32").tensor("big", [1024, size >> 12], "F32"))

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    with GGUF.open(path) as ours:
        layout = ours.tensor("big")
        total = layout.data.view(np.uint32).sum()
        full = resident()
        ours.release("big")
        assert full - resident() > size * 0.9
        assert layout.data.view(np.uint32).sum() == total  # comes back when it is read
        ours.release_range(0, ours.size + 12345)  # clipped to the file
        ours.release_range(ours.size + 1, 1)
        ours.release_range(5, 0)


def test_nothing_but_the_header_is_read(tmp_path: Path) -> None:
    """A sparse file of a terabyte opens at once."""
    made = Maker().tensor("vast", [1 << 20, 1 << 18], "F32", payload=b"")
    path = write(tmp_path, made)
    try:
        os.truncate(path, len(made.build()) + (1 << 40))
    except OSError as e:
        pytest.skip(f"needs a file system that holds sparse files of a terabyte: {e}")
    with at_most(1.0), GGUF.open(path) as ours:
        assert ours.tensor("vast").nbytes == 1 << 40


def test_typed_getters(tmp_path: Path) -> None:
    made = maker.every_type()
    made.key("nan", maker.F32, float("nan")).key("strings", ARRAY, (STRING, ["a"]))
    meta = GGUF.open(write(tmp_path, made)).metadata
    assert meta.get_int("scalar.0") == 255
    assert meta.get_int("scalar.11") == -(2**63)
    assert meta.get_int("absent", 7) == 7
    assert meta.get_int("absent", None) is None
    assert meta.get_float("scalar.12") == -0.1
    assert meta.get_float("scalar.0") == 255.0
    assert meta.get_bool("scalar.7") is True
    assert meta.get_str("general.architecture") == "llama"
    assert meta.get_strings("strings").tolist() == ["a"]
    assert meta.get_array("array.5").tolist() == [0, 1, 1, 0, 1]
    assert meta.get_array("array.5", kinds="iu").dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        meta.get_array("array.5")[0] = 1
    assert meta.get_strings("array.no_strings").tolist() == []
    wrong = [
        (lambda: meta.get_int("absent"), "'absent' is missing"),
        (lambda: meta.get_int("general.architecture"), "'general.architecture' is the string 'llama'"),
        (lambda: meta.get_int("scalar.7"), "'scalar.7' is the boolean True: it must be an integer"),
        (lambda: meta.get_int("scalar.6"), "'scalar.6' is the number"),
        (lambda: meta.get_int("scalar.0", low=256), "'scalar.0' is 255: it must be at least 256"),
        (lambda: meta.get_int("scalar.0", high=254), "'scalar.0' is 255: it must be at most 254"),
        (lambda: meta.get_int("scalar.0", low=1, high=5), "'scalar.0' is 255: it must be 1 to 5"),
        (lambda: meta.get_float("general.name"), "'general.name' is the string"),
        (lambda: meta.get_float("nan"), "'nan' is nan: it must be finite"),
        (lambda: meta.get_float("scalar.7"), "'scalar.7' is the boolean"),
        (lambda: meta.get_bool("scalar.0"), "'scalar.0' is the integer 255: it must be true or false"),
        (lambda: meta.get_str("scalar.0"), "'scalar.0' is the integer 255: it must be a string"),
        (lambda: meta.get_str("nested"), "'nested' is an array of 3 arrays"),
        (lambda: meta.get_strings("array.5"), "'array.5' is an array of 5 int32: it must be an array of strings"),
        (lambda: meta.get_array("strings"), "'strings' is an array of 1 strings: it must be an array of"),
        (lambda: meta.get_array("array.6", kinds="iu"), "'array.6' is an array of 5 float32"),
    ]
    for call, message in wrong:
        with pytest.raises(BadModelFile, match=message):
            call()


def test_strings(tmp_path: Path) -> None:
    words = [b"first", b"", b"\xff", "é模".encode(), b"last"]
    tokens = GGUF.open(write(tmp_path, Maker().key("t", ARRAY, (STRING, words)))).metadata.get_strings("t")
    texts = [w.decode("utf-8", "surrogateescape") for w in words]
    assert tokens.tobytes() == words
    assert tokens.tolist() == list(tokens) == texts
    assert (tokens[0], tokens[-1], tokens[2]) == ("first", "last", "\udcff")
    assert tokens[1:4] == texts[1:4]
    assert tokens[2].encode("utf-8", "surrogateescape") == b"\xff"
    assert len(tokens) == 5
    assert tokens.nbytes == sum(map(len, words))
    assert "last" in tokens
    # A zero in one text makes up for a zero that a long one's length lacks.
    words = [b"a\0b", b"z" * 65536, b"c"]
    tokens = GGUF.open(write(tmp_path, Maker().key("t", ARRAY, (STRING, words)))).metadata.get_strings("t")
    assert [t.encode() for t in tokens] == words
    tokens = GGUF.open(write(tmp_path, Maker().key("t", ARRAY, (STRING, [b"first"] * 5)))).metadata.get_strings("t")
    for bad in (5, -6):
        with pytest.raises(IndexError):
            tokens[bad]


def test_chains_of_strings_are_found_however_they_look() -> None:
    """Against a hop in plain Python: short, empty, long and zero-filled strings, across many windows."""
    rng = random.Random(5)
    makers = [
        lambda: rng.randbytes(rng.randrange(1, 20)).replace(b"\0", b"x"),
        lambda: b"",
        lambda: rng.randbytes(rng.randrange(200, 600)),
        lambda: bytes(rng.randrange(20)),
        lambda: struct.pack("<Q", rng.randrange(40)) * rng.randrange(3),  # looks like a length
        lambda: b"x" * 256,
        lambda: b"y" * 65536,
    ]
    mixes = [[1, 0, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0, 0], [200, 1, 0, 0, 0, 0, 0], [9, 2, 2, 2, 2, 1, 0]]
    mixes += [[0, 0, 0, 1, 3, 0, 0], [2000, 0, 1, 1, 1, 1, 1], [0, 1, 0, 0, 0, 0, 3], [500, 0, 1, 0, 0, 0, 0]]
    for mix in mixes:
        for n in (1, 2, 7, 4000) if mix[-1] < 2 else (1, 7):
            words = [make() for make in rng.choices(makers, mix, k=n)]
            raw = rng.randbytes(5) + b"".join(struct.pack("<Q", len(w)) + w for w in words)
            data = np.frombuffer(raw + rng.randbytes(rng.choice((0, 3, 50))), np.uint8)
            heads, whole = gguf_strings.chain(data, 5, data.size, n)
            ends = 5 + np.cumsum([0] + [8 + len(w) for w in words])
            assert whole == n
            np.testing.assert_array_equal(heads, ends)
            strings = Strings(data[5 : heads[-1]], heads - 5)
            assert strings.tobytes() == words
            assert [t.encode("utf-8", "surrogateescape") for t in strings.tolist()] == words
            # Cut short by one byte, the last string that is not whole is named.
            heads, whole = gguf_strings.chain(data, 5, len(raw) - 1, n)
            assert whole == n - 1
            assert heads[whole] == ends[-2]


def test_describe(tmp_path: Path) -> None:
    made = maker.stacked().key("general.name", STRING, b"bad \xff\x1b name")
    told = describe(GGUF.open(write(tmp_path, made)))
    assert told["name"] == "bad \ufffd\ufffd name"  # no escape codes for the terminal
    assert told["architecture"] == "moe"
    assert told["kv_heads"] == [2, 4]
    assert told["context_length"] is None
    assert told["parameters"] == 64 * 3 * 4 + 32 * 8 + 256 + 15 + 7
    assert told["types"] == {"Q4_1": 480, "Q6_K": 210, "Q5_0": 176, "F16": 30, "BF16": 14}
    assert told["chat_template"] is False
    empty = describe(GGUF.open(write(tmp_path, Maker())))
    assert empty["parameters"] == 0
    assert empty["architecture"] is None
    long = GGUF.open(write(tmp_path, Maker().key("general.architecture", STRING, "x" * 129)))
    with pytest.raises(BadModelFile, match=r"'general\.architecture' is 129 characters long"):
        describe(long)


def test_a_file_without_tensors_needs_no_padding(tmp_path: Path) -> None:
    made = Maker().key("general.architecture", STRING, "llama")
    with GGUF.open(write(tmp_path, made.header())) as ours:
        assert len(ours.tensors) == 0


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    with (
        GGUF.open(write(tmp_path, maker.stacked())) as ours,
        pytest.raises(BadModelFile, match="no tensor 'x' among its 5"),
    ):
        ours.tensor("x")


def test_an_absent_architecture_is_named(tmp_path: Path) -> None:
    ours = GGUF.open(write(tmp_path, Maker().key("a", U32, 1)))
    with pytest.raises(BadModelFile, match=r"'general\.architecture' is missing"):
        _ = ours.architecture


def test_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"absent\.gguf"):
        GGUF.open(tmp_path / "absent.gguf")
    with pytest.raises(BadModelFile, match="is a directory"):
        GGUF.open(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadModelFile, match="not a regular file"):
        GGUF.open(tmp_path / "pipe")
    with pytest.raises(BadModelFile, match="cannot be opened"):
        GGUF.open("a\0b")


def split(folder: Path, *parts: Maker, name: str = "m") -> list[Path]:
    """Those files as the parts of one model."""
    folder.mkdir(exist_ok=True)
    paths = [folder / f"{name}-{i:05}-of-{len(parts):05}.gguf" for i in range(1, len(parts) + 1)]
    for i, (path, part) in enumerate(zip(paths, parts, strict=True)):
        part.key("split.no", maker.U16, i).key("split.count", maker.U16, len(parts))
        path.write_bytes(part.key("split.tensors.count", maker.I32, len(parts)).build())
    return paths


def three() -> list[Maker]:
    first = Maker().key("general.architecture", STRING, "llama")
    return [first.tensor("a", [32]), Maker().tensor("b", [64]), Maker().tensor("c", [32, 2], "Q8_0")]


def test_a_split_model_is_opened_by_its_first_file(tmp_path: Path) -> None:
    paths = split(tmp_path / "s", *three())
    with GGUF.open(paths[0]) as whole:
        assert list(whole.tensors) == ["a", "b", "c"] and whole.architecture == "llama"
        assert [whole.file_of(n) for n in "abc"] == [str(p) for p in paths]
        assert whole.size == sum(p.stat().st_size for p in paths)
        for path, name in zip(paths, "abc", strict=True):
            [theirs] = oracle.GGUFReader(path).tensors
            assert whole.tensor(name).data.tobytes() == theirs.data.tobytes()
            whole.release(name)
            assert whole.tensor(name).data.tobytes() == theirs.data.tobytes()
        layout = whole.tensor("c")
    assert layout.dequantize().shape == (2, 32)  # stays valid after close
    with pytest.raises(ValueError, match="closed"):
        whole.tensor("c")


def test_parts_that_do_not_belong_together(tmp_path: Path) -> None:
    paths = split(tmp_path / "s", *three())
    for path in paths[1:]:
        with pytest.raises(
            BadModelFile, match=rf"{path.name} is part \d of 3.*opened by its first file.*-00001-of-00003"
        ):
            GGUF.open(path)
    kept = paths[1].read_bytes()
    paths[1].write_bytes(paths[2].read_bytes())
    with pytest.raises(BadModelFile, match=r"m-00002-of-00003.gguf says that it is part 3 of 3, not 2 of 3"):
        GGUF.open(paths[0])
    paths[1].write_bytes(kept[:-1])
    with pytest.raises(BadModelFile, match=r"m-00002-of-00003.gguf.*tensor 'b'"):
        GGUF.open(paths[0])
    paths[1].unlink()
    with pytest.raises(BadModelFile, match=r"part 1 of 3.*m-00002-of-00003.gguf is not beside it"):
        GGUF.open(paths[0])
    twice = [Maker().tensor("a", [32]), Maker().tensor("a", [32])]
    with pytest.raises(BadModelFile, match=r"n-00002-of-00002.gguf: tensor 'a' is in .*n-00001-of-00002.gguf too"):
        GGUF.open(split(tmp_path / "s", *twice, name="n")[0])
    fewer = [Maker().tensor("a", [32]).tensor("b", [32]), Maker().tensor("c", [32])]
    with pytest.raises(BadModelFile, match=r"'split.tensors.count' is 2, but its 2 files hold 3 tensors"):
        GGUF.open(split(tmp_path / "s", *fewer, name="o")[0])
