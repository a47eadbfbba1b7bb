"""Acceptance of a draft along text that the target itself wrote, without a speculative engine."""

from typing import NamedTuple

import torch
from transformers import LlamaForCausalLM

NUM_SPECULATIVE_TOKENS = 4
MAX_NEW_TOKENS = 128


class Text(NamedTuple):
    """A prompt and its continuation: `token_ids` i64[S], of which `prompt_len` are given."""

    token_ids: torch.Tensor
    prompt_len: int


@torch.inference_mode()
def write_texts(
    target: LlamaForCausalLM, prompts: list[list[int]], temperature: float, seed: int = 0
) -> list[Text]:
    """The target's continuation of each prompt, 128 tokens or until after `<|endoftext|>`."""
    end = target.config.eos_token_id
    longest = max(map(len, prompts))
    padded = torch.tensor([[end] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    torch.manual_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0}
    written = target.generate(  # pyright: ignore[reportAttributeAccessIssue]
        input_ids=padded,
        attention_mask=mask,
        max_new_tokens=MAX_NEW_TOKENS,
        pad_token_id=end,
        **(sampling if temperature > 0 else {"do_sample": False}),
    )
    texts = []
    for prompt, new in zip(prompts, written[:, longest:].tolist(), strict=True):
        new = new[: new.index(end) + 1] if end in new else new
        texts.append(Text(torch.tensor(prompt + new), len(prompt)))
    return texts


@torch.inference_mode()
def accept_flags(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, text: Text, temperature: float
) -> list[bool]:
    """For each new token of a text: would the draft's proposal at this place have been accepted?

    Greedy: the draft's argmax is the token. At a temperature: the token was accepted with
    probability min(1, draft_prob / target_prob), which is what speculative sampling gives a token
    that it emits, since it emits an accepted x with probability min(target_prob(x), draft_prob(x)).
    """
    inputs, new = text.token_ids[None, :-1], text.token_ids[text.prompt_len :]
    draft_logits = draft(input_ids=inputs, use_cache=False).logits[0, text.prompt_len - 1 :]
    if temperature == 0:
        return (draft_logits.argmax(dim=-1) == new).tolist()
    target_logits = target(input_ids=inputs, use_cache=False).logits[0, text.prompt_len - 1 :]
    ratio = (draft_logits / temperature).log_softmax(dim=-1)
    ratio = (ratio - (target_logits / temperature).log_softmax(dim=-1)).exp()
    return (torch.rand(len(new)) < ratio.gather(1, new[:, None])[:, 0]).tolist()


def chain_counts(flags: list[bool], num_speculative_tokens: int) -> tuple[int, int, int]:
    """Plays the rounds of a chain along a text: (accepted, proposed, target steps).

    Each round proposes up to K of the tokens left, keeps the first run of acceptable ones and moves
    one token further (the recovered or bonus token).
    """
    accepted = proposed = rounds = position = 0
    while position < len(flags):
        window = flags[position : position + num_speculative_tokens]
        run = window.index(False) if False in window else len(window)
        accepted, proposed, rounds = accepted + run, proposed + len(window), rounds + 1
        position += run + 1
    return accepted, proposed, rounds


def measure_acceptance(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, texts: list[Text], temperature: float
) -> dict[str, float]:
    """`acceptance_rate` (accepted / proposed, K = 4) and `mean_acceptance_length` of texts."""
    torch.manual_seed(0)
    accepted = proposed = rounds = 0
    for text in texts:
        flags = accept_flags(target, draft, text, temperature)
        counts = chain_counts(flags, NUM_SPECULATIVE_TOKENS)
        accepted, proposed, rounds = accepted + counts[0], proposed + counts[1], rounds + counts[2]
    return {
        "acceptance_rate": accepted / proposed,
        "mean_acceptance_length": (accepted + rounds) / rounds,
    }
