import json
import struct

import gguf
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from gqa_jax.formats.gguf import open_gguf
from gqa_jax.formats.safetensors import open_folder
from tests.checkpoints import BFLOAT16, LLAMA, add_metadata, make_weights, save, write_folder, write_gguf

WEIGHTS = make_weights(LLAMA)
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "model", LLAMA, WEIGHTS)


@pytest.fixture
def sharded(tmp_path):
    return write_folder(tmp_path / "sharded", LLAMA, WEIGHTS, shards=3)


@pytest.fixture
def whole(tmp_path):
    return write_gguf(tmp_path / "whole.gguf", LLAMA, WEIGHTS)


def write_tensor(file, data, kind, **options):
    writer = gguf.GGUFWriter(file, "llama", **options)
    writer.add_tensor("x", data, raw_dtype=kind)
    save(writer)
    return file


def half(value):
    return struct.pack("<e", value)


# GGUF: blocks of quantised numbers, each unpacked here by its own rule.


def q8_0(block):
    (scale,) = struct.unpack("<e", block[:2])
    return [scale * q for q in struct.unpack("<32b", block[2:])]


def q4_1(block):
    scale, least = struct.unpack("<ee", block[:4])
    low, high = [byte & 15 for byte in block[4:]], [byte >> 4 for byte in block[4:]]
    return [scale * q + least for q in low + high]


def q5_0(block):
    scale, high = struct.unpack("<eI", block[:6])
    low = [byte & 15 for byte in block[6:]] + [byte >> 4 for byte in block[6:]]
    return [scale * ((q | (high >> i & 1) << 4) - 16) for i, q in enumerate(low)]


