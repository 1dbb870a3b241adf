"""Files of llama.cpp's that come in: each family's, written by the package `gguf` from transformers' own tensors as llama.cpp's
converter lays them out, beside the folder that transformers wrote; and beside what transformers itself reads from such a file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from barellm.checkpoint.weights import Weights  # noqa: E402
from barellm.data.huggingface import HuggingFace  # noqa: E402
from barellm.interop import gguf_writer as out  # noqa: E402
from barellm.interop.gguf import LLAMA_3_WORDS, MODEL_TYPES, PAIRED, QWEN_2_WORDS  # noqa: E402
from barellm.interop.gguf_tokenizer import pairs_by_score  # noqa: E402
from barellm.interop.sources import open_weights  # noqa: E402
from tests.chat import families as pipelines  # noqa: E402
from tests.chat.families import fast_tokenizer  # noqa: E402
from tests.oracle.families import FAMILIES, case  # noqa: E402

pytestmark = pytest.mark.oracle
ARCHITECTURES = {model_type: name for name, model_type in MODEL_TYPES.items()}
READ_BY_TRANSFORMERS = ("llama", "qwen2", "qwen3", "gemma2", "gemma3_text")
WRITTEN = {  # what a file says: llama.cpp's key -> the attribute of transformers' configuration
    "block_count": "num_hidden_layers", "attention.head_count": "num_attention_heads", "embedding_length": "hidden_size",
    "attention.head_count_kv": "num_key_value_heads", "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps", "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
    "use_parallel_residual": "use_parallel_residual", "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling", "vocab_size": "vocab_size",
}  # fmt: skip


def as_stored(config: Any, name: str, x: np.ndarray) -> np.ndarray:
    """A tensor as llama.cpp's converter lays it out."""
    kind, heads = config.model_type, config.num_attention_heads
    if "query_key_value" in name:  # of each head q, k and v -> all q, all k, all v
        return x.reshape(heads, 3, -1, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)
    n = {"q_proj": heads, "k_proj": getattr(config, "num_key_value_heads", heads)}.get(name.split(".")[-2])
    if n and kind in PAIRED:
        return x.reshape(n, 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
    return x + 1 if kind.startswith("gemma") and "norm" in name else x


def write(path: Path, model: Any, quantized: Any = None) -> dict[str, np.ndarray]:
    """A file of a model of transformers'; its matrices of random codes of a type, if one is named: those are returned."""
    config = model.config
    name = ARCHITECTURES[config.model_type]
    arch = next(kind for kind, known in gguf.MODEL_ARCH_NAMES.items() if known == name)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    writer, codes = gguf.GGUFWriter(path, name), {}
    for key, attribute in WRITTEN.items():
        value = getattr(config, attribute, None)
        if value is not None:
            add = (
                writer.add_bool if isinstance(value, bool) else writer.add_uint32 if isinstance(value, int) else writer.add_float32
            )
            add(f"{name}.{key}", value)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(size)
    rope = config.rope_parameters
    local = rope.get("sliding_attention")
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if local:
        writer.add_rope_freq_base_swa(local["rope_theta"])
    writer.add_rope_dimension_count(int(size * rope.get("partial_rotary_factor", 1.0)))
    if rope["rope_type"] in ("yarn", "linear"):
        writer.add_rope_scaling_type(getattr(gguf.RopeScalingType, rope["rope_type"].upper()))
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope.get("original_max_position_embeddings", 0))
    if rope["rope_type"] == "llama3":
        turns = rope["rope_theta"] ** (np.arange(0, size, 2) / size) * 2 * np.pi / rope["original_max_position_embeddings"]
        between = (1 / turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
        writer.add_tensor(
            "rope_freqs.weight", (1 / np.clip((1 - between) / rope["factor"] + between, 1 / rope["factor"], 1)).astype("f")
        )
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        if rope.get("attention_factor"):
            writer.add_rope_scaling_attn_factors(rope["attention_factor"])
        for key in ("short", "long"):
            writer.add_tensor(f"rope_factors_{key}.weight", np.array(rope[f"{key}_factor"], np.float32))
    rng = np.random.default_rng(3)
    for theirs, parameter in model.state_dict().items():
        theirs = "embed_out.weight" if theirs == "lm_head.weight" and config.model_type == "gpt_neox" else theirs
        if theirs == "lm_head.weight" and config.tie_word_embeddings:
            continue
        x = np.ascontiguousarray(as_stored(config, theirs, parameter.numpy()))
        stored = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
        assert stored is not None, theirs
        if quantized is None or x.ndim == 1:
            writer.add_tensor(stored, x)
        else:
            per, nbytes = gguf.GGML_QUANT_SIZES[quantized]
            codes[theirs] = random_blocks(rng, quantized, (x.shape[0], x.shape[1] // per * nbytes))
            writer.add_tensor(stored, codes[theirs], raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return codes


def random_blocks(rng: np.random.Generator, kind: Any, shape: tuple[int, int]) -> np.ndarray:
    """Rows of any bytes whose numbers are finite."""
    _, nbytes = gguf.GGML_QUANT_SIZES[kind]
    found = rng.integers(0, 256, (shape[0] * shape[1] // nbytes, nbytes), dtype=np.uint8)
    for _ in range(100):
        with np.errstate(all="ignore"):
            wrong = ~np.isfinite(gguf.dequantize(found, kind)).all(1)
        if not wrong.any():
            return found.reshape(shape)
        found[wrong] = rng.integers(0, 256, (wrong.sum(), nbytes), dtype=np.uint8)
    raise AssertionError("no finite block was found")


def check_equal(found: Weights, expected: Weights) -> None:
    for name, value in out.meanings(expected.model).items():
        assert out.meanings(found.model)[name] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), name
    for name, t in expected.tensors.items():
        a, b = (each.read_rows(name, 0, int(t.shape[0])) for each in (found, expected))
        assert np.allclose(a, b, rtol=0, atol=2e-7) if "norm" in name else np.array_equal(a, b), name


# What llama.cpp has in code, and no file says: layers with windows or without RoPE, a scale of attention by the size of a head.
REFUSED = {  # llama.cpp ends with an error on such a file
    ("qwen3", "biases"): "attn_q.bias", ("olmo2", "biases"): "attn_q.bias", ("arcee", "biases"): "attn_q.bias",
    ("gpt_neox", "serial"): "attention_bias",
}  # fmt: skip
CASES = [
    (family, variant) for family, (_, variants) in FAMILIES.items() for variant in variants
    if family in ARCHITECTURES and variant != "windows" and (family, variant) != ("gemma3_text", "")
]  # fmt: skip


@pytest.mark.parametrize("family, variant", CASES)
def test_a_file_is_the_folder_that_it_was_made_of(tmp_path, family, variant):
    """No file says its activation: a model with another one than its family's is not one of llama.cpp's."""
    more = {"hidden_act": "silu"} if (family, variant) == ("llama", "biases") else {}
    more |= {"query_pre_attn_scalar": 12} if family.startswith("gemma") else {}
    made = case(tmp_path / "folder", family, variant, **more)
    write(tmp_path / "m.gguf", made.model)
    if family == "smollm3":  # llama.cpp has which layers have no RoPE in code
        assert open_weights(tmp_path / "m.gguf").model.nope_layers == ""
        return
    check_equal(open_weights(tmp_path / "m.gguf"), made.weights)


@pytest.mark.parametrize("family, variant", CASES)
def test_an_export_is_the_file_of_the_same_model(tmp_path, family, variant):
    """`barellm export` writes the tensors and the keys that are written above by the package, of the same folder."""
    more = {"hidden_act": "silu"} if (family, variant) == ("llama", "biases") else {}
    more |= {"query_pre_attn_scalar": 12} if family.startswith("gemma") else {}
    more |= {"no_rope_layers": [1, 1, 1]} if family == "smollm3" else {}
    more |= {"sliding_window": None} if family in ("mistral", "phi3") else {}
    if family == "phi3":  # llama.cpp takes the long factors by the context, which is 256 tokens at least, not by the text
        more |= {"max_position_embeddings": 4096, "original_max_position_embeddings": 1024}
    made = case(tmp_path / "folder", family, variant, **more)
    write(tmp_path / "expected.gguf", made.model)
    why = out.refused(made.weights.model)
    if (family, variant) in REFUSED:
        assert why is not None and REFUSED[family, variant] in why
        return
    assert why is None
    out.write(made.weights, tmp_path / "m.gguf", dtype="fp32", name="m", licence=None)
    found, expected = (gguf.GGUFReader(tmp_path / name) for name in ("m.gguf", "expected.gguf"))
    arrays, others = ({t.name: t.data for t in one.tensors} for one in (found, expected))
    assert arrays.keys() == others.keys()
    assert all(np.allclose(arrays[name], others[name], rtol=1e-6, atol=2e-7) for name in others)
    keys = {key: field.contents() for key, field in found.fields.items()}
    for key, field in expected.fields.items():
        if not key.startswith(("GGUF.", "general.")):
            value = field.contents()
            assert keys[key] == (pytest.approx(value) if isinstance(value, float) else value), key
    check_equal(open_weights(tmp_path / "m.gguf"), made.weights)
    llama_cpp = pytest.importorskip("llama_cpp")
    tokens = np.random.default_rng(0).integers(0, made.weights.model.vocab_size, 24)
    with torch.no_grad():
        want = made.model(torch.tensor(tokens[None])).logits[0].numpy()
    llama = llama_cpp.Llama(str(tmp_path / "m.gguf"), n_ctx=64, logits_all=True, verbose=False, n_threads=1, type_k=0, type_v=0)
    llama.eval(tokens.tolist())
    error = np.linalg.norm(llama.scores[:24] - want) / np.linalg.norm(want)
    assert error < (1e-3 if family.startswith(("gemma", "gpt_neox")) else 1e-5)  # its GELU is a table of 16 bits


@pytest.mark.parametrize("family, changes, says", [
    ("qwen3", {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "use_sliding_window": True,
               "sliding_window": 7}, "model.sliding_window"),
    ("mistral", {"sliding_window": 7}, "model.sliding_window is 7"), ("phi3", {"sliding_window": 7}, "model.sliding_window is 7"),
    ("smollm3", {"no_rope_layers": [1, 0, 1]}, "model.nope_layers is '1'"),
    ("llama", {"hidden_act": "gelu_pytorch_tanh"}, "model.activation is 'gelu'"),
    ("gemma2", {"query_pre_attn_scalar": 20}, "model.attention_multiplier"), ("olmo3", {}, "model.family is 'olmo3'"),
])  # fmt: skip
def test_what_llama_cpp_would_compute_otherwise_is_refused(tmp_path, family, changes, says):
    why = out.refused(case(tmp_path, family, **changes).weights.model)
    assert why is not None and says in why and why.endswith("export it as huggingface")


@pytest.mark.parametrize("family", [family for family in READ_BY_TRANSFORMERS if family in FAMILIES])
def test_transformers_reads_the_same_from_a_file(tmp_path, family):
    made = case(tmp_path / "folder", family, **({"head_dim": 128} if family == "qwen3" else {}))  # no key_length is read of a Qwen3
    write(tmp_path / "m.gguf", made.model)
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf")
    again = type(made.model)(made.model.config)  # what was read of a GGUF file is not saved there
    again.load_state_dict(read.state_dict())
    again.save_pretrained(tmp_path / "again")
    found, expected = open_weights(tmp_path / "m.gguf"), open_weights(tmp_path / "again")
    for name, t in found.tensors.items():
        a, b = (each.read_rows(name, 0, int(t.shape[0])) for each in (found, expected))
        assert np.allclose(a, b, rtol=0, atol=2e-7), name


TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "F16", "BF16")


@pytest.mark.parametrize("kind", TYPES)
def test_every_type_of_block_has_the_package_s_numbers(tmp_path, kind):
    """Of matrices whose rows lie in another order, too; all of it, and pieces that begin anywhere."""
    kind = gguf.GGMLQuantizationType[kind]
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "head_dim": 64,
        "vocab_size": 65,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    made = case(tmp_path / "folder", "llama", **sizes)
    codes = write(tmp_path / "m.gguf", made.model, kind)
    found = open_weights(tmp_path / "m.gguf")
    values = {name: gguf.dequantize(x, kind) for name, x in codes.items()}
    wte = values["model.embed_tokens.weight"]
    assert np.array_equal(found.read_rows("wte", 0, 65), wte) and np.array_equal(found.read_rows("wte", 3, 17), wte[3:17])
    q, k, v = (values[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv")
    unpaired = [x.reshape(-1, 32, 2, 256).swapaxes(1, 2).reshape(x.shape) for x in (q, k)]
    packed = np.concatenate([*unpaired, v])
    assert np.array_equal(found.read_rows("h.1.attn.qkv.weight", 0, len(packed)), packed)
    assert np.array_equal(found.read_rows("h.1.attn.qkv.weight", 250, 300), packed[250:300])


KINDS = {"llama3": ("gpt2", "llama-bpe"), "qwen": ("gpt2", "qwen2"), "starcoder": ("gpt2", "smollm"), "gpt_neox": ("gpt2", "olmo")}
KINDS |= {"llama2": ("llama", ""), "gemma": ("llama", "")}
SAMPLES = ("The quick brown fox", " jumps  over\n\n\tthe 12345 dogs", "naïve Übermut! it's", "你好 🙂 é <b>", "<|im_end|> </s>", "")


def as_pieces(content: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer of SentencePiece's kind as its converters make it: all pairs, in the order of their pieces' scores, no cuts."""
    vocab, rank = content["model"]["vocab"], {}
    for i, pair in enumerate(content["model"]["merges"]):
        rank.setdefault("".join(pair), i)
    scores = {i: -float(rank[name]) if name in rank else -1e9 for name, i in vocab.items()}
    return content | {"pre_tokenizer": None, "model": content["model"] | {"merges": pairs_by_score(vocab, scores)}}


@pytest.mark.parametrize("family", KINDS)
def test_an_exported_tokenizer_has_its_ids_in_llama_cpp(tmp_path, family):
    content = json.loads(fast_tokenizer(family).to_str())
    content = as_pieces(content) if KINDS[family][0] == "llama" else content
    content["normalizer"] = {"type": "NFC"} if family == "qwen" else None if family == "gpt_neox" else content["normalizer"]
    if family == "qwen":
        content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = QWEN_2_WORDS
    if family == "llama3":
        content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = LLAMA_3_WORDS
    tokenizer = HuggingFace(json.dumps(content).encode(), path=Path("made"))
    sizes = {"vocab_size": tokenizer.vocab_size, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    made = case(tmp_path / "folder", "llama", **sizes).weights
    note = out.write(replace(made, tokenizer=tokenizer), tmp_path / "m.gguf", dtype="fp32", name="m", licence=None)
    assert (note is None) != (family == "qwen") and "without" not in (note or "")
    read = open_weights(tmp_path / "m.gguf").tokenizer
    assert read is not None
    samples = [*SAMPLES, "user assistant", "def f(x):\n    return x", "  two spaces  ", "Übermut"]
    assert [read.encode(text).tolist() for text in samples] == [tokenizer.encode(text).tolist() for text in samples]
    llama_cpp = pytest.importorskip("llama_cpp")
    llama = llama_cpp.Llama(str(tmp_path / "m.gguf"), vocab_only=True, verbose=False)
    for text in filter(None, samples):
        assert llama.tokenize(text.encode(), add_bos=False, special=False) == tokenizer.encode(text).tolist(), text


def test_a_tokenizer_that_merges_in_another_order_is_left_out_and_said(tmp_path):
    made = case(tmp_path / "folder", "llama", vocab_size=700, rope_parameters={"rope_type": "default", "rope_theta": 1e4}).weights
    for family, why in (("llama2", "merges pieces in another order"), ("llama3", "its rule for words is not that of GPT-2")):
        tokenizer = HuggingFace(fast_tokenizer(family).to_str().encode(), path=Path("made"))
        note = out.write(replace(made, tokenizer=tokenizer), tmp_path / family, dtype="fp32", name="m", licence=None)
        assert note is not None and note.startswith("without a tokenizer: ") and why in note


@pytest.mark.parametrize("family", KINDS)
def test_a_file_s_tokenizer_has_the_ids_of_the_folder_s(tmp_path, family):
    """A piece of SentencePiece's is made of two others in an order that only its score says."""
    content = json.loads(fast_tokenizer(family).to_str())
    added = {token["id"]: token for token in content["added_tokens"]}
    ids = {i: name for name, i in content["model"]["vocab"].items()} | {i: token["content"] for i, token in added.items()}
    names, rank = [ids[i] for i in range(len(ids))], {}
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in content["model"]["merges"]]
    for i, pair in enumerate(merges):
        rank.setdefault(pair.replace(" ", ""), i)
    kinds = [
        3 if added.get(i, {}).get("special") else 4 if i in added else 6 if n.startswith("<0x") else 1 for i, n in enumerate(names)
    ]
    model, rule = KINDS[family]
    made = case(tmp_path / "folder", "llama", vocab_size=len(names), rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    write(tmp_path / "bare.gguf", made.model)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for field in gguf.GGUFReader(tmp_path / "bare.gguf").fields.values():
        if field.name.startswith("llama."):
            writer.add_key_value(field.name, field.contents(), field.types[0])
    writer.add_tokenizer_model(model)
    writer.add_token_list(names)
    writer.add_token_types(kinds)
    begin, end = pipelines.BEGIN.get(family), pipelines.END[family]
    writer.add_eos_token_id(names.index(end))
    if begin:
        writer.add_bos_token_id(names.index(begin))
        writer.add_add_bos_token(True)
    if model == "gpt2":
        writer.add_tokenizer_pre(rule)
        writer.add_token_merges(merges)
    else:
        kinds[0] = 2
        writer.add_token_scores([-float(rank.get(n, -1)) for n in names])
        writer.add_unk_token_id(0)
        writer.add_add_space_prefix(family != "gemma")
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    for tensor in gguf.GGUFReader(tmp_path / "bare.gguf").tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    pipelines.folder(tmp_path / "tokenizer", family)
    found = open_weights(tmp_path / "m.gguf").tokenizer
    expected = transformers.AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    assert found is not None
    for text in SAMPLES:
        plain = expected(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert found.encode(text).tolist() == plain, text
        assert found.decode(found.encode(text)) == text
    for name in [token["content"] for token in added.values()]:
        assert found.encode(f"a{name}b", special=True).tolist() == expected(f"a{name}b", add_special_tokens=False)["input_ids"]
    assert found.conventions.end == names.index(end) and found.conventions.begin == (names.index(begin) if begin else None)
    assert found.conventions.templates["default"].startswith("{% for m")
