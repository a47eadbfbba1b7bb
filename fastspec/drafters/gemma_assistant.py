"""Gemma 4 assistants: small models that read their target's cache and its last hidden state."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from fastspec.config import EngineConfig
from fastspec.config.checks import refuse
from fastspec.drafters.base import Drafter, Request
from fastspec.drafters.context import DrafterContext, DrafterPlan
from fastspec.drafters.hidden_states import PagedStates, StateDrafter, StateReader, StateRunner
from fastspec.models.blocks import Blocks
from fastspec.models.layout import HeadShape, KVCache, PagedStep, Span
from fastspec.models.loading import load_model
from fastspec.models.paged_model import PagedModel
from fastspec.models.runner import ModelRunner
from fastspec.models.transfer import device_tensor

MODEL_TYPES = {"gemma4_assistant", "gemma4_unified_assistant"}


def is_assistant(config: PreTrainedConfig) -> bool:
    """Whether a model is a Gemma 4 assistant, by its configuration."""
    return config.model_type in MODEL_TYPES


@dataclass(frozen=True)
class AssistantView(PagedStates):
    """See `PagedStates`; also the target's pages.

    Attributes:
        pages: the pass over these pages, with each row as the last token of a text of its own.
    """

    pages: PagedStep


class AssistantDraft(StateReader):
    """An assistant with the embeddings of its target.

    A row attends to what the target has cached of the text, and stores no keys and values. All
    rows of a draft stand at the position of the text's last token.
    """

    def __init__(self, assistant: Any, target: PreTrainedModel):
        super().__init__(assistant.config)
        self.model = assistant.model
        self.pre_projection = assistant.pre_projection
        self.post_projection = assistant.post_projection
        self.embed_tokens = target.get_input_embeddings()
        self.lm_head = assistant.lm_head
        if assistant.masked_embedding is not None:
            self.lm_head = ClusteredHead(assistant.masked_embedding, assistant.lm_head)
        self.norm = nn.Identity()  # its states are normed
        heads = self.model.config.num_attention_heads
        parts = (layer.self_attn for layer in self.model.layers)
        # For each layer, the type of the target's layer that it reads, and its heads.
        self.layers_read: list[tuple[str, HeadShape]] = [
            (part.layer_type, (heads // part.num_key_value_groups, part.head_dim)) for part in parts
        ]

    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = True  # as its decoder

    @property
    def state_size(self) -> int:
        return self.config.backbone_hidden_size

    def advance(
        self, embeddings: Tensor, hidden: Tensor, position_ids: Tensor, paged_step: PagedStep
    ) -> Tensor:
        view: AssistantView | None = paged_step.target_view
        step = paged_step if view is None else view.pages
        count = embeddings.shape[1]
        # Rows without slots: nothing of these is stored.
        unused = {
            kind: (embeddings.new_zeros((1, heads, count, size)),) * 2
            for kind, (heads, size) in self.layers_read
        }
        read = self.pre_projection(torch.cat([embeddings, hidden], dim=-1))
        positions = position_ids if view is None else step.context_lens.long()[None]
        return self.model(
            inputs_embeds=read,
            position_ids=positions,
            attention_mask=dict.fromkeys(unused),
            shared_kv_states=unused,
            use_cache=False,
            logits_to_keep=positions[0],  # a tensor keeps all rows, without inputs for each layer
            paged_step=step,
        ).last_hidden_state

    def handed_on(self, hidden: Tensor) -> Tensor:
        return self.post_projection(hidden)


class ClusteredHead(nn.Module):
    """A head that computes the logits of the tokens in the likeliest clusters, -inf for others."""

    def __init__(self, clusters: Any, head: nn.Linear):
        super().__init__()
        self.clusters, self.head = clusters, head

    def forward(self, hidden: Tensor) -> Tensor:
        part, weight = self.clusters, self.head.weight
        chosen = part.centroids(hidden).topk(part.centroid_intermediate_top_k, dim=-1).indices
        token_ids = part.token_ordering.view(part.num_centroids, -1)[chosen].flatten(-2)
        logits = (weight[token_ids] @ hidden[..., None]).squeeze(-1)
        whole = hidden.new_full((*hidden.shape[:-1], len(weight)), -torch.inf)
        return whole.scatter(-1, token_ids, logits)


class AssistantRunner(StateRunner):
    """Runs an assistant; a row's slot is that of the token before it, as with EAGLE."""

    why_not_captured = "reads its target's cache, row by row"

    def __init__(
        self,
        paged_model: PagedModel,
        pages: tuple[KVCache, dict[int, KVCache]],
        num_blocks: int,
        config: EngineConfig,
    ):
        inputs, self._target_caches = pages
        super().__init__(paged_model, inputs, num_blocks, config)

    def _step(self, spans: list[Span], rows: list[int], parents: Tensor | None = None) -> PagedStep:
        step = super()._step(spans, rows, parents)
        # In a cascade the copy that it reads may have cached tokens that are no longer in the text.
        seen = [min(span.target_len, span.start + span.count) for span in spans]
        pages = replace(
            step,
            caches=self._target_caches,
            context_lens=device_tensor(seen, torch.int32, self.device),
            slot_mapping=torch.full_like(step.slot_mapping, -1),
            target_view=None,
        ).row_by_row()
        step.target_view = AssistantView(**vars(step.target_view), pages=pages)
        return step


