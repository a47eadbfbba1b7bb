"""`fastspec chat`: a conversation in the terminal that shows who wrote each token."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from io import TextIOWrapper
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from fastspec.cli.display import SourceWriter, counted, number
from fastspec.cli.errors import begin, note, require_stdin
from fastspec.cli.options import Config, Flags, command
from fastspec.config import EngineConfig, SamplingParams, SpecConfig
from fastspec.config.checks import require, require_one_of
from fastspec.tools.settings import Models

if TYPE_CHECKING:
    from fastspec.engine.engine import Engine
    from fastspec.engine.outputs import RequestOutput, StreamEvent

_HELP = """\
/speculative      turn speculative answers on or off
/target           turn answers of only the target on or off; other answers are compared with them
/drafter          turn answers of only the draft model on or off
/ngram            turn answers with n-gram drafts on or off
/gamma N          draft N tokens in each step
/length N         maximum number of new tokens per answer
/processor NAME   greedy, multinomial T, topk T K, nucleus T P or topknucleus T K P
/chat             turn the chat template, and remembering the conversation, on or off
/cache            show what is cached
/debug            turn showing what each step accepted on or off
/clear            forget the conversation and clear the screen
/quit             quit, as Ctrl-D does; Ctrl-C stops an answer"""
# romsto's names of ways to choose tokens, and what their numbers are.
_PROCESSORS = {
    "greedy": (),
    "multinomial": ("temperature",),
    "topk": ("temperature", "top_k"),
    "nucleus": ("temperature", "top_p"),
    "topknucleus": ("temperature", "top_k", "top_p"),
}
_CLEAR_SCREEN = "\033[2J\033[H"


@command
def chat(
    models: Annotated[Models, Flags()],
    params: Annotated[
        SamplingParams,
        Flags("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", temperature=0.0),
    ],
    spec: Annotated[SpecConfig, Flags()],
    config: Annotated[EngineConfig, Flags()],
    config_file: Config = None,
) -> None:
    """Chat with a model, and see what speculation does for each answer."""
    models.check(spec.method)
    require_stdin()
    begin()
    engine = models.engine(spec, config)
    from fastspec.models.named import own_draft

    drafts = models.drafts(spec.method) or own_draft(models.target, spec.method)
    drafter = drafts if isinstance(drafts, str) else None
    chat = Chat(engine, drafter, params, config, Console(highlight=False, soft_wrap=True))
    note("/help lists the commands")
    if engine.tokenizer is None:
        raise ValueError("target: has no tokenizer")
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    while (line := _read_line()) is not None:
        if line.strip() == "/quit":
            break
        chat.take(line)


def _read_line() -> str | None:
    """The next line the user types; None at the end."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line.removeprefix("\ufeff").rstrip("\r\n") if line else None
    import readline  # noqa: F401 (input() edits lines and remembers them then)

    while True:
        try:
            return input("> ")
        except KeyboardInterrupt:
            typer.echo("\nuse /quit or Ctrl-D to quit")
        except EOFError:
            typer.echo()
            return None


@dataclass
class Run:
    """One way to answer: whether it is on, and the drafter that it uses."""

    is_on: bool
    drafter: str | None = None


