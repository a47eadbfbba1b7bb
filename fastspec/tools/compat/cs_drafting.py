"""CS-Drafting's model wrappers, for scripts that pass them to `csd`.

They hold a model and count its passes; `review` and `propose` are left to the engine, which keeps
every model's cache, so the variants with and without a KV cache are the same.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fastspec.drafters.bigram_table import load_bigram
from fastspec.tools.cost_counters import CostTable, check_counter, pass_cost
from fastspec.tools.stored_outputs import StoredOutput, read_outputs


class DummyModel:
    """Placeholder for a target whose outputs are stored."""

    def __init__(self, vocab_size: int = 32128):
        self.device = torch.device("cpu")
        self.vocab_size = vocab_size

    def to(self, device: torch.device | str | int) -> "DummyModel":
        """Does nothing: there are no weights."""
        return self

    def cuda(self, device: torch.device | str | int = "cuda") -> "DummyModel":
        """Does nothing."""
        return self

    def cpu(self) -> "DummyModel":
        """Does nothing."""
        return self


class CSDraftingModel:
    """A model with a name.

    Args:
        model: the model that decodes.
        sample: must be False; to sample exactly, use `Engine` with SpecConfig("cascade").
        name: the name to look up in cost tables.
        vocab_size: of a model that has no config.
    Raises:
        ValueError: sample, or a model of another kind.
    """

    _kind: type = PreTrainedModel

    def __init__(self, model: Any, sample: bool = False, name: str = "", vocab_size: int = 32128):
        if sample:
            raise ValueError("sample: csd is greedy; use Engine with SpecConfig('cascade')")
        if not isinstance(model, self._kind):
            raise ValueError(
                f"model: {type(self).__name__} expects a {self._kind.__name__}, got"
                f" {type(model).__name__}"
            )
        self.model = model
        self.sample = sample
        self.name = name
        holder = getattr(model, "config", model)
        self.vocab_size: int = getattr(holder, "vocab_size", vocab_size)

    @property
    def device(self) -> torch.device:
        return self.model.device

    def to(self, device: torch.device | str | int) -> "CSDraftingModel":
        """Move the model there."""
        self.model = self.model.to(device)
        return self

    def cuda(self, device: torch.device | str | int = "cuda") -> "CSDraftingModel":
        """Move the model to a GPU."""
        return self.to(f"cuda:{device}" if isinstance(device, int) else device)

    def cpu(self) -> "CSDraftingModel":
        """Move the model to the CPU."""
        return self.to("cpu")

    def record(self, num_passes: int, seconds: float) -> None:
        """Record the passes of one `csd` call; only the Counted wrappers keep them."""


class CSDraftingMaGModel(CSDraftingModel):
    """MaG with a bigram table, [n] ids; it costs nothing."""

    _kind = Tensor

    def calculate_time_cost(self) -> float:
        """Always 0."""
        return 0.0


class CSDraftingDecoderModel(CSDraftingModel):
    """A decoder."""


CSDraftingDecoderModelKVCache = CSDraftingDecoderModel


class CSDraftingEncoderDecoderModel(CSDraftingModel):
    """An encoder-decoder of the T5 type."""

    first_decode_id = 0


class _Counted(CSDraftingModel):
    """Counts the passes of its model.

    Args:
        model, sample, name, vocab_size: see CSDraftingModel.
        counter_version: the cost table, see `fastspec.tools.cost_counters`.
    Attributes:
        forward_count: passes since calculate_time_cost() was last called.
        wall_time: seconds of each pass so far; for each `csd` call the mean is used.
    """

    def __init__(
        self,
        model: Any,
        sample: bool = False,
        name: str = "",
        counter_version: CostTable = "model_parameters",
        vocab_size: int = 32128,
    ):
        super().__init__(model, sample, name, vocab_size)
        check_counter(counter_version)
        self.counter_version = counter_version
        self.forward_count = 0
        self.wall_time: list[float] = []

    @property
    def time_cost(self) -> float:
        """Cost of one pass; ValueError for a model that the table does not contain."""
        return pass_cost(self.name, self.counter_version)

    def record(self, num_passes: int, seconds: float) -> None:
        self.forward_count += num_passes
        self.wall_time += [seconds / num_passes] * num_passes if num_passes else []

    def calculate_time_cost(self) -> float:
        """The passes times the cost of one; resets the count."""
        cost = self.forward_count * self.time_cost
        self.forward_count = 0
        return cost


class CountedCSDraftingDecoderModel(_Counted, CSDraftingDecoderModel):
    """A decoder whose passes are counted."""


CountedCSDraftingDecoderModelKVCache = CountedCSDraftingDecoderModel


class CountedCSDraftingEncoderDecoderModel(_Counted, CSDraftingEncoderDecoderModel):
    """An encoder-decoder whose passes are counted."""


class StoredTarget(_Counted):
    """A target that is not loaded: `csd` reads its outputs from a file.

    Args:
        model: a DummyModel.
        sample, name, counter_version: see the other wrappers.
        cache_dir: a file with a JSON object that maps prompt ids to the ids of the whole text, both
            joined by "_".
    Attributes:
        first_decode_id: the start token of an encoder-decoder, else None.
    """

    _kind = DummyModel
    first_decode_id: int | None = None

    def __init__(
        self,
        model: Any,
        sample: bool = False,
        name: str = "",
        counter_version: CostTable = "model_parameters",
        cache_dir: str | Path = "",
    ):
        super().__init__(model, sample, name, counter_version)
        outputs = read_outputs(Path(cache_dir), decoder_start_id=self.first_decode_id)
        self.cache = {tuple(output.prompt or ()): output for output in outputs}

    def output_of(self, prompt: list[int]) -> StoredOutput:
        """The output of a prompt; ValueError if the file does not contain it."""
        if tuple(prompt) not in self.cache:
            raise ValueError(f"initial_input: {self.name!r} stores no output for {prompt!r:.60}")
        return self.cache[tuple(prompt)]


class CountedCSDraftingCachedDecoderModel(StoredTarget):
    """A decoder's stored outputs."""


class CountedCSDraftingCachedEncoderDecoderModel(StoredTarget):
    """A T5-type encoder-decoder's stored outputs."""

    first_decode_id = 0


def get_mag_model(bi_gram_path: str | Path, is_decoder_only: bool = True) -> CSDraftingMaGModel:
    """MaG with the bigram table from a file, a flat JSON list.

    `is_decoder_only` has no effect: MaG uses the vocabulary of the models around it.

    Raises:
        ValueError: no such file, or it contains no table.
    """
    return CSDraftingMaGModel(load_bigram(bi_gram_path), name="mag")
