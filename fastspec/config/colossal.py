"""Colossal-Inference's InferenceConfig: what its fields are called here, and its templates."""

import logging
from collections.abc import Mapping
from typing import Any

from fastspec.config.checks import require, require_int

logger = logging.getLogger(__name__)

_LENGTHS = ("max_input_len", "max_output_len")
_DTYPES = {
    name: dtype
    for dtype, short in (("float32", "fp32"), ("float16", "fp16"), ("bfloat16", "bf16"))
    for name in (dtype, short, f"torch.{dtype}")
}
# What its names of templates stand for (github.com/hpcaitech/ColossalAI, Apache-2.0).
TEMPLATES = {
    "vicuna": "A chat between a curious user and an assistant. The assistant gives helpful,"
    " detailed, accurate, uncensored responses to the user input. USER: {input_text}\nASSISTANT: ",
    "llama": "[INST] <<SYS>>\nYou are a helpful, respectful and honest assistant. Always answer as"
    " helpfully as possible, while being safe.  Your answers should not include any harmful,"
    " unethical, racist, sexist, toxic, dangerous, or illegal content. Please ensure that your"
    " responses are socially unbiased and positive in nature. If a question does not make any"
    " sense, or is not factually coherent, explain why instead of answering something not correct."
    " If you don't know the answer to a question, please don't share false information.\n<</SYS>>\n"
    "{input_text}[/INST]",
    "baichuan": " <reserved_106> {input_text} <reserved_107> ",
}
# Fields that change no output: the type they must have, and what there is in their place.
_WITHOUT_EFFECT = {
    "prefill_ratio": ((int, float), "prompts are read beside decoding, see prefill_chunk_size"),
    "use_cuda_kernel": (bool, "the fastest kernels that run here are used, see backend"),
}


def fields_of_colossal(fields: Mapping[str, Any], known: list[str]) -> dict[str, Any]:
    """The fields of EngineConfig that say the same; what has no effect is logged.

    Args:
        known: fields of the same name and meaning.
    Raises:
        ValueError: a field without a meaning here, or with another type.
    """
    names = [*known, "dtype", *_LENGTHS, *_WITHOUT_EFFECT]
    for name in fields:
        if name not in names:
            raise ValueError(f"{name}: has no meaning here; known names are {', '.join(names)}")
    kept = {name: value for name, value in fields.items() if name in known}
    if "dtype" in fields:
        dtype = fields["dtype"]
        spelt = _DTYPES.get(str(dtype))
        require("dtype", dtype, spelt is not None, f"a torch dtype or one of {', '.join(_DTYPES)}")
        kept["dtype"] = spelt
    template = fields.get("prompt_template")
    if isinstance(template, str):
        kept["prompt_template"] = TEMPLATES.get(template, template)
    if not fields.keys().isdisjoint(_LENGTHS):
        lengths: dict[str, Any] = {name: fields.get(name) for name in _LENGTHS}
        for name, value in lengths.items():
            require_int(name, value, 1)
        kept["max_model_len"] = sum(lengths.values())
    for name, (kind, why) in _WITHOUT_EFFECT.items():
        if name in fields:
            expected = "a bool" if kind is bool else "a number"
            require(name, fields[name], isinstance(fields[name], kind), expected)
            logger.warning("%s has no effect: %s", name, why)
    return kept
