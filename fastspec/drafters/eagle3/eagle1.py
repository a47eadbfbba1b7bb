"""The draft of EAGLE-1 and EAGLE-2: one layer that goes on from its target's last hidden state."""

import torch
from torch import Tensor, nn

from fastspec.drafters.eagle3.model import Eagle3Config, EagleDraft, EagleLayer
from fastspec.models.captured import LAST_STATE


class Eagle1Draft(EagleDraft):
    """Reads what its target's head reads, and its own output goes to that head without a norm.

    Its layer has no norm before attention: `fc` joins embedding and hidden state.

    Sources: Li et al., "EAGLE", arXiv 2401.15077, and "EAGLE-2", arXiv 2406.16858, which grows
    other trees with the same draft.
    """

    def __init__(self, config: Eagle3Config):
        super().__init__(config)
        size = config.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.midlayer = EagleLayer(config)
        self.norm = nn.Identity()
        self.post_init()

    @property
    def target_layers(self) -> list[int]:
        return [LAST_STATE]

    @property
    def numbers_beside(self) -> int:
        return 2 * self.fc.out_features

    def set_whole_ends(self, embeddings: Tensor, head: Tensor, bias: Tensor | None) -> None:
        """Give it frozen embeddings, and a head [V, E] that may be its target's own."""
        self.embed_tokens = nn.Embedding.from_pretrained(embeddings)
        vocab_size, size = head.shape
        linear = nn.Linear(size, vocab_size, bias=bias is not None, device="meta")
        linear.weight = nn.Parameter(head, requires_grad=False)
        if bias is not None:
            linear.bias = nn.Parameter(bias, requires_grad=False)
        self.lm_head = linear

    def fuse(self, states: Tensor) -> Tensor:
        return states

    def join(self, embeddings: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        joined = self.fc(torch.cat([embeddings, hidden], dim=-1))
        return joined, joined
