"""Decoding defaults that a model brings along: `generation_config.json`.

Owns their reading. Does not own the parameters' ranges (`sampling_params.py`). Invariant: what the file says and we do
not follow is listed in `unused`, never dropped in silence.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashmoe_jax.errors import CheckpointError
from flashmoe_jax.text.sampling_params import SamplingParams
from flashmoe_jax.text.tokenizer import read_json


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """Defaults of one model.

    `do_sample` says whether its makers sample; `sampling` holds their parameters for that case, and its repetition
    penalty holds in both. `eos_token_ids` end a text. `unused` names the fields that would change the output and are
    not followed.
    """

    do_sample: bool = False
    sampling: SamplingParams = dataclasses.field(default_factory=lambda: SamplingParams(temperature=1.0))
    eos_token_ids: tuple[int, ...] = ()
    max_new_tokens: int | None = None
    unused: tuple[str, ...] = ()

    @classmethod
    def from_dir(cls, directory: str | Path) -> "GenerationDefaults":
        """Reads the files of a model directory or of a Hugging Face directory.

        End ids come from `generation_config.json`, else from the model's config; a directory without either has none.

        Raises:
            CheckpointError: a value of the wrong type or out of range.
        """
        directory = Path(directory)
        path = directory / "generation_config.json"
        fields = read_json(path)
        config = read_json(directory / "config.json") or read_json(directory / "manifest.json").get("hf_config", {})
        eos = fields.get("eos_token_id")
        if eos is None:
            eos = config.get("eos_token_id")
        names = [f.name for f in dataclasses.fields(SamplingParams) if fields.get(f.name) is not None]
        try:
            sampling = SamplingParams(**{"temperature": 1.0, **{name: fields[name] for name in names}})
            eos_token_ids = _ids(eos)
            max_new_tokens = fields.get("max_new_tokens")
            if max_new_tokens is not None and int(max_new_tokens) < 1:
                raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: {error}; correct the file or remove the field") from error
        return cls(
            do_sample=bool(fields.get("do_sample", False)),
            sampling=sampling,
            eos_token_ids=eos_token_ids,
            max_new_tokens=max_new_tokens,
            unused=_unused(fields),
        )


# Fields that change what transformers generates, with the values that leave it as it is.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "bad_words_ids": (None, []),
    "begin_suppress_tokens": (None, []),
    "diversity_penalty": (None, 0, 0.0),
    "encoder_repetition_penalty": (None, 1, 1.0),
    "epsilon_cutoff": (None, 0, 0.0),
    "eta_cutoff": (None, 0, 0.0),
    "exponential_decay_length_penalty": (None,),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "guidance_scale": (None, 1, 1.0),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "no_repeat_ngram_size": (None, 0),
    "num_beams": (None, 1),
    "penalty_alpha": (None, 0, 0.0),
    "sequence_bias": (None, {}, []),
    "stop_strings": (None, []),
    "suppress_tokens": (None, []),
    "top_h": (None,),
    "typical_p": (None, 1, 1.0),
}


def _unused(fields: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(name for name, neutral in _NEUTRAL.items() if name in fields and fields[name] not in neutral)


def _ids(value: Any) -> tuple[int, ...]:
    """Token ids written as nothing, one number or a list."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise TypeError(f"eos_token_id is {value!r}; token ids are whole numbers")
    return tuple(dict.fromkeys(ids))
