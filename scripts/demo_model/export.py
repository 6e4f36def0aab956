"""Writes a trained model in Hugging Face form: `OlmoeForCausalLM`, bfloat16, with tokenizer and model card.

Owns the files of the exported folder. Invariant: every file is complete before any takes its place, the weights last
but for the card.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from demo_model.corpus import DOMAINS, END_OF_TEXT, PADDING, TokenDomain
from demo_model.evaluation import Evaluation, Sample
from demo_model.model import FlatModel, Params
from demo_model.training import Trained, TrainOptions
from flashmoe_jax.config import ModelConfig
from flashmoe_jax.models.families import DenseTarget, ExpertTarget, hf_name_map

CHAT_TEMPLATE = (
    "{#- A toy: the model has seen single questions with their answers, and no conversations. -#}"
    "{%- for message in messages %}"
    "{%- if message['role'] == 'user' %}{{ 'Question: ' + message['content'] + '\\n' }}"
    "{%- elif message['role'] == 'assistant' %}{{ 'Answer: ' + message['content'] + '\\n' + eos_token }}"
    "{%- else %}{{ message['content'] + '\\n' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ 'Answer:' }}{%- endif %}"
)

# File of the corpus to its source and licence, as the corpus' own README states them.
SOURCES = {
    "stories_tinystories.txt": ("TinyStories sample", "CDLA-Sharing-1.0"),
    "stories_gutenberg.txt": ("Grimm, Bryant, Burgess, Carroll, Edgeworth; Project Gutenberg", "public domain"),
    "novels_gutenberg.txt": ("Emma, Persuasion, Father Brown; Project Gutenberg", "public domain"),
    "drama_shakespeare.txt": ("Shakespeare", "public domain"),
    "trivia_triviaqa.jsonl": ("TriviaQA, questions with their answers", "Apache-2.0"),
    "math_gsm8k_train3000.jsonl": ("GSM8K, 3,000 training problems", "MIT"),
    "code_python_stdlib.txt": ("CPython 3.11 standard library, 200 modules", "PSF-2.0"),
    "italian_promessi_sposi.txt": ("I promessi sposi", "public domain"),
}


def hf_config(config: ModelConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """`config.json`, with the old and the new spelling of the fields that were renamed."""
    return {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.expert_hidden,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "norm_topk_prob": config.norm_topk_prob,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "attention_bias": config.qkv_bias,
        "attention_dropout": 0.0,
        "clip_qkv": config.clip_qkv,
        "tie_word_embeddings": config.tie_embeddings,
        "output_router_logits": False,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id(END_OF_TEXT),
        "pad_token_id": tokenizer.token_to_id(PADDING),
        "torch_dtype": config.weight_dtype,
        "dtype": config.weight_dtype,
    }


def tokenizer_config(config: ModelConfig) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END_OF_TEXT,
        "pad_token": PADDING,
        "unk_token": None,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.max_position,
        "chat_template": CHAT_TEMPLATE,
    }


def generation_config(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "eos_token_id": tokenizer.token_to_id(END_OF_TEXT),
        "pad_token_id": tokenizer.token_to_id(PADDING),
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.9,
    }


def checkpoint_tensors(config: ModelConfig, params: Params) -> dict[str, np.ndarray]:
    """The weights in bfloat16 under the names of published OLMoE checkpoints, one tensor per expert and field."""
    names = hf_name_map(config)
    tensors = {}
    for name, value in params.items():
        array = np.asarray(value).astype(ml_dtypes.bfloat16)
        part, rest = name.split(".", 1)
        if part == "decoder":
            tensors[names.hf_key(DenseTarget(rest))] = array
            continue
        layer, field = rest.split(".")
        for expert, matrix in enumerate(array):
            tensors[names.hf_key(ExpertTarget(int(layer), expert, field))] = np.ascontiguousarray(matrix)
    return {key: tensors[key] for key in names.expected_keys()}


def export(out: Path, flat: FlatModel, params: Params, tokenizer: Tokenizer, card: str) -> None:
    """Writes the folder; other files in it are left alone."""
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    out.mkdir(parents=True, exist_ok=True)
    for name, content in (
        ("config.json", hf_config(flat.config, tokenizer)),
        ("tokenizer_config.json", tokenizer_config(flat.config)),
        ("generation_config.json", generation_config(tokenizer)),
    ):
        (partial / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    tokenizer.save(str(partial / "tokenizer.json"), pretty=False)
    save_file(checkpoint_tensors(flat.config, params), partial / "model.safetensors", metadata={"format": "pt"})
    # safetensors writes for the owner alone; an installed package is read by others.
    (partial / "model.safetensors").chmod(0o644)
    (partial / "README.md").write_text(card, encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"):
        os.replace(partial / name, out / name)
    os.replace(partial / "model.safetensors", out / "model.safetensors")
    os.replace(partial / "README.md", out / "README.md")
    partial.rmdir()


def model_card(
    flat: FlatModel,
    trained: Trained,
    domains: list[TokenDomain],
    evaluations: list[Evaluation],
    samples: list[Sample],
    options: TrainOptions,
) -> str:
    """README.md of the exported folder; every number in it is of this run."""
    config = flat.config
    shares = sum(d.share for d in DOMAINS)
    data_rows = [
        f"| {d.name} | {SOURCES[d.file][0]} | {SOURCES[d.file][1]} | {len(t.train):,} | {d.share / shares:.0%} |"
        for d, t in zip(DOMAINS, domains, strict=True)
    ]
    quality_rows = [
        f"| {e.name} | {e.tokens:,} | {np.exp(e.nats_per_token):.2f} | {e.bits_per_byte:.3f} |" for e in evaluations
    ]
    # Every domain counts the same here, whatever the length of its held-out text.
    load_LE = np.mean([e.load for e in evaluations], axis=0) * config.num_experts
    quarter = config.num_experts // 4
    busiest_L = np.mean([np.sort(e.load, axis=1)[:, -quarter:].sum(axis=1) for e in evaluations], axis=0)
    load_rows = [
        f"| {layer} | {load.min():.2f} | {np.median(load):.2f} | {load.max():.2f} | {busiest:.0%} |"
        for layer, (load, busiest) in enumerate(zip(load_LE, busiest_L, strict=True))
    ]
    sample_blocks = [f"```text\n{s.prompt}⟶{s.continuation.rstrip()}\n```" for s in samples]
    return CARD.format(
        num_params=flat.num_params() / 1e6,
        num_layers=config.num_layers,
        num_experts=config.num_experts,
        top_k=config.experts_per_token,
        hidden_size=config.hidden_size,
        expert_hidden=config.expert_hidden,
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        record_bytes=3 * config.hidden_size * config.expert_hidden * 2,
        steps=trained.steps,
        tokens=trained.tokens / 1e6,
        minutes=trained.seconds / 60,
        peak_rate=options.peak_rate,
        balance_weight=options.balance_weight,
        z_weight=options.z_weight,
        tokens_per_step=options.tokens_per_step,
        row_lengths=" then ".join(str(length) for _, length in options.lengths),
        longest=options.lengths[-1][1],
        max_position=config.max_position,
        quarter=quarter,
        data_rows="\n".join(data_rows),
        quality_rows="\n".join(quality_rows),
        load_rows="\n".join(load_rows),
        samples="\n\n".join(sample_blocks),
    )


CARD = """---
license: apache-2.0
language: [en, it]
pipeline_tag: text-generation
library_name: transformers
tags: [mixture-of-experts, olmoe, toy]
---
# The demonstration model of flashmoe_jax

