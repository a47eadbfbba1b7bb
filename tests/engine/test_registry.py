"""Methods of users' own: registered, found in installed packages, and refused by name."""

import logging
import re
import sys
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest

from fastspec import Engine, SamplingParams, SpecConfig
from fastspec.config.methods import BUILT_IN, method_named, methods
from fastspec.drafters import (
    DrafterPlan,
    DraftModelDrafter,
    PromptLookupDrafter,
    register,
    unregister,
)
from fastspec.models import loading
from fastspec.tools.simulate import Simulator
from fastspec.tools.stored_outputs import StoredOutput

from ..models import VOCAB_SIZE, perturbed

DOCS = (Path(__file__).parents[2] / "docs" / "drafters.md").read_text(encoding="utf-8")
GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPTS = [[1, 2, 3, 1, 2], [9, 9]]


@contextmanager
def registered(name, build, **options):
    register(name, build, **options)
    try:
        yield
    finally:
        unregister(name)


def copying(context):
    return PromptLookupDrafter(*context.spec.lookup_lengths)


def drafting(context):
    """A plan, as a method with a draft model has to make one."""
    model = context.load(context.drafter)

    def drafter(target, block_manager):
        runner = context.runner(model, block_manager)
        drafter = DraftModelDrafter(runner, block_manager, context.vocab_size, False)
        drafter.name = "mine"
        return drafter

    return DrafterPlan([model], drafter)


def ids(engine):
    return [output.token_ids for output in engine.generate(PROMPTS, GREEDY)]


def test_the_example_of_the_docs_runs():
    blocks = re.findall(r"^```python\n(.*?)^```", DOCS, flags=re.MULTILINE | re.DOTALL)
    (code,) = (block for block in blocks if "register(" in block)
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 20
    names = {}
    try:
        exec(compile(code, "drafters.md", "exec"), names)
    finally:
        unregister("repeat")
    names["engine"].disable_spec_dec()
    (plain,) = names["engine"].generate("x = [\n    0,\n", names["params"])
    assert names["output"].token_ids == plain.token_ids
    assert names["output"].stats.num_draft_tokens > 0


def test_the_docs_list_every_method():
    listed = re.findall(r"^\| `(\w+)` \|", DOCS, flags=re.MULTILINE)
    assert listed == list(methods())


def test_every_method_of_ours_has_its_build():
    for method in BUILT_IN:
        if method.name != "none":
            assert callable(import_module(f"fastspec.drafters.{method.name}").build)


def test_a_method_without_a_draft_model(model):
    plain = ids(Engine(model))
    with registered("mine", copying, fields=["prompt_lookup_max"], summary="copies"):
        spec = SpecConfig("mine", 3, prompt_lookup_max=2)
        engine = Engine(model, spec=spec)
        assert ids(engine) == plain
        assert engine.stats.num_draft_tokens > 0
        outputs = [StoredOutput(p, list(o), GREEDY) for p, o in zip(PROMPTS, plain, strict=True)]
        simulator = Simulator(model, None, VOCAB_SIZE, spec=spec)
        simulator.run(outputs)
        assert simulator.stats.num_accepted_tokens == engine.stats.num_accepted_tokens
        with pytest.raises(ValueError, match="drafter: method 'mine' does not take one"):
            Engine(model, model, spec="mine")
        with pytest.raises(ValueError, match="ngram_size: not for method 'mine'"):
            SpecConfig("mine", ngram_size=3)
        with pytest.raises(ValueError, match="cape: "):
            SpecConfig("mine", cape=True)
    with pytest.raises(ValueError, match=r"method: .*prompt_lookup.*, got 'mine'"):
        SpecConfig("mine")


def test_a_method_with_a_draft_model(model, drafter):
    with registered("mine", drafting, fields=("cape", "cape_bins"), needs_draft=True):
        for cape in (False, True):
            engine = Engine(model, drafter, spec=SpecConfig("mine", 3, cape=cape))
            assert ids(engine) == ids(Engine(model))
            assert engine.stats.num_accepted_tokens > 0
        engine = Engine(model, drafter, spec="mine")
        engine.enable_spec_dec(model)
        ids(engine)
        assert engine.stats.acceptance_rate == 1
        assert engine.stats.num_draft_passes.keys() == {"mine"}
        with pytest.raises(ValueError, match="drafter: method 'mine' needs a draft model"):
            Engine(model, spec="mine")
        with pytest.raises(ValueError, match="expected a draft model, got the drafter"):
            Engine(model, PromptLookupDrafter(1, 2), spec="mine")
    message = "method 'eagle3' needs a draft model; tiny comes with drafts for draft_model, cascade"
    with pytest.raises(ValueError, match=message):
        Engine("tiny", spec="eagle3")


def test_a_greedy_draft_behind_copies_drafts_for_sampled_requests(model, drafter):
    fields = ("suffix_tokens", "draft_sample_method")
    with registered("mine", drafting, fields=fields, needs_draft=True):
        engine = Engine(model, drafter, spec=SpecConfig("mine", 3, suffix_tokens=4))
    sampled = SamplingParams(temperature=1, max_tokens=20, seed=3, ignore_eos=True)
    outputs = engine.generate(PROMPTS, sampled)
    assert "mine" in {name for output in outputs for name in output.drafters}


