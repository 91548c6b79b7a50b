"""The sampling defaults of a folder in Hugging Face layout: generation_config.json.

The fields that vLLM and SGLang take are taken (`sampling_defaults.NAMES`). Besides them,
`do_sample: false` means greedy, as in transformers. Every value that the file has counts, transformers' own defaults
(top_k 50) too. `max_new_tokens`, which vLLM makes a limit for all requests and SGLang ignores, is not taken.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ...runtime.sampling_defaults import OPENAI_DEFAULTS, SamplingDefaults, checked_defaults
from ..model_files import read_json

FILE_NAME: Final = "generation_config.json"
_NOT_TAKEN: Final[dict[str, tuple[object, ...]]] = {
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "diversity_penalty": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "exponential_decay_length_penalty": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "frequency_penalty": (0,),
    "guidance_scale": (1,),
    "max_length": (20,),
    "max_new_tokens": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0,),
    "presence_penalty": (0,),
    "sequence_bias": ([], {}),
    "stop_strings": ([],),
    "suppress_tokens": ([],),
    "top_h": (),
    "typical_p": (1,),
    "watermarking_config": (),
}
"""Fields that would change the text and are not used -> their values without an effect; null is one of each."""


def read_hf_sampling(folder: Path) -> SamplingDefaults:
    """The sampling defaults of the model in `folder`; without the file, OpenAI's.

    Raises:
        ConfigError: the file is no JSON object.
    """
    path = folder / FILE_NAME
    if not path.exists():
        return OPENAI_DEFAULTS
    config = read_json(path)
    values = dict(config)
    if config.get("do_sample") is False:
        values["temperature"] = 0.0
    not_taken = tuple(
        name
        for name, neutral in _NOT_TAKEN.items()
        if config.get(name) is not None and config[name] not in neutral
    )
    return checked_defaults(values, path, FILE_NAME, not_taken)
