"""Tokenizers from GGUF metadata and from folders, on tiny vocabularies made here and on two real files.

The ids in golden/tokens.json come from other programs: Hugging Face's tokenizer with SmolLM2's own pre-tokenizer, single
digits and then GPT-2's words, and the sentencepiece library on a model made of Gemma 3's pieces, scores and types.
"""

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers, processors

from gqa_jax.formats.gguf import open_gguf
from gqa_jax.tokenizer import from_folder, from_gguf

GOLDEN = json.loads((pathlib.Path(__file__).parent / "golden" / "tokens.json").read_text(encoding="utf-8"))
TEXTS = ["", " ", "   ", "\n", "\t\t x", " a  b   c ", "Selamat pagi! Harganya Rp 1.250.000.", "你好，世界！", "مرحبا بالعالم"]
TEXTS += ["👨‍👩‍👧‍👦 👩🏽‍🚀 🏳️‍🌈", "def f(x):\r\n\treturn  x\n\n\n", "\x00\x01\x7f\u200b\u00a0", "cafe\u0301 \ufffd", "x" * 3001]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

quick = settings(deadline=None, database=None, max_examples=100)


def byte_level(*words, merges=(), control=("<s>", "</s>"), user_defined=(), **entries):
    """GGUF metadata of a byte-level BPE: 256 bytes, then `words`, the results of `merges`, and whole tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *words, *(merge.replace(" ", "") for merge in merges)]
    kinds = [NORMAL] * len(tokens) + [CONTROL] * len(control) + [USER_DEFINED] * len(user_defined)
    tokens += [*control, *user_defined]
    common = {"model": "gpt2", "tokens": tokens, "token_type": kinds, "merges": list(merges)}
    return {f"tokenizer.ggml.{key}": value for key, value in (common | entries).items()}


def sentencepiece(*pieces, **entries):
    """GGUF metadata of a SentencePiece BPE: <unk>, <s>, </s>, 256 bytes from 3 on, and `pieces` (text, score, kind)."""
    head = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    tokens, scores, kinds = zip(*head, *((f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)), *pieces, strict=True)
    common = {"model": "llama", "tokens": list(tokens), "scores": list(scores), "token_type": list(kinds)}
    common |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return {f"tokenizer.ggml.{key}": value for key, value in (common | entries).items()}


def letters(text, score=-100.0):
    return [(letter, score - index, NORMAL) for index, letter in enumerate(text)]


SMALL = {
    "bytes": from_gguf(byte_level(merges=["Ġ a", "h e"], bos_token_id=258, eos_token_id=259)),
    "pieces": from_gguf(sentencepiece(("he", -1.0, NORMAL), ("  ", 0.0, USER_DEFINED), *letters("▁he"))),
    "pieces, no prefix": from_gguf(sentencepiece(("he", -1.0, NORMAL), *letters("▁he"), add_space_prefix=False)),
}
small = pytest.mark.parametrize("tokenizer", SMALL.values(), ids=SMALL.keys())


def pieces(tokenizer, text):
    return [tokenizer.backend.id_to_token(token) for token in tokenizer.encode(text, add_bos=False)]


def streamed(tokenizer, ids, **options):
    stream = tokenizer.stream(**options)
    return [*(stream.push(token) for token in ids), stream.flush()]


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_path):
    return from_gguf(metadata(smollm2_path))


@pytest.fixture(scope="session")
def gemma3_tokenizer(gemma3_path):
    return from_gguf(metadata(gemma3_path))


def metadata(path):
    return open_gguf(path).metadata


@pytest.fixture(params=["smollm2", "gemma3"])
def model(request):
    return request.param


@pytest.fixture
def real(model, request):
    return request.getfixturevalue(f"{model}_tokenizer")


def test_ids_are_those_of_the_reference(model, real):
    assert [real.encode(text) for text, _ in GOLDEN[model]] == [ids for _, ids in GOLDEN[model]]


def test_text_survives_the_real_vocabularies(real):
    # Two exceptions, the same in the originals: SmolLM2 has no token for the bytes 04 06 13 14 16 1D and for some above F0
    # and drops them; Gemma 3 reads U+2581 as a space.
    for text in [*TEXTS, *(text for text, _ in GOLDEN["smollm2"][:-1]), "Hello 😀 world!\n" * 20_000]:
        assert real.decode(real.encode(text)) == text


def test_streams_over_the_real_vocabularies_join_to_what_decode_gives(real):
    random = np.random.default_rng(5)
    for text in TEXTS:
        assert "".join(streamed(real, real.encode(text))) == text
    for _ in range(300):
        ids = random.integers(0, [real.vocab_size, 500][random.integers(2)], size=17)
        for keep in (False, True):
            assert "".join(streamed(real, ids, keep_special=keep)) == real.decode(ids, keep_special=keep)


def test_special_tokens_of_smollm2(smollm2_tokenizer):
    tokenizer = smollm2_tokenizer
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.stop_ids) == (49152, 1, (2, 0))
    assert tokenizer.encode("") == []
    chat = tokenizer.chat([{"role": "system", "content": "Short."}, {"role": "user", "content": "Hi"}])
    assert chat == "<|im_start|>system\nShort.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode(chat, add_bos=True).count(1) == 3
    assert tokenizer.decode(tokenizer.encode(chat)) == "system\nShort.\nuser\nHi\nassistant\n"


def test_special_tokens_of_gemma3(gemma3_tokenizer):
    tokenizer = gemma3_tokenizer
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.stop_ids) == (262144, 2, (1, 106))
    assert tokenizer.encode("") == [2]
    assert tokenizer.encode("<bos>Hi") == tokenizer.encode("Hi") == [2, *tokenizer.encode("Hi", add_bos=False)]
    assert tokenizer.chat_template is None


@small
@quick
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁")) | st.text("he <s>/😀a"))
def test_any_text_survives(tokenizer, text):
    text = text.replace("<s>", "").replace("</s>", "")
    assert tokenizer.decode(tokenizer.encode(text)) == text


@small
@quick
@given(data=st.data(), keep=st.booleans())
def test_any_ids_stream_to_what_decode_gives_and_never_half_a_character(tokenizer, data, keep):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1) | st.sampled_from([0, 1, 2, 3 + 0xF0, 3 + 0x9F])))
    *shown, rest = streamed(tokenizer, ids, keep_special=keep)
    assert "".join(shown) + rest == tokenizer.decode(ids, keep_special=keep)
    assert not any(piece.endswith("\ufffd") for piece in shown)


@small
def test_a_character_of_several_tokens_comes_whole(tokenizer):
    ids = tokenizer.encode("h😀e")
    assert len(ids) >= 6
    assert [piece for piece in streamed(tokenizer, ids) if piece] in (["h", "😀", "e"], ["h", "😀e"])


def test_a_stream_drops_special_tokens_without_losing_the_space_after_them():
    tokenizer = SMALL["pieces"]
    ids = [2, *tokenizer.encode("he", add_bos=False), 2, *tokenizer.encode("he", add_bos=False)]
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids) == "he he"


@pytest.mark.parametrize("token", [-1, 260, 2**40])
def test_an_id_outside_the_vocabulary_is_an_error(token):
    tokenizer = SMALL["bytes"]
    with pytest.raises(ValueError, match=f"{token} is outside the vocabulary of 260 tokens"):
        tokenizer.decode([5, token])
    with pytest.raises(ValueError, match=f"{token} is outside"):
        tokenizer.stream().push(token)


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
def test_ids_may_be_arrays(array):
    tokenizer = SMALL["bytes"]
    ids = array(tokenizer.encode("he said 😀"))
    assert tokenizer.decode(ids) == "".join(streamed(tokenizer, ids)) == "he said 😀"


WORDS = {
    "gpt-2": "Don|'t| BE|'|S| 12345| x|\u0301| | y|\n\n",
    "smollm": "Don|'t| BE|'|S| |1|2|3|4|5| x|\u0301| | y|\n\n",
    "llama-bpe": "Don|'t| BE|'S| |123|45| x|\u0301| | y|\n\n",
    "qwen2": "Don|'t| BE|'S| |1|2|3|4|5| x|\u0301| | y|\n\n",
    "qwen35": "Don|'t| BE|'S| |1|2|3|4|5| x\u0301| | y|\n\n",
    "tekken": "Don|'t| BE|'S| |1|2|3|4|5| x\u0301| | y|\n\n",
    "gpt-4o": "Don't| BE'S| |123|45| x\u0301| | y|\n\n",
    "deepseek-v3": "Don|'t| BE|'S| |123|45| x\u0301| | y|\n\n",
}


@pytest.mark.parametrize("pre", WORDS)
def test_each_pre_tokenizer_cuts_its_own_words(pre):
    text = WORDS[pre].replace("|", "")
    spans = from_gguf(byte_level(pre=pre)).backend.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in spans] == WORDS[pre].split("|")


def test_qwen2_composes_its_text():
    assert from_gguf(byte_level(pre="qwen2")).encode("e\u0301") == from_gguf(byte_level(pre="qwen2")).encode("\u00e9")
    assert from_gguf(byte_level(pre="gpt-2")).encode("e\u0301") != from_gguf(byte_level(pre="gpt-2")).encode("\u00e9")


def test_llama3_takes_whole_words_of_the_vocabulary_before_it_merges():
    assert pieces(from_gguf(byte_level("hehe", merges=["h e"], pre="llama-bpe")), "hehe") == ["hehe"]
    assert pieces(from_gguf(byte_level("hehe", merges=["h e"], pre="gpt-2")), "hehe") == ["he", "he"]


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"model": "bert"}, "model is 'bert'; known are gpt2, llama"),
        ({"model": "t5"}, "model is 't5'"),
        ({"pre": "klingon"}, "pre is 'klingon'; known are default, gpt-2, .*smollm.*llama-bpe.*qwen2"),
        ({"token_type": [1, 1, 1]}, "token_type has 3 entries for 258 tokens"),
        ({"eos_token_id": 258}, "258 is outside the vocabulary of 258 tokens"),
        ({"merges": ["x yz"]}, "merges do not fit the vocabulary.*yz"),
    ],
)
def test_metadata_that_makes_no_tokenizer_is_an_error(entries, said):
    with pytest.raises(ValueError, match=said):
        from_gguf(byte_level(**entries))


@pytest.mark.parametrize(("source", "entry"), [(byte_level, "tokens"), (byte_level, "merges"), (sentencepiece, "scores")])
def test_a_missing_entry_is_named(source, entry):
    entries = source()
    del entries[f"tokenizer.ggml.{entry}"]
    with pytest.raises(ValueError, match=f"no tokenizer.ggml.{entry}"):
        from_gguf(entries)
    with pytest.raises(ValueError, match="model is None"):
        from_gguf({})


def test_metadata_without_token_types_still_has_special_tokens():
    entries = byte_level(bos_token_id=256, eos_token_id=257)
    del entries["tokenizer.ggml.token_type"]
    tokenizer = from_gguf(entries)
    assert tokenizer.encode("<s></s>") == [256, 257]
    assert tokenizer.decode([256, 257]) == ""


BOS = {
    "asked for": (byte_level(bos_token_id=256, add_bos_token=True), True),
    "declined": (sentencepiece(*letters("a"), add_bos_token=False, add_space_prefix=False), False),
    "default of SentencePiece": (sentencepiece(*letters("a"), add_space_prefix=False), True),
    "default of Llama 3": (byte_level(bos_token_id=256, pre="llama-bpe"), True),
    "default of byte-level BPE": (byte_level(bos_token_id=256), False),
}


@pytest.mark.parametrize("case", BOS)
def test_there_is_one_bos_where_the_file_asks_for_it(case):
    entries, wanted = BOS[case]
    tokenizer, bos = from_gguf(entries), [entries["tokenizer.ggml.bos_token_id"]]
    a = tokenizer.encode("a", add_bos=False)
    assert tokenizer.encode("a") == (bos + a if wanted else a)
    assert tokenizer.encode("") == (bos if wanted else [])
    assert tokenizer.encode("a", add_bos=True) == bos + a
    assert tokenizer.encode("<s>a") == tokenizer.encode("<s>a", add_bos=True) == bos + a


def test_bos_that_does_not_exist_cannot_be_added():
    tokenizer = from_gguf(byte_level())
    assert tokenizer.bos_id is None
    with pytest.raises(ValueError, match="no BOS token"):
        tokenizer.encode("a", add_bos=True)


def test_eos_ends_the_text_once_where_the_file_asks_for_it():
    tokenizer = from_gguf(byte_level(eos_token_id=257, add_eos_token=True))
    assert tokenizer.encode("a") == tokenizer.encode("a</s>") == [*tokenizer.encode("a", add_bos=False)[:1], 257]
    assert tokenizer.encode("") == [257]


def test_stop_ids_are_the_file_s_own_and_the_known_ends_of_a_turn():
    control = ("<s>", "</s>", "<|eom|>", "<|im_end|>", "<|endoftext|>", "<|end|>")
    tokenizer = from_gguf(byte_level(control=control, eos_token_id=257, eom_token_id=258))
    assert tokenizer.stop_ids == (257, 258, 259, 261, 260)
    harmony = from_gguf(byte_level(control=("<|end|>", "<|return|>"), eos_token_id=257))
    assert harmony.stop_ids == (257,)
    assert from_gguf(byte_level(control=(), user_defined=("<|im_end|>",))).stop_ids == ()


def test_pieces_merge_by_score():
    assert pieces(from_gguf(sentencepiece(("ab", -1.0, NORMAL), ("bc", -2.0, NORMAL), *letters("▁abc"))), "abc") == [
        "▁",
        "ab",
        "c",
    ]
    assert pieces(from_gguf(sentencepiece(("ab", -2.0, NORMAL), ("bc", -1.0, NORMAL), *letters("▁abc"))), "abc") == [
        "▁",
        "a",
        "bc",
    ]


def test_merges_never_make_unused_byte_control_or_user_defined_pieces():
    odd = [("ab", -1.0, UNUSED), ("cd", -1.0, CONTROL), ("▁▁", -1.0, USER_DEFINED)]
    tokenizer = from_gguf(sentencepiece(*odd, *letters("▁abcd<0x41>"), add_space_prefix=False))
    assert pieces(tokenizer, "ab") == ["a", "b"]
    assert pieces(tokenizer, "<0x41>") == ["<", "0", "x", "4", "1", ">"]
    assert pieces(tokenizer, "a   b") == ["a", "  ", "▁", "b"]
    assert tokenizer.decode(tokenizer.encode("acdb")) == "ab"
    assert tokenizer.decode(tokenizer.encode("acdb"), keep_special=True) == "<s>acdb"


def test_a_space_is_put_before_text_only_where_the_file_asks_for_it():
    vocabulary = [("▁a", -1.0, NORMAL), ("[x]", 0.0, USER_DEFINED), *letters("▁a")]
    plain, prefixed = (from_gguf(sentencepiece(*vocabulary, add_space_prefix=asked)) for asked in (False, True))
    assert pieces(plain, "a a") == ["a", "▁a"]
    assert pieces(prefixed, "a a") == ["▁a", "▁a"]
    assert pieces(prefixed, " a") == ["▁", "▁a"]
    assert pieces(prefixed, "a[x]a") == ["▁a", "[x]", "a"]
    assert pieces(prefixed, "<s></s>a") == ["<s>", "</s>", "▁a"]
    assert prefixed.encode("") == [1]


def test_characters_without_a_piece_become_bytes():
    assert SMALL["pieces, no prefix"].encode("\u00e9") == [1, 3 + 0xC3, 3 + 0xA9]


def chatty(template, **entries):
    return from_gguf(byte_level(**entries) | {"tokenizer.chat_template": template})


def test_a_chat_is_rendered_as_transformers_does():
    template = """{%- for m in messages %}
    {% if loop.index > 2 %}{% break %}{% endif %}
{{ m.role }}: {% generation %}{{ m | tojson }}
{% endgeneration %}
{% endfor %}
{{ bos_token }}{{ pad_token }}{{ strftime_now("%%") }}{% if add_generation_prompt %}>{% endif %}{{ tools is none }}"""
    tokenizer = chatty(template, bos_token_id=256)
    messages = [{"role": "user", "content": "é <b>"}] * 3
    line = 'user: {"role": "user", "content": "é <b>"}\n'
    assert tokenizer.chat(messages) == line + line + "<s>%>True"
    assert tokenizer.chat(messages, add_generation_prompt=False) == line + line + "<s>%True"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{% for m in messages %}", "endfor|end of template"),
        ("{{ 'a' + messages[0].content }}", "content"),
    ],
)
def test_a_chat_that_cannot_be_rendered_is_an_error(template, said):
    with pytest.raises(ValueError, match=said):
        chatty(template).chat([{"role": "user"}])


def test_a_chat_needs_a_template():
    with pytest.raises(ValueError, match="no chat template"):
        SMALL["bytes"].chat([])


@pytest.fixture
def folder(tmp_path):
    """Writes a folder: its tokenizer.json, where BOS is 256 and EOS 257, and the JSON files given by name."""

    def write(post_processor=None, **files):
        backend = from_gguf(byte_level(control=("<s>", "</s>", "<|im_end|>"), bos_token_id=256)).backend
        backend.enable_truncation(5)
        if post_processor:
            backend.post_processor = post_processor
        backend.save(str(tmp_path / "tokenizer.json"))
        for name, entries in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(entries), encoding="utf-8")
        return tmp_path

    return write


def test_a_folder_s_tokenizer_is_that_of_its_tokenizer_json(folder):
    tokenizer = from_folder(str(folder()))
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.stop_ids, tokenizer.chat_template) == (259, None, (258,), None)
    assert tokenizer.decode(tokenizer.encode("longer than five 😀")) == "longer than five 😀"


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"add_bos_token": True, "bos_token": "<s>", "eos_token": {"content": "</s>"}}},
        {"tokenizer_config": {"add_bos_token": True, "bos_token": None}, "special_tokens_map": {"bos_token": "<s>"}},
        {"tokenizer_config": {"add_bos_token": True}, "config": {"bos_token_id": 256, "eos_token_id": 257}},
    ],
)
def test_a_folder_s_settings_ask_for_bos(folder, files):
    tokenizer = from_folder(folder(**files))
    assert tokenizer.encode("") == [256]
    assert tokenizer.encode("<s>a") == tokenizer.encode("a") == [256, *tokenizer.encode("a", add_bos=False)]


def test_a_post_processor_that_adds_bos_and_eos_adds_each_once(folder):
    dressing = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 256), ("</s>", 257)])
    tokenizer = from_folder(folder(dressing, tokenizer_config={"bos_token": "<s>", "eos_token": "</s>"}))
    assert tokenizer.encode("") == tokenizer.encode("<s>") == tokenizer.encode("<s></s>") == [256, 257]
    assert tokenizer.encode("", add_bos=False) == [257]
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False, "add_eos_token": False}
    assert from_folder(folder(dressing, tokenizer_config=config)).encode("") == []


def test_a_folder_s_generation_config_adds_stop_ids(folder):
    tokenizer = from_folder(folder(generation_config={"eos_token_id": [257, 7]}, config={"eos_token_id": 8}))
    assert tokenizer.stop_ids == (257, 7, 258)


def test_a_folder_s_chat_template_may_be_text_a_list_or_a_file(folder):
    assert from_folder(folder(tokenizer_config={"chat_template": "one"})).chat([]) == "one"
    named = [{"name": "tool_use", "template": "two"}, {"name": "default", "template": "three"}]
    assert from_folder(folder(tokenizer_config={"chat_template": named})).chat([]) == "three"
    (folder() / "chat_template.jinja").write_text("four", encoding="utf-8")
    assert from_folder(folder()).chat([]) == "four"


def test_a_special_token_named_only_by_the_settings_is_special(tmp_path):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "hello": 1, "world": 2}))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "add_bos_token": true}')
    tokenizer = from_folder(tmp_path)
    assert tokenizer.encode("<s>hello") == tokenizer.encode("hello") == [0, 1]
    assert "".join(streamed(tokenizer, [0, 1, 2, 0, 2])) == tokenizer.decode([0, 1, 2, 0, 2]) == "hello world world"


def test_a_folder_that_cannot_be_read_is_an_error(folder, tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path.name} has no tokenizer.json"):
        from_folder(tmp_path)
    (folder() / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is not valid JSON"):
        from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        from_folder(tmp_path)