@pytest.mark.parametrize(
    "options",
    [
        {"confidence_threshold": 0.3},
        {"draft_sample_method": "greedy"},
        {"heterogeneous_vocab": "intersection"},
        {"heterogeneous_vocab": "reencoding"},
    ],
    ids=str,
)
def test_options_of_a_drafter_that_is_made_already(model, options):
    (name,) = options
    with pytest.raises(ValueError, match=f"^{name}: not with a Drafter"):
        Engine(model, PromptLookupDrafter(1, 2), spec=SpecConfig(**options))


@pytest.mark.parametrize(
    ("named", "options"),
    [
        ("bigram_path", {"k_matrix": [[1, 1], [0, 1]], "bigram_path": "none.json"}),
        ("mag_surplus", {"k_matrix": [[1, 1], [0, 1]], "mag_surplus": True}),
        ("heterogeneous_vocab", {"heterogeneous_vocab": "intersection"}),
    ],
)
def test_options_that_loaded_drafts_leave_nothing_to_do(model, named, options):
    method = "cascade" if "k_matrix" in options else "draft_model"
    drafts = [perturbed(model, 0.1), perturbed(model, 0.2)]
    given = drafts if method == "cascade" else drafts[0]
    with pytest.raises(ValueError, match=f"^{named}: "):
        Engine(model, given, spec=SpecConfig(method, **options))


def test_what_a_build_raises_or_returns_by_mistake(model):
    def failing(context):
        raise KeyError("a table of mine")

    with registered("mine", failing), pytest.raises(KeyError, match="a table of mine"):
        Engine(model, spec="mine")
    for made in (None, 5, PromptLookupDrafter):
        with (
            registered("mine", lambda context, made=made: made),
            pytest.raises(ValueError, match="build: expected it to make a Drafter or DrafterPlan"),
        ):
            Engine(model, spec="mine")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("tree", {}, "name: there is already a method 'tree'"),
        ("mine", {}, "name: there is already a method 'mine'"),
        ("two words", {}, "name: expected a name"),
        ("", {}, "name: expected a name"),
        (5, {}, "name: expected a name"),
        ("other", {"build": "mag"}, "build: expected a function"),
        ("other", {"fields": ["tree_width", "no_field"]}, "fields: .*no_field"),
        ("other", {"fields": "tree_width"}, "fields: "),
        ("other", {"summary": "two\nlines"}, "summary: expected one line"),
    ],
)
def test_refused_registrations(name, options, message):
    with registered("mine", copying):
        with pytest.raises(ValueError, match=message):
            register(name, **{"build": copying, **options})
        assert list(methods())[-1] == "mine"


@pytest.mark.parametrize("name", ["tree", "nobody"])
def test_only_what_was_added_can_be_removed(name):
    with pytest.raises(ValueError, match=f"name: no method '{name}' was registered"):
        unregister(name)


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Installed packages with entry points, each "name = module" and the module's text."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(package, module, text, entry):
        (tmp_path / f"{module}.py").write_text(text)
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[fastspec.drafters]\n{entry}\n")

    before = set(methods())
    yield install
    for name in set(methods()) - before:
        unregister(name)


ADDING = """
from fastspec.drafters import PromptLookupDrafter, register
def add(name={name!r}):
    register(name, lambda context: PromptLookupDrafter(1, 2), summary="from a package")
"""


def test_methods_of_installed_packages(packages, model, caplog):
    packages("whole", "whole_a", ADDING.format(name="packaged"), "packaged = whole_a:add")
    text = ADDING.format(name="imported") + "add()\n"
    packages("module", "whole_b", text, "imported = whole_b")
    packages("broken", "broken_c", "import no_such_module_at_all", "c = broken_c:add")
    packages("failing", "broken_d", "def add():\n    1 / 0", "d = broken_d:add")
    packages("clashing", "broken_e", ADDING.format(name="tree"), "e = broken_e:add")
    packages("absent", "broken_f", "", "f = broken_f:add")
    with caplog.at_level(logging.WARNING):
        engine = Engine(model, spec="packaged")  # asks all of them
    assert ids(engine) == ids(Engine(model))
    assert methods()["packaged"].summary == "from a package"
    assert {"packaged", "imported"} <= set(methods())
    reported = sorted(record.getMessage() for record in caplog.records)
    assert [line.split(":")[0] for line in reported] == [
        f"package {name}" for name in ("absent", "broken", "clashing", "failing")
    ]
    assert not any("\n" in line for line in reported)


def test_packages_are_asked_for_unknown_names_and_lists_alone(packages):
    text = ADDING.format(name="lazy") + "add()\n"
    packages("lazy", "lazy_module", text, "lazy = lazy_module")
    SpecConfig("mag")
    assert method_named("mag") in BUILT_IN
    assert "lazy_module" not in sys.modules
    assert "lazy" in methods()
    assert "lazy_module" in sys.modules


@pytest.mark.parametrize(
    ("draft", "spec"),
    [
        ("tiny-draft", "auto"),
        ("tiny-draft", "draft_model"),
        ("tiny-draft", "cascade"),
        ("tiny-draft", {"method": "draft_model", "heterogeneous_vocab": "reencoding"}),
        ("tiny-glide", "auto"),
        ("tiny-glide", "glide"),
    ],
    ids=str,
)
def test_the_kind_of_a_draft_is_read_once(monkeypatch, draft, spec):
    """Of a hub id, each time may be a request."""
    read, read_part = [], loading._read_part
    monkeypatch.setattr(loading, "_read_part", lambda *args: read.append(args) or read_part(*args))
    Engine("tiny", draft, spec=spec)
    parts = [part for _, field, part, *_ in read if field == "drafter"]
    assert len(parts) == len(set(parts)) == 2  # configuration and tokenizer