@dataclass
class Chat:
    """A conversation with an engine, in lines that are commands or something to answer.

    Attributes:
        drafter: name of the draft model, to let it answer by itself; None = there is none.
        config: of the engine that then runs it.
    """

    engine: "Engine"
    drafter: str | None
    params: SamplingParams
    config: EngineConfig
    console: Console
    messages: list[dict[str, str]] = field(default_factory=list)
    draft_engine: "Engine | None" = None
    num_ngrams: int | None = None
    debugs: bool = False

    def __post_init__(self):
        self.uses_template = getattr(self.engine.tokenizer, "chat_template", None) is not None
        self.runs = {
            "speculative": Run(self.engine.is_speculative),
            "ngram": Run(False, "ngram"),
            "drafter": Run(False),
            "target": Run(True, "none"),
        }

    def take(self, line: str) -> None:
        """Answer a line, or run its command; errors are printed on one line."""
        name, *words = line.split() or [""]
        commands: dict[str, tuple[Callable[..., None], int | None]] = {
            **{f"/{name}": (partial(self._toggle, name), 0) for name in self.runs},
            "/gamma": (self._set_gamma, 1),
            "/length": (self._set_length, 1),
            "/processor": (self._set_processor, None),
            "/chat": (self._toggle_chat, 0),
            "/cache": (self._tell_cache, 0),
            "/debug": (self._toggle_debug, 0),
            "/clear": (self._clear, 0),
            "/help": (partial(self._say, _HELP), 0),
        }
        try:
            if not name.startswith("/"):
                if name:
                    self._answer(line)
                return
            if name not in commands:
                raise ValueError(f"unknown command {name}; /help lists the commands")
            command, count = commands[name]
            fits = count is None or len(words) == count
            require(name, " ".join(words), fits, "one number" if count else "nothing after it")
            command(*words)
        except ValueError as error:
            self._say(str(error))

    def _answer(self, text: str) -> None:
        """Answer in every way that is on, the target last, and compare."""
        from fastspec.models.chat import chat_prompt_ids

        prompt: str | list[int] = text
        if self.uses_template:
            messages = [*self.messages, {"role": "user", "content": text}]
            prompt = chat_prompt_ids(self.engine.tokenizer, messages, add_generation_prompt=True)
        speeds: dict[str, float] = {}
        first: RequestOutput | None = None
        for name, run in self.runs.items():
            if not run.is_on:
                continue
            output, speed = self._run(name, run, prompt)
            first = first or output
            if output.finish_reason == "abort":
                break
            speeds[name] = speed
        if first is None:
            raise ValueError("no way to answer is on: turn on /speculative or /target")
        self._compare(speeds)
        if self.uses_template:
            self.messages += [
                {"role": "user", "content": text},
                {"role": "assistant", "content": first.text},
            ]

    def _run(self, name: str, run: Run, prompt: str | list[int]) -> tuple["RequestOutput", float]:
        """One answer as it comes, then how it went; its tokens per second."""
        engine = self.engine if name != "drafter" else self._drafting_engine()
        params = replace(self.params, drafter=run.drafter)
        self.console.print(Text(f"[{name}]", style="dim"))
        writer = SourceWriter(self.console)
        steps: list[list[str]] = [[]]
        start = time.perf_counter()
        own = "target" if engine is self.engine else "draft"  # whose engine this is
        request_id, output, source = engine.add_request(prompt, params), None, own
        events: list[StreamEvent] = []
        try:
            while output is None:
                events = engine.step()
                for event in events:
                    output = event.output or output
                    wrote = own if event.source == "target" else event.source
                    source = wrote or source
                    if event.text:
                        writer.write(event.text, source)
                    if event.source is not None:
                        steps[-1].append(f"{event.drafter or wrote} {event.text!r}")
                        if event.source != "draft":
                            steps.append([])
                self.console.file.flush()
        except KeyboardInterrupt:
            output = engine.abort(request_id)
            if output is None:  # it had ended: its last event is here, or waits
                rest = [*events, *engine.step()]
                output = next(event.output for event in rest if event.output)
        except BaseException:
            engine.abort(request_id)
            raise
        seconds = time.perf_counter() - start
        self.console.print()
        if self.debugs:
            for place, step in enumerate(filter(None, steps), 1):
                self.console.print(Text(f"  step {place}: {', '.join(step)}", style="dim"))
        self._report(output, seconds)
        return output, len(output.token_ids) / seconds

    def _report(self, output: "RequestOutput", seconds: float) -> None:
        stats = output.stats
        num = len(output.token_ids)
        told = f"{counted(num, 'token')}, {num / seconds:.1f} tokens/s"
        if stats.acceptance_rate is not None:
            length = number(stats.mean_acceptance_length)
            told += f", acceptance rate {stats.acceptance_rate:.2f}, {length} tokens per step"
        if output.finish_reason in ("abort", "error"):
            told += f", {output.error or 'stopped'}"
        self.console.print(Text(told, style="dim"))

    def _compare(self, speeds: dict[str, float]) -> None:
        """The speed of each answer relative to the target's."""
        plain = speeds.pop("target", None)
        for name, speed in speeds.items():
            if plain:
                told = f"{name}: {speed / plain:.2f}x the target's speed"
                self.console.print(Text(told, style="bold"))

    def _drafting_engine(self) -> "Engine":
        from fastspec.engine.engine import Engine

        if self.drafter is None:
            raise ValueError("/drafter: there is no draft model that can answer by itself")
        if self.draft_engine is None:
            self.draft_engine = Engine(self.drafter, spec="none", config=self.config)
        return self.draft_engine

    def _toggle(self, name: str) -> None:
        run = self.runs[name]
        if not run.is_on:
            if name == "speculative" and not self.engine.is_speculative:
                raise ValueError("/speculative: there is no drafter; see --method and --draft")
            if name == "drafter":
                self._drafting_engine()
            if name == "ngram" and "ngram" not in self.engine.drafters:
                self.engine.add_drafter("ngram", SpecConfig("ngram", self.num_ngrams))
        run.is_on = not run.is_on
        self._say(f"{name} is {'on' if run.is_on else 'off'}")

    def _set_gamma(self, value: str) -> None:
        count, most = _whole("/gamma", value), self.config.max_n_spec_tokens
        fits = most is None or count <= most
        require("/gamma", count, fits, f"at most --max-n-spec-tokens ({most})")
        ngrams = SpecConfig("ngram", count)  # refuses what no drafter takes, before any change
        if self.engine.is_speculative:
            self.engine.enable_spec_dec(n_spec_tokens=count)
        self.num_ngrams = count
        if "ngram" in self.engine.drafters:
            self.engine.remove_drafter("ngram")
            self.engine.add_drafter("ngram", ngrams)
        self._say(f"{count} draft tokens in each step")

    def _set_length(self, value: str) -> None:
        self.params = replace(self.params, max_tokens=_whole("/length", value))
        self._say(f"at most {self.params.max_tokens} new tokens")

    def _set_processor(self, name: str = "", *values: str) -> None:
        require_one_of("/processor", name, _PROCESSORS)
        fields = _PROCESSORS[name]
        fits = len(values) == len(fields)
        require("/processor", " ".join(values), fits, f"{name} {' '.join(fields)}".strip())
        numbers = {
            field: _whole(field, value) if field == "top_k" else _number(field, value)
            for field, value in zip(fields, values, strict=True)
        }
        plain = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        self.params = replace(self.params, **(plain | numbers))
        self._say(f"tokens are chosen by {' '.join((name, *values))}")

    def _toggle_chat(self) -> None:
        if getattr(self.engine.tokenizer, "chat_template", None) is None:
            raise ValueError("/chat: the tokenizer has no chat template; see --chat-template")
        self.uses_template = not self.uses_template
        self._say(f"the chat template is {'on' if self.uses_template else 'off'}")

    def _toggle_debug(self) -> None:
        self.debugs = not self.debugs
        self._say(f"debugging is {'on' if self.debugs else 'off'}")

    def _tell_cache(self) -> None:
        shared = self.config.prefix_caching
        how = "are kept" if shared else "are not kept (--prefix-caching keeps them)"
        self._say(f"Keys and values are always cached; between answers they {how}.")

    def _clear(self) -> None:
        self.messages = []
        if self.console.is_terminal:
            self.console.file.write(_CLEAR_SCREEN)
        self._say("the conversation is empty")

    def _say(self, text: str) -> None:
        self.console.print(Text(text))


def _whole(name: str, value: str) -> int:
    require(name, value, value.isdecimal() and int(value) > 0, "a whole number > 0")
    return int(value)


def _number(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError as error:
        raise ValueError(f"{name}: expected a number, got {value!r}") from error