def q4_k(block):
    scale, least = struct.unpack("<ee", block[:4])
    packed, quants = block[4:16], block[16:]
    numbers = []
    for part in range(8):
        if part < 4:
            of_scale, of_least = packed[part] & 63, packed[part + 4] & 63
        else:
            of_scale = packed[part + 4] & 15 | (packed[part - 4] >> 6) << 4
            of_least = packed[part + 4] >> 4 | (packed[part] >> 6) << 4
        for byte in quants[32 * (part // 2) :][:32]:
            numbers.append(scale * of_scale * (byte >> 4 * (part % 2) & 15) - least * of_least)
    return numbers


def q6_k(block):
    low, high, scales = block[:128], block[128:192], struct.unpack("<16b", block[192:208])
    (scale,) = struct.unpack("<e", block[208:])
    numbers = []
    for i in range(256):
        side, lane, row = i // 128, i % 32, i % 128 // 32
        four = low[64 * side + 32 * (row % 2) + lane] >> 4 * (row // 2) & 15
        two = high[32 * side + lane] >> 2 * row & 3
        numbers.append(scale * scales[i // 16] * ((four | two << 4) - 32))
    return numbers


RULES = {"Q8_0": (q8_0, (0,)), "Q4_1": (q4_1, (0, 2)), "Q5_0": (q5_0, (0,)), "Q4_K": (q4_k, (0, 2)), "Q6_K": (q6_k, (208,))}


@pytest.mark.parametrize("kind", RULES)
def test_quantised_blocks_are_unpacked_by_the_rule_of_their_own_kind(kind, tmp_path):
    rule, halves = RULES[kind]
    own = gguf.GGMLQuantizationType[kind]
    numbers, size = gguf.GGML_QUANT_SIZES[own]
    rng = np.random.default_rng(3)
    data = rng.integers(0, 256, (5, 3, size), np.uint8)
    for at in halves:
        data[..., at : at + 2] = (rng.integers(-40, 41, (5, 3, 1)) / 16).astype("<f2").view(np.uint8)
    file = write_tensor(tmp_path / "model-Q4_0.gguf", data.reshape(5, 3 * size), own)
    tensor = open_gguf(file).tensors["x"]
    expected = np.array([[number for block in row for number in rule(block.tobytes())] for row in data], np.float64)
    assert (tensor.shape, tensor.dtype) == ((5, 3 * numbers), np.float32)
    np.testing.assert_allclose(tensor.read(), expected, rtol=2e-6, atol=2e-6)


def test_a_q4_1_block_has_a_header_of_four_bytes_and_low_nibbles_first(tmp_path):
    block = half(0.5) + half(-1.0) + bytes(i | (15 - i) << 4 for i in range(16))
    file = write_tensor(tmp_path / "x.gguf", np.frombuffer(block, np.uint8)[None], gguf.GGMLQuantizationType.Q4_1)
    up = np.arange(16) / 2 - 1
    np.testing.assert_array_equal(open_gguf(file).tensors["x"].read(), [[*up, *up[::-1]]])


@pytest.mark.parametrize(("kind", "dtype"), [("F64", "f8"), ("F32", "f4"), ("F16", "f2"), ("BF16", BFLOAT16)])
def test_a_gguf_tensor_that_is_not_quantised_keeps_its_dtype_and_its_bits(kind, dtype, tmp_path):
    numbers = np.random.default_rng(0).normal(size=(3, 5, 7)).astype(dtype)
    stored = numbers.view(np.uint8) if kind == "BF16" else numbers
    tensor = open_gguf(write_tensor(tmp_path / "x.gguf", stored, gguf.GGMLQuantizationType[kind])).tensors["x"]
    found = tensor.read()
    assert tensor.shape == found.shape == (3, 5, 7)
    assert tensor.dtype == found.dtype == np.dtype(dtype)
    assert found.tobytes() == numbers.tobytes()


@pytest.mark.parametrize("kind", ["I8", "I32", "Q8_K"])
def test_a_gguf_tensor_that_cannot_be_dequantised_is_named_with_its_kind(kind, tmp_path):
    own = gguf.GGMLQuantizationType[kind]
    data = np.zeros((1, gguf.GGML_QUANT_SIZES[own][1]), np.uint8)
    data = data.view({"I8": np.int8, "I32": np.int32}.get(kind, np.uint8))
    tensor = open_gguf(write_tensor(tmp_path / "x.gguf", data, own)).tensors["x"]
    with pytest.raises(ValueError, match=rf"x is stored as {kind}, which"):
        tensor.read()


def test_metadata_is_what_the_gguf_package_itself_reads(tmp_path):
    said = {
        "a.text": "naïve ▁ text",
        "a.number": 7,
        "a.fraction": 0.25,
        "a.switch": False,
        "a.strings": ["", "▁the", "a b", "\u0000", "🦙" * 40],
        "a.floats": [0.5, -1.0, 3.25],
        "a.ints": list(range(-3, 300)),
        "a.switches": [True, False, True],
    }
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    add_metadata(writer, said)
    for kind in ("UINT8", "INT16", "UINT64", "FLOAT64"):
        writer.add_key_value(f"a.{kind}", [1, 2, 3], gguf.GGUFValueType.ARRAY, gguf.GGUFValueType[kind])
    writer.add_tensor("x", np.ones((2, 3), np.float32))
    save(writer)
    found = open_gguf(tmp_path / "x.gguf").metadata
    assert {key: found[key] for key in said} == said
    plain = gguf.GGUFReader(tmp_path / "x.gguf")
    assert found == {key: field.contents() for key, field in plain.fields.items()}
    assert all(type(entry) is int for entry in found["a.ints"])
    assert [type(found[key]) for key in ("a.number", "a.fraction", "a.switch")] == [int, float, bool]


def test_an_alignment_of_its_own_is_kept_to(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_custom_alignment(256)
    for name in "abc":
        writer.add_tensor(name, np.full(3, ord(name), np.float32))
    save(writer)
    tensors = open_gguf(tmp_path / "x.gguf").tensors
    assert {name: tensor.read().tolist() for name, tensor in tensors.items()} == {
        name: [float(ord(name))] * 3 for name in "abc"
    }


def test_what_was_read_from_a_gguf_file_stays_when_the_file_changes(whole):
    tensors = open_gguf(whole).tensors
    before = {name: tensor.read() for name, tensor in tensors.items()}
    copies = {name: array.tobytes() for name, array in before.items()}
    with whole.open("r+b") as file:
        file.seek(-50_000, 2)
        file.write(bytes(50_000))
    assert {name: array.tobytes() for name, array in before.items()} == copies


def cuts(file):
    """Lengths to cut a GGUF file to: all of the header, and some of every part behind it."""
    size = file.stat().st_size
    data = gguf.GGUFReader(file).data_offset
    return [*range(4, 40), *range(40, data, 97), data - 1, data, data + 1, (data + size) // 2, size - 4, size - 1]


def test_a_gguf_file_cut_off_anywhere_is_an_error_that_names_it(tmp_path):
    file = write_gguf(tmp_path / "whole.gguf", LLAMA, WEIGHTS, metadata={"a.strings": ["one", "two"] * 9, "a.ints": [5] * 300})
    whole, cut = file.read_bytes(), tmp_path / "cut.gguf"
    for size in cuts(file):
        cut.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"cut\.gguf is not a GGUF file that can be read, or is cut off"):
            open_gguf(cut)


@pytest.mark.parametrize("begins", [b"", b"G", b"GGU", b"gguf", b"ggml----", b"version https://git-lfs.github.com/spec/v1"])
def test_a_file_that_does_not_begin_as_gguf_is_told_apart(begins, tmp_path):
    file = tmp_path / "x.gguf"
    file.write_bytes(begins)
    with pytest.raises(ValueError, match=r"x\.gguf begins with b'.{0,4}'; a GGUF file begins with b'GGUF'"):
        open_gguf(file)


@pytest.mark.parametrize("version", [0, 1, 4])
def test_a_version_of_gguf_that_is_not_known_is_an_error(version, whole):
    data = bytearray(whole.read_bytes())
    data[4:8] = struct.pack("<I", version)
    whole.write_bytes(data)
    with pytest.raises(ValueError, match=rf"whole\.gguf is not a GGUF file that can be read.*version {version}"):
        open_gguf(whole)


def test_a_count_of_strings_far_beyond_the_file_is_an_error_at_once(whole, tmp_path):
    file = write_gguf(tmp_path / "x.gguf", LLAMA, WEIGHTS, metadata={"a.strings": ["one", "two"]})
    data = file.read_bytes()
    at = data.index(b"a.strings") + len(b"a.strings") + 8
    file.write_bytes(data[:at] + struct.pack("<Q", 1 << 60) + data[at + 8 :])
    with pytest.raises(ValueError, match="past the end"):
        open_gguf(file)


def test_a_big_endian_gguf_file_is_refused_instead_of_read_backwards(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_array("a.ints", [1, 2, 3])
    writer.add_array("a.strings", ["one", "two"])
    writer.add_tensor("x", np.ones(3, np.float32))
    save(writer)
    with pytest.raises(ValueError, match=r"x\.gguf has the byte order of other machines.*gguf-convert-endian"):
        open_gguf(tmp_path / "x.gguf")


def test_one_part_of_a_split_gguf_file_is_an_error_that_says_how_to_join_them(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama", split_max_tensors=1)
    for name in "abc":
        writer.add_tensor(name, np.ones(3, np.float32))
    save(writer)
    for part in sorted(tmp_path.glob("*.gguf")):
        with pytest.raises(ValueError, match=rf"{part.name} is one of 3 parts; join them first.*gguf-split --merge"):
            open_gguf(part)


# Hugging Face folders


@pytest.mark.parametrize("dtype", ["f8", "f4", "f2", BFLOAT16])
def test_a_safetensors_tensor_keeps_its_dtype_and_its_bits(dtype, tmp_path):
    numbers = np.random.default_rng(0).normal(size=(3, 5, 7)).astype(dtype)
    folder = write_folder(tmp_path / "model", LLAMA, {"x": numbers}, dtype)
    tensor = open_folder(folder).tensors["x"]
    found = tensor.read()
    assert tensor.shape == found.shape == (3, 5, 7)
    assert tensor.dtype == found.dtype == np.dtype(dtype)
    assert found.tobytes() == numbers.tobytes()


def test_every_bfloat16_comes_back_bit_for_bit(tmp_path):
    numbers = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    write_folder(tmp_path / "model", LLAMA, {"x": numbers}, BFLOAT16)
    np.testing.assert_array_equal(open_folder(tmp_path / "model").tensors["x"].read().view(np.uint16), np.arange(1 << 16))


def test_what_was_read_from_a_folder_stays_when_the_file_changes(folder):
    before = open_folder(folder).tensors["model.norm.weight"].read()
    file = folder / "model.safetensors"
    with file.open("r+b") as opened:
        opened.seek(-50_000, 2)
        opened.write(bytes(50_000))
    np.testing.assert_array_equal(before, WEIGHTS["model.norm.weight"])


def test_shards_are_read_as_one(sharded, folder):
    assert len(list(sharded.glob("*.safetensors"))) == 3
    one, three = open_folder(folder), open_folder(sharded)
    assert one.metadata == three.metadata == LLAMA
    assert one.tensors.keys() == three.tensors.keys() == WEIGHTS.keys()
    for name, weight in WEIGHTS.items():
        assert three.tensors[name].shape == weight.shape
        np.testing.assert_array_equal(three.tensors[name].read(), weight)


def test_shards_without_an_index_are_read_as_one(sharded):
    (sharded / INDEX).unlink()
    assert open_folder(sharded).tensors.keys() == WEIGHTS.keys()


def test_files_beside_the_model_itself_are_left_alone(folder, sharded):
    for model in (folder, sharded):
        save_file({"layers.0.attention.wq.weight": np.ones(3, np.float32)}, model / "consolidated.safetensors")
        assert open_folder(model).tensors.keys() == WEIGHTS.keys()


def test_a_shard_that_the_index_names_and_is_not_there_is_named(sharded):
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match=r"sharded lacks model-00002-of-00003\.safetensors, which its index names"):
        open_folder(sharded)


def test_a_tensor_that_the_index_names_and_no_file_holds_is_named(sharded):
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.extra.weight"] = "model-00001-of-00003.safetensors"
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"sharded lacks 1 tensors that its index names: model\.extra\.weight"):
        open_folder(sharded)


@pytest.mark.parametrize("text", ["{}", '{"weight_map": null}', '{"weight_map": ["a"]}', '{"weight_map": {"a": 5}}'])
def test_an_index_without_a_map_of_weights_is_named(text, sharded):
    (sharded / INDEX).write_text(text)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json has no weight_map"):
        open_folder(sharded)


@pytest.mark.parametrize("name", ["config.json", INDEX])
@pytest.mark.parametrize("text", ["", "{", "not json", '{"a": }', b"\xff\xfe{}"])
def test_a_file_that_is_not_json_is_named(name, text, sharded):
    (sharded / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=rf"{name} is not valid JSON"):
        open_folder(sharded)


@pytest.mark.parametrize("name", ["config.json", INDEX])
@pytest.mark.parametrize(("text", "kind"), [("[1, 2]", "list"), ("null", "NoneType"), ('"llama"', "str"), ("7", "int")])
def test_json_that_is_not_an_object_is_named(name, text, kind, sharded):
    (sharded / name).write_text(text)
    with pytest.raises(ValueError, match=rf"{name} holds {kind}; it must be one JSON object"):
        open_folder(sharded)


def test_a_folder_without_config_is_no_checkpoint(folder):
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"model has no config\.json"):
        open_folder(folder)


def test_a_folder_without_safetensors_says_that_other_weights_are_not_read(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"model has no \*\.safetensors; other kinds of weights are not read"):
        open_folder(folder)


@pytest.mark.parametrize("kept", [0, 1, 7, 8, 9, 200, 0.5, -1])
def test_a_safetensors_file_cut_off_anywhere_is_an_error_that_names_it(kept, folder):
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * kept) if isinstance(kept, float) else kept])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a whole safetensors file"):
        open_folder(folder)


@pytest.mark.parametrize("dtype", ["i1", "u1", "i4", "i8", "?"])
def test_a_tensor_of_integers_is_named_with_its_dtype(dtype, folder):
    save_file({"model.norm.weight": np.ones(3, dtype)}, folder / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"model\.safetensors holds model\.norm\.weight as (I8|U8|I32|I64|BOOL); known are F64"
    ):
        open_folder(folder)