class GemmaAssistantDrafter(StateDrafter):
    """Drafts with a Gemma 4 assistant; its arguments are those of `TargetReader`.

    It reads only tokens that the target has not, and keeps no keys and values.

    Source: transformers' `SinglePositionMultiTokenCandidateGenerator`.
    """

    name, kind = "gemma_assistant", "Gemma 4 assistant"
    needs_whole_target = True
    model_class, runner_class = AssistantDraft, AssistantRunner

    @staticmethod
    def pages(
        model: PagedModel, target: ModelRunner, blocks: Blocks
    ) -> tuple[KVCache, dict[int, KVCache]]:
        """Return the target's last states, and its cache that each layer of the draft reads."""
        draft: AssistantDraft = model.model
        config = target.paged_model.model.config.get_text_config(decoder=True)
        types = list(getattr(config, "layer_types", None) or ())
        caches = {}
        for index, (kind, heads) in enumerate(draft.layers_read):
            found = [layer for layer, each in enumerate(types) if each == kind]
            if not found:
                raise ValueError(f"drafter: reads a layer of type {kind!r}, the target has none")
            [cache] = target.whole_caches(found[-1:])
            if tuple(cache[0].shape[2:]) != heads:
                raise ValueError(
                    f"drafter: reads key-value heads and head size {heads}, but the target has"
                    f" {tuple(cache[0].shape[2:])} in layers of type {kind!r}"
                )
            caches[index] = cache
        # The state that a row leaves in the slot of the token before it depends on the row's token.
        blocks.share_with_next()
        return target.keep_inputs(draft.target_layers), caches

    def _unread(
        self, requests: Sequence[Request], texts: list[list[int]], num_rows: list[int]
    ) -> tuple[list[int], list[Span]]:
        """Return the texts' tokens from the first that the target has not read, and at least the
        last num_rows[b] > 0."""
        ids: list[int] = []
        spans = []
        for request, text, rows in zip(requests, texts, num_rows, strict=True):
            if rows:
                start = min(len(text) - rows, max(request.num_cached, 1))
                ids += text[start:]
                spans.append(request.span(start, len(text) - start))
        return ids, spans


def load_assistant(
    source: str | Path | PreTrainedModel, config: EngineConfig, target: PreTrainedModel
) -> PreTrainedModel:
    """Load an assistant onto the device, with the embeddings of its target.

    Raises:
        ValueError: it cannot be loaded, or it was made for another target.
    """
    assistant: Any = load_model("drafter", source, config)
    if not is_assistant(assistant.config):
        return assistant  # refused by name
    dtype = target.get_decoder().dtype
    if not isinstance(source, PreTrainedModel):
        assistant.to(dtype)
    if assistant.dtype != dtype:
        raise ValueError(f"drafter: has weights in {assistant.dtype}, its target in {dtype}")
    own = assistant.vocab_size, assistant.backbone_hidden_size
    shape = cast(Any, target.get_output_embeddings()).weight.shape
    for name, given, expected in zip(("tokens", "values in a state"), own, shape, strict=True):
        if given != expected:
            raise ValueError(f"drafter: was made for {given} {name}, its target has {expected}")
    return AssistantDraft(assistant, target).eval()


def build(context: DrafterContext) -> Drafter | DrafterPlan:
    """Build method "gemma_assistant"; a given Drafter must be of its own class."""
    bits = context.spec.bits_of_draft_model
    refuse("draft_bits", bits, "not for a Gemma 4 assistant, which runs with its own weights")
    context = replace(context, tokenizer=None)  # the assistant uses its target's
    plan = GemmaAssistantDrafter.plan(context, load_assistant)
    if isinstance(plan, DrafterPlan):
        plan.models[0].cache_shapes = {}  # it has no keys and values of its own
    return plan
