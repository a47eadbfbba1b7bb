"""Files of a target's outputs, which `simulate` uses in place of the target."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from fastspec.config import SamplingParams, SpecConfig
from fastspec.config.checks import is_int, require, require_int
from fastspec.config.files import first_json_line, parse_json, parse_json_lines, read_text
from fastspec.config.options import options_of
from fastspec.engine.outputs import RequestOutput
from fastspec.engine.stats import FINISH_REASONS

_TENSOR = re.compile(r"\s*(\[.*?\])\s*(?:,[^()\[\]]*)?\)[\s,\[\]]*", re.DOTALL)
_JOINED = re.compile(r'\s*\{\s*"\d+(_\d+)*"\s*:')  # how such a file begins
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed")
# Of SpecConfig: "method" and K are always told; the others do not change which drafts are accepted,
# or are chosen anew, or are files that may have moved.
_NOT_TOLD = {"method", "num_speculative_tokens", "step_costs", "bigram_path"}
_NOT_TOLD |= {"heterogeneous_vocab", "rejection_sample_method"}


@dataclass(frozen=True)
class StoredOutput:
    """One output of a target.

    Attributes:
        prompt: its ids or its text; None if the file contains only outputs.
        token_ids: the new ids.
        params: how the target chose them; drafts are sampled in the same way, with the same seed.
            Its max_tokens is the limit of the run, None the end of its text.
        accepted: draft tokens accepted in each step of the stored run, if known.
        finish_reason: how the stored run ended it, if known.
        drafting: how the stored run drafted, if known, see `drafting_of`.
        target: the name of the target that wrote it, if known.
    Raises:
        ValueError: no finish reason of an engine, or more tokens than params allow.

    A text shorter than max_tokens ended by itself, at an end token.
    """

    prompt: str | list[int] | None
    token_ids: list[int]
    params: SamplingParams
    accepted: list[int] | None = None
    finish_reason: str | None = None
    drafting: dict[str, Any] | None = None
    target: str | None = None

    def __post_init__(self):
        reason = self.finish_reason
        is_known = reason is None or reason in FINISH_REASONS
        require("finish_reason", reason, is_known, f"one of {FINISH_REASONS}")
        most, num = self.params.max_tokens, len(self.token_ids)
        if most is not None and most < num:
            raise ValueError(f"max_tokens: expected at least the {num} token_ids, got {most}")

    @property
    def is_ended(self) -> bool:
        """Whether it ended before its limit, at a token that it does not contain earlier."""
        most, ids = self.params.max_tokens, self.token_ids
        return most is not None and 0 < len(ids) < most and ids[-1] not in ids[:-1]

    @property
    def end(self) -> str:
        """Its finish reason, or what its length tells of it."""
        most, num = self.params.max_tokens, len(self.token_ids)
        return self.finish_reason or ("stop" if most is None or num < most else "length")

    def limited(self, max_tokens: int) -> "StoredOutput":
        """This output as of a run with this limit, if the published code exceeded it."""
        params, kept = replace(self.params, max_tokens=max_tokens), self.token_ids[:max_tokens]
        is_whole = kept == self.token_ids
        known = (self.accepted, self.finish_reason) if is_whole else (None, None)
        return StoredOutput(self.prompt, kept, params, *known, self.drafting, self.target)


def read_outputs(
    path: Path,
    prompts: list[str] | None = None,
    decoder_start_id: int | None = None,
    max_tokens: int | None = None,
) -> list[StoredOutput]:
    """Read a file of outputs; its format is detected from its beginning.

    - JSON lines: one object per line with "token_ids" and "prompt_token_ids" or "prompt", as
      `fastspec generate --save-outputs` writes them, or a bare list of new ids.
    - One JSON object: maps prompt ids to the ids of the whole text, both joined by "_"
      (CS-Drafting's stored targets). A decoder's text begins with the prompt, an encoder-decoder's
      with its start token; the rest is new.
    - Printed tensors: `tensor([[518, 799]])`, one output per row (Decoding Speculative Decoding);
      new ids only.

    Args:
        path: the file.
        prompts: texts for the outputs of a file without prompts, in its order.
        decoder_start_id: of a target that is an encoder-decoder.
        max_tokens: maximum number of new tokens in the run, >= 1, if the file does not say; longer
            texts are cut. By default each text's length, as if none had ended by itself.
    Raises:
        ValueError: no such file, or one that is cut off or has other content; the message names
            the line. Too few or too many prompts, or max_tokens for a file with its own.
    """
    if max_tokens is not None:
        require_int("max_tokens", max_tokens, 1)
    text, where = read_text("outputs", path), f"outputs: {path}"
    if _JOINED.match(text):
        outputs = _limited(_from_joined(text, where, decoder_start_id), max_tokens)
    elif path.suffix in (".json", ".jsonl") or isinstance(first_json_line(text), (dict, list)):
        outputs = [_from_record(*pair, max_tokens) for pair in parse_json_lines(text, where)]
    else:
        outputs = _limited(_from_tensors(text, where), max_tokens)
    if not outputs:
        raise ValueError(f"outputs: {path} contains no output")
    return _with_prompts(outputs, prompts, path)


def drafting_of(spec: SpecConfig, method: str, num_draft_tokens: int) -> dict[str, Any]:
    """The method and K of a run, and other options of drafting that are not the usual ones, as
    plain JSON values."""
    told = {"method": method, "num_speculative_tokens": num_draft_tokens}
    for name, option in options_of(SpecConfig).items():
        usual = option.usual_for(spec.method) if option.default is None else option.default
        if name not in _NOT_TOLD and (value := spec.value_of(name)) != usual:
            told[name] = value
    return json.loads(json.dumps(told, default=str))


def stored_record(
    output: RequestOutput,
    params: SamplingParams,
    max_model_len: int,
    drafting: dict[str, Any] | None = None,
    decoder_start_id: int | None = None,
    target: str | None = None,
) -> dict:
    """A finished request as a line of a .jsonl file that `read_outputs` reads.

    Args:
        decoder_start_id: of a target that is an encoder-decoder: its decoder's text begins with
            this token instead of the prompt.
        target: its name.
    """
    num_before = len(output.prompt_token_ids) if decoder_start_id is None else 1
    room = max_model_len - num_before
    return {
        "prompt_token_ids": list(output.prompt_token_ids),
        "token_ids": list(output.token_ids),
        "accepted": accepted_by_step(output.sources),
        "finish_reason": output.finish_reason,
        "drafting": drafting,
        "target": target,
        "max_tokens": room if params.max_tokens is None else min(params.max_tokens, room),
        **{name: getattr(params, name) for name in _SAMPLING},
    }


def accepted_by_step(sources: Iterable[str]) -> list[int]:
    """Draft tokens accepted in each step; only the last step may end without a target token."""
    steps = [0]
    for source in sources:
        if source == "draft":
            steps[-1] += 1
        else:
            steps.append(0)
    return steps if steps[-1] else steps[:-1]


def _limited(outputs: list[StoredOutput], max_tokens: int | None) -> list[StoredOutput]:
    return outputs if max_tokens is None else [each.limited(max_tokens) for each in outputs]


def _from_record(where: str, record: Any, max_tokens: int | None) -> StoredOutput:
    if isinstance(record, list):
        record = {"token_ids": record}
    if not isinstance(record, dict):
        raise ValueError(f"{where}: expected an object or a list of ids, got {record!r:.60}")
    if record.get("error"):
        raise ValueError(f"{where}: this is the output of a failed request: {record['error']}")
    token_ids = _ids(record.get("token_ids"), f"{where}, token_ids")
    prompt = record.get("prompt")
    if "prompt_token_ids" in record:
        prompt = _ids(record["prompt_token_ids"], f"{where}, prompt_token_ids")
    elif prompt is not None and not isinstance(prompt, str):
        raise ValueError(f"{where}, prompt: expected a string, got {prompt!r:.60}")
    accepted = record.get("accepted")
    if accepted is not None:
        accepted = _ids(accepted, f"{where}, accepted", "counts")
    drafting = record.get("drafting")
    fits = drafting is None or (
        isinstance(drafting, dict) and {"method", "num_speculative_tokens"} <= drafting.keys()
    )
    require(
        f"{where}, drafting", drafting, fits, "an object with method and num_speculative_tokens"
    )
    target = record.get("target")
    require(f"{where}, target", target, target is None or isinstance(target, str), "a string")
    given = {name: record[name] for name in (*_SAMPLING, "max_tokens") if name in record}
    if max_tokens is not None and "max_tokens" in given:
        raise ValueError(f"max_tokens: expected None, as the file has its own, got {max_tokens}")
    try:
        params = _params(token_ids, **given)
        known = accepted, record.get("finish_reason"), drafting, target
        output = StoredOutput(prompt, token_ids, params, *known)
        if max_tokens is not None:
            output = output.limited(max_tokens)
    except ValueError as error:
        raise ValueError(f"{where}, {error}") from error
    return output


def _from_joined(text: str, where: str, decoder_start_id: int | None) -> list[StoredOutput]:
    outputs = []
    for key, value in parse_json(text, f"{where}:").items():
        entry = f"{where}, entry {len(outputs) + 1}"
        prompt, whole = _joined_ids(key, entry), _joined_ids(value, entry)
        begin = prompt if decoder_start_id is None else [decoder_start_id]
        token_ids = whole[len(begin) :]
        if whole[: len(begin)] != begin or not token_ids:
            first = "its prompt" if decoder_start_id is None else f"the start id {decoder_start_id}"
            raise ValueError(
                f"{entry}: expected the whole text, {first} and then new ids, got {value!r:.60};"
                " use a .jsonl file for only new ids"
            )
        outputs.append(StoredOutput(prompt, token_ids, _params(token_ids)))
    return outputs


def _joined_ids(joined: Any, where: str) -> list[int]:
    if not isinstance(joined, str) or not re.fullmatch(r"\d+(_\d+)*", joined, re.ASCII):
        raise ValueError(f"{where}: expected ids joined by '_', got {joined!r:.60}")
    return [int(part) for part in joined.split("_")]


def _from_tensors(text: str, where: str) -> list[StoredOutput]:
    starts = [match.start() for match in re.finditer(r"tensor\(", text)]
    if text[: starts[0] if starts else None].strip(" \t\r\n,["):
        known = "JSON lines of --save-outputs, ids joined by '_', or printed tensors"
        raise ValueError(f"{where}, line 1: expected {known}")
    outputs = []
    for start, end in pairwise([*starts, len(text)]):
        line = f"{where}, line {text.count(chr(10), 0, start) + 1}"
        match = _TENSOR.fullmatch(text, start + len("tensor("), end)
        if match is None:
            raise ValueError(f"{line}: the tensor that begins here is cut off or not a list of ids")
        if "..." in match[1]:
            raise ValueError(f"{line}: the tensor was abbreviated (...) when it was printed")
        rows = parse_json(match[1], f"{line}:")
        for row in rows if isinstance(next(iter(rows), None), list) else [rows]:
            token_ids = _ids(row, line)
            outputs.append(StoredOutput(None, token_ids, _params(token_ids)))
    return outputs


def _params(token_ids: list[int], **given: Any) -> SamplingParams:
    """Greedy and of that length, unless the file says otherwise."""
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": len(token_ids), **given})
    require("max_tokens", params.max_tokens, params.max_tokens is not None, "an int")
    return params


def _ids(value: Any, where: str, what: str = "token ids") -> list[int]:
    if not isinstance(value, list) or not value or any(not is_int(i) or i < 0 for i in value):
        raise ValueError(f"{where}: expected a list of {what}, got {value!r:.60}")
    return value


def _with_prompts(
    outputs: list[StoredOutput], prompts: list[str] | None, path: Path
) -> list[StoredOutput]:
    without = sum(output.prompt is None for output in outputs)
    if prompts is None and without:
        raise ValueError(f"prompts: {path} has {without} outputs without a prompt; pass theirs")
    if prompts is None:
        return outputs
    if without < len(outputs):
        raise ValueError(f"prompts: {path} has its own prompts")
    if len(prompts) != len(outputs):
        raise ValueError(f"prompts: {len(prompts)} given for {len(outputs)} outputs in {path}")
    return [replace(o, prompt=p) for o, p in zip(outputs, prompts, strict=True)]
