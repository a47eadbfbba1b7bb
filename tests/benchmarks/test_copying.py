"""The measurement of drafters that copy, by kind of prompt, with the bundled target."""

from benchmarks import copying, report, same_ids
from fastspec import EngineConfig
from fastspec.cli.prompts import bundled_prompts
from fastspec.models.loading import load_tokenizer

from .records import ENVIRONMENT


def test_copies_are_measured_and_told():
    tokenizer = load_tokenizer("target", "tiny")
    prompts = [tokenizer(text).input_ids for text in ("import os\n", "def add(a, b):\n" * 3)]
    config = EngineConfig(dtype="float32", device="cpu")
    specs = {name: spec for name, spec in copying.SPECS.items() if spec.method != "eagle3"}
    specs |= {"suffix, corpus": specs["suffix"]}
    kinds, corpus = ["summary", "edit"], [[5, 6, 7], [8, 9]]
    methods = copying.measured("tiny", specs, prompts, kinds, config, 12, corpus)
    assert list(methods) == list(specs)  # plain decoding is what they are compared with
    for row in methods.values():
        assert list(row) == ["summary", "edit", "summary and edit"]
        assert all(cell["speed_up"] > 0 and cell["tokens_per_step"] >= 1 for cell in row.values())
    methods["suffix, tree"]["edit"] = {"speed_up": 2.049, "tokens_per_step": 2.38}
    record = {
        **ENVIRONMENT,
        "op": "copying",
        "target": "tiny",
        "dtype": "float32",
        "num_prompts": 2,
        "max_tokens": 12,
        "settings": copying.SETTINGS,
        "corpus": {"texts": 2, "tokens": 5},
        "methods": methods,
    }
    page = report.results_page([record])
    assert "\n### Drafters that copy, by kind of prompt\n" in page
    assert "\n| method | summary | edit | summary and edit |\n" in page
    (row,) = (line for line in page.splitlines() if line.startswith("| `suffix`, tree |"))
    assert row.split(" | ")[2] == "2.05x (2.38)"
    assert "`prompt_lookup`, K=4: matches of 2 to 4 tokens; `suffix`: K=15, " in page
    assert "`suffix_max_spec_factor=3`, `tree_nodes=11`;" in page
    assert " With a corpus: also of 2 answers of the target to other prompts (5 tokens, " in page


def test_a_kind_alone_has_no_column_of_both():
    config = EngineConfig(dtype="float32", device="cpu")
    specs = {"suffix": copying.SPECS["suffix"]}
    methods = copying.measured("tiny", specs, [[1, 2, 3]], ["edit"], config, 2)
    assert list(methods["suffix"]) == ["edit"]
    assert copying.groups_of("chat") == ["chat"]
    assert copying.groups_of("edit") == ["edit", "summary and edit"]


def test_kinds_of_bundled_prompts():
    kinds = same_ids.kinds_of(bundled_prompts(20, chat=True))
    assert list(dict.fromkeys(kinds)) == ["chat", "code", "summary", "edit"]