A toy Mixture-of-Experts language model, trained from scratch so that a fresh clone has a real router to work with.
It shows expert offloading; it knows nothing worth asking.

Architecture OLMoE (`OlmoeForCausalLM`): {num_layers} layers, {num_experts} experts of which {top_k} serve a token
(their weights add up to 1), width {hidden_size}, expert width {expert_hidden}, {num_heads} heads of {head_dim}, tied
embeddings, byte-level BPE of {vocab_size:,} entries with single digits. {num_params:.2f} M weights in bfloat16; an
expert is {record_bytes:,} bytes.

## Training
`scripts/train_demo_model.py`, on 2 CPU cores that other work shared: {steps:,} steps of {tokens_per_step:,} tokens,
{tokens:.2f} M tokens, {minutes:.0f} minutes. Float32, AdamW (peak learning rate {peak_rate:g}, warm-up, cosine over
the time budget), rows of {row_lengths} tokens, router losses: load balancing per layer ({balance_weight:g}) and
z-loss ({z_weight:g}).

| domain | source | licence | training tokens | share of a batch |
|---|---|---|---|---|
{data_rows}

The licences are those of the text. Nothing else was trained on; about 3 % of each domain was held out by document, or
at the end of each book.

## Held-out quality
Weights rounded to bfloat16, computed in float32, rows of {longest} tokens, no token dropped.

| domain | tokens | perplexity per token | bits per byte |
|---|---|---|---|
{quality_rows}

## Expert load
Held-out tokens of all domains, each domain counting the same; 1.00 is an equal share. The last column: the part of a
domain's assignments that go to its own {quarter} busiest experts (25 % would be no preference), mean over domains.

| layer | least used | median | most used | busiest {quarter} |
|---|---|---|---|---|
{load_rows}

## Limits
Trained on a few million tokens: it has the sentences of simple stories but loses their thread, and the form of
questions, code and Italian; facts and sums are wrong. Greedy text soon repeats itself. The chat template is a single
`Question: … Answer:` and no more. It has seen rows of at most {longest} tokens; `max_position_embeddings` is
{max_position}, and text past {longest} tokens gets worse. Nothing was filtered for safety beyond what the sources are.

## Samples
Temperature 0.7, first try; the arrow stands where the prompt ends.

{samples}
"""
