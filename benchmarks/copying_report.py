"""The part of docs/results.md about drafters that copy, by kind of prompt."""

from benchmarks.tables import quoted, table_head, table_row, where


def copying(record: dict) -> str:
    """Table of the methods: speed-up and tokens per target step for each kind of prompt."""
    rows = record["methods"]
    kinds = list(next(iter(rows.values())))
    lines = [
        f"Greedy answers of SmolLM2 in {record['dtype']} to {record['num_prompts']} bundled"
        f" prompts, up to {record['max_tokens']} tokens each (`python -m benchmarks.copying --dtype"
        f" {record['dtype']}`): the speed-up over plain decoding, with the reading of prompts"
        " included, and in parentheses the tokens per target step."
        f" {'; '.join(settings(*pair) for pair in record['settings'].items())}."
        " Suffix copies are also of earlier answers." + from_corpus(record),
        "",
        *table_head("method", *kinds),
    ]
    for name, of_kinds in rows.items():
        cells = (of_kinds[kind] for kind in kinds)
        shown = (f"{each['speed_up']:.2f}x ({each['tokens_per_step']:.2f})" for each in cells)
        lines.append(table_row(quoted(name), *shown))
    return "\n".join([*lines, "", where(record)])


def from_corpus(record: dict) -> str:
    """What the methods with a corpus also copy from."""
    corpus = record.get("corpus", {"texts": 0})
    if not corpus["texts"]:
        return ""
    return (
        f" With a corpus: also of {corpus['texts']} answers of the target to other prompts"
        f" ({corpus['tokens']} tokens, `python -m scripts.smollm2.dialogues`), written before."
    )


def settings(name: str, given: dict[str, float]) -> str:
    """K of a method and its other settings, such as the lengths of matches."""
    others = dict(given)
    k = f"K={others.pop('num_speculative_tokens')}"
    shown = [] if k in name else [k]
    if "prompt_lookup_min" in others:
        least, most = others.pop("prompt_lookup_min"), others.pop("prompt_lookup_max")
        shown.append(f"matches of {least} to {most} tokens")
    shown += [f"`{key}={value:g}`" for key, value in others.items()]
    return f"{quoted(name)}: {', '.join(shown)}"
