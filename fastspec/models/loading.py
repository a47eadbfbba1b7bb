"""Loads models and tokenizers by path, hub id or object, with one-line errors."""

from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from struct import error as StructError
from typing import Any, cast

import torch
from huggingface_hub.errors import HFValidationError, StrictDataclassError
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from fastspec.config import EngineConfig
from fastspec.config.checks import one_line
from fastspec.models.huge_pages import use_huge_pages
from fastspec.models.named import BUNDLED, FETCHED, folder_of
from fastspec.models.side_by_side import move_side_by_side
from fastspec.models.weight_files import check_safetensors

# An ImportError names a missing package; a truncated GGUF file raises a StructError.
_LOADING_ERRORS = (
    *(OSError, ValueError, KeyError, ImportError, StructError),
    StrictDataclassError,  # a configuration whose fields do not fit together
)


def resolve_device(config: EngineConfig) -> torch.device:
    """Return the device named by the config, after checking that it exists."""
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
        if device.type == "meta":
            raise RuntimeError("it stores no values")
    except (RuntimeError, AssertionError) as error:
        why = one_line(error).split(". ")[0]
        raise ValueError(f"device: cannot use {config.device!r}: {why}") from error
    return device


def _language_model(path: str | Path, dtype: str, **options: Any) -> Any:
    """Load a decoder, an encoder-decoder, or a model that also reads images or sound, as its
    configuration says."""
    place, gguf = _for_transformers(path)
    options |= gguf
    loader = _loader_of(AutoConfig.from_pretrained(place, **gguf))
    loaded = loader.from_pretrained(place, dtype=dtype, output_loading_info=True, **options)
    model, report = cast(Any, loaded)
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"{len(missing)} weights are missing, such as {missing[0]}")
    return model


def _loader_of(config: PreTrainedConfig) -> Any:
    if config.is_encoder_decoder:
        if type(config) in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
            return AutoModelForSeq2SeqLM
    elif type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    elif type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING:
        return AutoModelForMultimodalLM
    raise ValueError(f"transformers has no language model of type {config.model_type!r}")


def load_model(
    field: str,
    source: Any,
    config: EngineConfig,
    from_pretrained: Callable[..., Any] = _language_model,
    beside: PreTrainedModel | None = None,
) -> PreTrainedModel:
    """Load a language model onto the device.

    Args:
        field: names the argument in errors.
        source: a path, a hub id, a PreTrainedModel, or a PeftModel with LoRA.
        beside: a model with which that of from_pretrained may share weights.
    Raises:
        ValueError: it cannot be loaded, its weights are not in config.load_format, or it is already
            loaded with another dtype or device than the config asks for, or on several devices.
    """
    source = _without_wrapper(field, source)
    if isinstance(source, PreTrainedModel):
        _check_loaded(field, source, config)
        return source
    device, path = resolve_device(config), _existing_path(field, source)
    options: dict[str, Any] = {"dtype": config.dtype}
    try:
        if config.load_format == "safetensors" and not Path(path).is_file():
            check_safetensors(path)
            options["use_safetensors"] = True
        model = from_pretrained(path, **options)
    except (*_LOADING_ERRORS, SafetensorError, UnpicklingError, RuntimeError) as error:
        raise _not_loaded(field, "", source, error) from error
    # A draft's first weight may be its target's, so all are asked; a quantised model that is there
    # may refuse to move.
    devices = {parameter.device for parameter in model.parameters()}
    if devices != {torch.empty(0, device=device).device}:
        move_side_by_side(model, device)  # first: `to` gives each weight memory of its own
        model.to(device)
    use_huge_pages(model, beside)
    return model


