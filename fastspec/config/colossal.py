"""Colossal-Inference's InferenceConfig: the names of its fields here, and its templates."""

import logging
from collections.abc import Mapping
from typing import Any

from fastspec.config.checks import require, require_int

logger = logging.getLogger(__name__)

LENGTHS = {"max_input_len": 256, "max_output_len": 256}  # and what they are by default
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
    "prefill_ratio": ((int, float), "prompts are read between steps, see prefill_chunk_size"),
    "use_cuda_kernel": (bool, "the fastest kernels that run here are used, see backend"),
    "use_cuda_graph": (bool, "see cuda_graphs"),
}
# Fields of which only one value means what is done here, and what there is for the others.
_FIXED = {
    "tp_size": (1, "for tensor parallelism run transformers' under torchrun: docs/scaling.md"),
    "pp_size": (1, "there is no pipeline parallelism"),
    "beam_width": (1, "there is no beam search"),
    "pad_input": (False, "nothing is padded"),
    "early_stopping": (False, "it applies only to beam search"),
    "high_precision": (False, "attention always accumulates in float32"),
    "use_spec_dec": (False, "call enable_spec_dec"),
    "glimpse_large_kv": (False, "use enable_spec_dec(use_glide_drafter=True)"),
    "enable_streamingllm": (False, "there is no StreamingLLM"),
    "no_repeat_ngram_size": (0, "n-grams are not penalized; see repetition_penalty"),
    "forced_eos_token_id": (None, "no token is forced at the length limit"),
}
# Fields that are of a request here, SamplingParams; InferenceConfig of fastspec.compat keeps them.
GENERATION = ("do_sample", "top_k", "top_p", "temperature", "repetition_penalty", "ignore_eos")


def fields_of_colossal(fields: Mapping[str, Any], known: list[str]) -> dict[str, Any]:
    """The equivalent fields of EngineConfig; fields without effect are logged.

    Args:
        known: fields of the same name and meaning.
    Raises:
        ValueError: a field that is not supported here, or a value with no equivalent.
    """
    names = [*known, "dtype", "kv_cache_dtype", *LENGTHS, *_WITHOUT_EFFECT, *_FIXED]
    for name, value in fields.items():
        if name in GENERATION:
            where = "set it in SamplingParams, or in InferenceConfig of fastspec.compat"
            raise ValueError(f"{name}: belongs to a request here; {where}")
        if name in _FIXED:
            only, why = _FIXED[name]
            fits = value is None if only is None else value == only and type(value) is type(only)
            require(name, value, fits, f"{only!r} ({why})")
        if name not in names:
            raise ValueError(f"{name}: not supported here; known names are {', '.join(names)}")
    kept = {name: value for name, value in fields.items() if name in known}
    if "dtype" in fields:
        dtype = fields["dtype"]
        spelt = _DTYPES.get(str(dtype))
        require("dtype", dtype, spelt is not None, f"a torch dtype or one of {', '.join(_DTYPES)}")
        kept["dtype"] = spelt
    cached = fields.get("kv_cache_dtype")
    if cached is not None:
        same = _DTYPES.get(str(cached))
        is_model_dtype = same is not None and same == kept.get("dtype")
        fits = cached == "fp8" or is_model_dtype
        require("kv_cache_dtype", cached, fits, "None, 'fp8' or the same as dtype")
        kept |= {} if is_model_dtype else {"kv_cache_dtype": "float8"}
    template = fields.get("prompt_template")
    if isinstance(template, str):
        kept["prompt_template"] = TEMPLATES.get(template, template)
    if not fields.keys().isdisjoint(LENGTHS):
        lengths: dict[str, Any] = {name: fields.get(name, most) for name, most in LENGTHS.items()}
        for name, value in lengths.items():
            require_int(name, value, 1)
        kept["max_model_len"] = sum(lengths.values())
    for name, (kind, why) in _WITHOUT_EFFECT.items():
        if name in fields:
            expected = "a bool" if kind is bool else "a number"
            require(name, fields[name], isinstance(fields[name], kind), expected)
            logger.warning("%s has no effect: %s", name, why)
    return kept
