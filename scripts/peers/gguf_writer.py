"""An OLMoE checkpoint as one GGUF file for llama.cpp, in bounded memory.

Owns the names, dtypes and order of the tensors. Matrices keep their bfloat16 words; norms and routers become float32,
as llama.cpp wants them; the experts of a layer are stacked to `[E, F, D]`. Rotary embeddings need no permutation:
llama.cpp rotates OLMoE's halves as transformers does. There is no tokenizer in the file: prompts are token ids.
Invariant: one output tensor is in memory at a time, and the file appears whole or not at all.
"""

import argparse
import json
import os
import shutil
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

# A loop device has whole sectors only; padding to a page keeps its last bytes there, and direct I/O possible.
_FILE_ALIGNMENT = 4096
_LAYER_VECTORS = {
    "attn_norm": "input_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
}
_LAYER_MATRICES = {f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"} | {"attn_output": "self_attn.o_proj"}
_EXPERT_MATRICES = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
# Whatever else these could say, llama.cpp's graph of this architecture would compute another model.
_REQUIRED = {
    "model_type": "olmoe",
    "hidden_act": "silu",
    "norm_topk_prob": False,
    "attention_bias": False,
    "clip_qkv": None,
    "tie_word_embeddings": False,
}


class GgufError(Exception):
    """The checkpoint cannot be written as GGUF; the text says why and what to do."""


class Place(NamedTuple):
    """A tensor in a safetensors file."""

    path: Path
    offset: int  # bytes from the start of the file
    dtype: str
    shape: tuple[int, ...]


class Entry(NamedTuple):
    """One tensor of the GGUF file: its parts are stacked along a new first axis where there are several."""

    name: str
    sources: tuple[str, ...]
    is_float32: bool


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--hf", type=Path, required=True, metavar="DIR", help="Hugging Face directory of an OLMoE model"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the GGUF file")
    return parser


def locate_tensors(directory: Path) -> dict[str, Place]:
    """Every tensor of a directory's safetensors files.

    Raises:
        GgufError: there is none.
    """
    places = {}
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(header_bytes))
        for name, entry in header.items():
            if name != "__metadata__":
                offset = 8 + header_bytes + entry["data_offsets"][0]
                places[name] = Place(path, offset, entry["dtype"], tuple(entry["shape"]))
    if not places:
        raise GgufError(f"{directory} has no *.safetensors; give a Hugging Face directory")
    return places


def read_config(directory: Path) -> dict[str, Any]:
    """The model's config.json.

    Raises:
        GgufError: it is missing, or of a model that llama.cpp's `olmoe` does not compute.
    """
    try:
        config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    except OSError as error:
        raise GgufError(f"{directory}/config.json cannot be read: {error.strerror}") from None
    for name, value in _REQUIRED.items():
        if config.get(name, value) != value:
            raise GgufError(f"{name} is {config[name]!r}; only {value!r} can be written for llama.cpp")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", "default") != "default":
        raise GgufError(f"rope_type is {rope['rope_type']!r}; only the default one can be written")
    return config


def plan_entries(config: Mapping[str, Any]) -> Iterator[Entry]:
    """The file's tensors, in the order in which a forward pass needs them."""
    yield Entry("token_embd.weight", ("model.embed_tokens.weight",), False)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, source in _LAYER_VECTORS.items():
            yield Entry(f"blk.{layer}.{name}.weight", (f"{prefix}.{source}.weight",), True)
        for name, source in _LAYER_MATRICES.items():
            yield Entry(f"blk.{layer}.{name}.weight", (f"{prefix}.{source}.weight",), False)
        for name, source in _EXPERT_MATRICES.items():
            experts = (f"{prefix}.mlp.experts.{e}.{source}.weight" for e in range(config["num_experts"]))
            yield Entry(f"blk.{layer}.{name}.weight", tuple(experts), False)
    yield Entry("output_norm.weight", ("model.norm.weight",), True)
    yield Entry("output.weight", ("lm_head.weight",), False)


def read_entry(entry: Entry, places: Mapping[str, Place]) -> np.ndarray:
    """The tensor's values: float32, or uint16 words of bfloat16, `[...]` or `[E, ...]`."""
    parts = [_read_words(places[source]) for source in entry.sources]
    words = parts[0] if len(parts) == 1 else np.stack(parts)
    # bfloat16 is the upper half of float32.
    return (words.astype(np.uint32) << 16).view(np.float32) if entry.is_float32 else words


def write_gguf(hf: Path, out: Path, report: Callable[[str], None] = lambda _: None) -> None:
    """Writes the file.

    Args:
        hf: a Hugging Face directory, bfloat16.
        out: the file to write.
        report: takes a line per layer.

    Raises:
        GgufError: the model is another one, a tensor is missing or not bfloat16, or the disk is too small.
    """
    import gguf

    config, places = read_config(hf), locate_tensors(hf)
    entries = list(plan_entries(config))
    for source in (source for entry in entries for source in entry.sources):
        if source not in places:
            raise GgufError(f"{hf} has no tensor {source}; the model must be a whole OLMoE checkpoint")
        if places[source].dtype != "BF16":
            raise GgufError(f"{source} is {places[source].dtype}; only BF16 checkpoints can be written")
    file_bytes = sum(os.stat(path).st_size for path in {place.path for place in places.values()})
    if shutil.disk_usage(out.parent).free < 1.02 * file_bytes:
        raise GgufError(f"{out.parent} has no room for {file_bytes / 1e9:.1f} GB; choose another folder")
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        writer = gguf.GGUFWriter(part, "olmoe")
        _add_config(writer, config, gguf)
        for entry in entries:
            shape = places[entry.sources[0]].shape
            if len(entry.sources) > 1:
                shape = (len(entry.sources), *shape)
            dtype = np.dtype(np.float32 if entry.is_float32 else np.uint16)
            kind = gguf.GGMLQuantizationType.F32 if entry.is_float32 else gguf.GGMLQuantizationType.BF16
            writer.add_tensor_info(entry.name, shape, dtype, int(np.prod(shape)) * dtype.itemsize, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for entry in entries:
            if "ffn_norm" in entry.name:
                report(entry.name)
            writer.write_tensor_data(read_entry(entry, places))
        writer.close()
        with part.open("ab") as file:
            file.write(bytes(-file.tell() % _FILE_ALIGNMENT))
            os.fsync(file.fileno())
        part.rename(out)
    finally:
        part.unlink(missing_ok=True)


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        write_gguf(args.hf, args.out, lambda line: print(line, file=sys.stderr))
    except GgufError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(args.out)
    return 0


def _read_words(place: Place) -> np.ndarray:
    count = int(np.prod(place.shape))
    return np.fromfile(place.path, np.uint16, count, offset=place.offset).reshape(place.shape)


def _add_config(writer: Any, config: Mapping[str, Any], gguf: Any) -> None:
    rope = config.get("rope_parameters") or {}
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_tokenizer_model("none")


if __name__ == "__main__":
    sys.exit(main())