def load_tokenizer(field: str, source: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer stored with a model."""
    return _read_part(AutoTokenizer.from_pretrained, field, "the tokenizer of ", source)


ReadConfig = Callable[[str, str | Path], PreTrainedConfig]
SPECULATORS = "speculators_model_type"  # in config.json, in the layout of vLLM's `speculators`


def load_config(field: str, source: str | Path) -> PreTrainedConfig:
    """Read the configuration of a model without loading it."""
    return _read_part(_read_config, field, "the configuration of ", source)


def _read_config(place: str | Path, **options: str) -> PreTrainedConfig:
    stored, _ = PreTrainedConfig.get_config_dict(place, **options)
    if SPECULATORS in stored:
        return PreTrainedConfig.from_dict(stored)
    return AutoConfig.from_pretrained(place, **options)


def _read_part(
    from_pretrained: Callable[..., Any], field: str, part: str, source: str | Path
) -> Any:
    place, options = _for_transformers(_existing_path(field, source))
    try:
        return from_pretrained(place, **options)
    except _LOADING_ERRORS as error:
        raise _not_loaded(field, part, source, error) from error


def target_vocab_size(source: str | Path) -> int:
    """Return the size of a target's vocabulary from its configuration only."""
    return load_config("target", source).get_text_config(decoder=True).vocab_size


def target_decoder_start(source: str | Path) -> int | None:
    """Return an encoder-decoder's decoder start token from its configuration only."""
    config = load_config("target", source)
    return config.decoder_start_token_id if config.is_encoder_decoder else None


def bigram_beside(target: str | Path | PreTrainedModel) -> Path | None:
    """Return the bigram table in the target's folder, if there is one."""
    if isinstance(target, PreTrainedModel):
        return None
    file = Path(_existing_path("target", target)) / "bigram.json"
    return file if file.is_file() else None


def check_same_tokenizer(
    target: PreTrainedTokenizerBase | None, draft: PreTrainedTokenizerBase | None
) -> None:
    """Refuse a drafter whose token ids mean other tokens; differently padded sizes are fine."""
    if target is None or draft is None:
        return
    target_vocab, draft_vocab = target.get_vocab(), draft.get_vocab()
    if target_vocab == draft_vocab:
        return
    differing = [
        token for token, index in draft_vocab.items() if target_vocab.get(token) != index
    ] or [token for token in target_vocab if token not in draft_vocab]
    token = min(differing)
    raise ValueError(
        f"drafter: its tokenizer differs from the target's in {len(differing)} tokens, for example"
        f" {token!r} (target id {target_vocab.get(token)}, drafter id {draft_vocab.get(token)})"
    )


def float_dtypes(model: PreTrainedModel) -> list[str]:
    """Return the names of the floating-point dtypes of a model's weights."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    return sorted(str(d).removeprefix("torch.") for d in dtypes if d.is_floating_point)


def eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """Return the ids at which `generate` ends the model's texts.

    They are those of its generation_config: none if it has none, whatever its config or tokenizer
    says.
    """
    return ids_in(getattr(model, "generation_config", None) or model.config)


def pad_token_ids(model: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    """Return the ids that mean nothing but padding; none if texts begin or end with them too."""
    holders = (getattr(model, "generation_config", None), model.config, tokenizer)
    pads, begins, ends = (
        frozenset[int]().union(*(ids_in(holder, f"{name}_token_id") for holder in holders))
        for name in ("pad", "bos", "eos")
    )
    return pads - begins - ends


def ids_in(holder: Any, name: str = "eos_token_id") -> frozenset[int]:
    """Return a token id of a config or tokenizer, which may be none, one or several."""
    ids = getattr(holder, name, None)
    ids = ids.tolist() if isinstance(ids, torch.Tensor) else ids
    if ids is None:
        return frozenset()
    return frozenset(ids if isinstance(ids, (list, tuple)) else [ids])


def _without_wrapper(field: str, source: Any) -> Any:
    """Return the model inside a PeftModel, with its LoRA layers; anything else unchanged."""
    adapter = getattr(source, "active_peft_config", None)
    if isinstance(source, PreTrainedModel) or adapter is None:
        return source
    if adapter.peft_type != "LORA" or getattr(adapter, "alora_invocation_tokens", None):
        raise ValueError(
            f"{field}: {type(source).__name__}: LoRA is the only supported PEFT adapter;"
            " merge_and_unload() may give a model without adapters"
        )
    return source.get_base_model()


def _check_loaded(field: str, model: PreTrainedModel, config: EngineConfig) -> None:
    """Refuse a loaded model that does not match the config: converting it is up to the user."""
    name, dtypes = type(model).__name__, float_dtypes(model)
    if config.dtype != "auto" and dtypes != [config.dtype]:
        raise ValueError(
            f"dtype: {config.dtype!r}, but the {field}, a loaded {name}, is in {', '.join(dtypes)};"
            " convert it, or pass 'auto'"
        )
    if "float64" in dtypes:
        raise ValueError(f"{field}: {name} is in float64; expected float32, bfloat16 or float16")
    if config.device != "auto":
        device = torch.empty(0, device=resolve_device(config)).device
        if model.device != device:
            raise ValueError(
                f"device: {config.device!r}, but the {field}, a loaded {name}, is on"
                f" {model.device}; move it, or pass 'auto'"
            )
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) > 1 or devices == ["meta"]:
        raise ValueError(
            f"{field}: {name} is on {' and '.join(devices)}; models spread over several devices"
            " or offloaded, for example by a device_map, are not supported"
        )


def _existing_path(field: str, source: str | Path) -> str | Path:
    """Return the folder of a short name; a path must exist, anything else may be a hub id."""
    if not isinstance(source, (str, Path)):
        raise ValueError(
            f"{field}: expected a path, a hub id or a PreTrainedModel, got {type(source).__name__}"
        )
    if not str(source):
        raise ValueError(f"{field}: expected a path, a hub id or a PreTrainedModel, got ''")
    if folder := folder_of(field, str(source)):
        return folder
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_file():
        if folder.suffix != ".gguf":
            raise ValueError(f"{field}: expected a folder or .gguf, but {str(source)!r} is a file")
        return folder
    if isinstance(source, Path) or not _may_be_hub_id(source):
        raise ValueError(f"{field}: no such folder: {str(source)!r}")
    return source


def _for_transformers(path: str | Path) -> tuple[str | Path, dict[str, str]]:
    """Return arguments for from_pretrained: a folder or hub id, and a GGUF file's name."""
    if isinstance(path, Path) and path.is_file():
        return path.parent, {"gguf_file": path.name}
    return path, {}


def _may_be_hub_id(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _not_loaded(field: str, part: str, source: str | Path, error: Exception) -> ValueError:
    is_here = str(source) in (*BUNDLED, *FETCHED) or Path(source).expanduser().exists()
    what = repr(str(source)) if is_here else f"{str(source)!r} (no such folder, so a hub id)"
    return ValueError(f"{field}: cannot load {part}{what}: {one_line(error)}")
