"""`fastspec batch`: answers in order, once each, whatever is cut off or killed."""

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Client
from types import SimpleNamespace

import pytest

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig
from fastspec.serve.requests import CHAT_FIELDS, COMPLETION_FIELDS
from fastspec.tools import batch
from fastspec.tools.batch import BatchJob, handed_out, run_batch
from fastspec.tools.settings import Models

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture
def job(model_folders):
    config = EngineConfig(max_batch_size=2)
    spec = SpecConfig(num_speculative_tokens=3)
    folders = (str(model_folders[name]) for name in ("target", "draft"))
    return BatchJob(Models(*folders, threads=1), PARAMS, spec, config)


@pytest.fixture
def source(tmp_path):
    rows = [{"id": number, "prompt": f"def f{number}("} for number in range(12)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "in.jsonl"


def answers(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def batch_command(pair, source, tmp_path):
    options = ["--max-tokens", "8", "--temperature", "0", "--ignore-eos", "--max-batch-size", "2"]
    files = ["--input", source, "--output", tmp_path / "out.jsonl"]
    return [str(part) for part in ("-m", "fastspec", "batch", *pair, *options, *files)]


@pytest.fixture
def expected(job, source):
    prompts = [row["prompt"] for row in answers(source)]
    return [output.text for output in Engine(job.models.target).generate(prompts, PARAMS)]


def test_answers_are_in_order(invoke, pair, source, tmp_path, expected):
    options = ["--max-tokens", "8", "--temperature", "0", "--ignore-eos"]
    result = invoke("batch", *pair, *options, "--input", source, "--output", tmp_path / "out.jsonl")
    assert result.exit_code == 0, result.stderr
    rows = answers(tmp_path / "out.jsonl")
    assert [row["id"] for row in rows] == [*range(12)]
    assert [row["text"] for row in rows] == expected
    assert {row["finish_reason"] for row in rows} == {"length"}
    assert [*tmp_path.glob("*.part")] == []


def test_rows_have_options_of_their_own(job, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [{"prompt": "def f("}, {"prompt": "def f(", "max_tokens": 3, "temperature": 0}]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run_batch(job, source, target) == 0
    assert [len(row["token_ids"]) for row in answers(target)] == [8, 3]
    assert answers(target)[1]["max_tokens"] == 3


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", -1, "line 2: temperature: expected"),
        ("logprobs", 3, "line 2: logprobs: cannot be set in a row"),
        ("n", 2, "line 2: n: cannot be set in a row"),
        ("text", "mine", "line 2: text: reserved for the answer"),
        ("tools", [], "line 2: tools: cannot be set in a row"),
        ("response_format", {}, "line 2: response_format: cannot be set in a row"),
        ("max_completion_tokens", 3, "line 2: max_completion_tokens: cannot be set in a row"),
        ("top_P", 0.5, "line 2: top_P: expected top_p"),
        ("max_token", 3, "line 2: max_token: expected max_tokens"),
        ("maxTokens", 3, "line 2: maxTokens: expected max_tokens"),
        ("top-logprobs", 3, "line 2: top-logprobs: expected top_logprobs"),
        ("score", float("inf"), "line 2: score: expected only finite numbers"),
        ("meta", {"scores": [1, float("nan")]}, "line 2: meta: expected only finite numbers"),
    ],
)
def test_rows_that_cannot_be_answered_as_they_ask(job, tmp_path, field, value, message):
    source = tmp_path / "in.jsonl"
    rows = [{"prompt": "a"}, {"prompt": "a", field: value}]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=message):
        run_batch(job, source, tmp_path / "out.jsonl")


def test_no_field_of_a_request_is_passed_over():
    """Those that a row keeps change nothing in a server's answer."""
    kept = {"model", "user", "safety_identifier", "prompt_cache_key", "store", "metadata"}
    kept |= {"service_tier", "prompt", "messages", "prediction", "prompt_cache_retention"}
    kept |= {"modalities"}
    requests = CHAT_FIELDS | COMPLETION_FIELDS
    assert requests - batch._OPTIONS - batch._NOT_OF_ROWS == kept


def test_a_run_that_was_cut_off_goes_on(job, source, tmp_path, expected, monkeypatch):
    target, part = tmp_path / "out.jsonl", tmp_path / "out.jsonl.part"

    def stop(done, total):
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_batch(job, source, target, progress=stop)
    assert not target.exists()
    with part.open("a") as stream:
        stream.write('[7, {"text": "cut o')
    asked, answered = [], batch._answered

    def counted(engine, job, take):
        for number, answer in answered(engine, job, take):
            asked.append(number)
            yield number, answer

    monkeypatch.setattr(batch, "_answered", counted)
    assert run_batch(job, source, target) == 0
    assert len(asked) == 7
    assert [row["text"] for row in answers(target)] == expected


def test_two_runs_do_not_share_a_file(job, source, tmp_path, expected):
    def run_another(done, total):
        with pytest.raises(ValueError, match="output: another run is writing"):
            run_batch(job, source, tmp_path / "out.jsonl")

    assert run_batch(job, source, tmp_path / "out.jsonl", progress=run_another) == 0
    assert [*tmp_path.glob("out*")] == [tmp_path / "out.jsonl"]


@pytest.mark.check
def test_a_process_ends_when_nobody_asks(job):
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=batch.work, args=(there, job), daemon=True)
    process.start()
    there.close()
    here.close()  # as where the one that asks is killed
    process.join(60)
    assert process.exitcode is not None


def is_running(group):
    """Whether any process of a group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.check
def test_an_interrupted_run_with_replicas_goes_on(invoke, pair, tmp_path):
    """Ctrl-C reaches the processes that it has started as well; nobody says more than that."""
    rows = [{"prompt": f"def f{number % 4}("} for number in range(40)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    target, part = tmp_path / "out.jsonl", tmp_path / "out.jsonl.part"
    files = ["--input", tmp_path / "in.jsonl", "--output", target]
    options = ["--temperature", "0", "--ignore-eos", "--max-batch-size", "2", "--max-tokens", "40"]
    job = ["batch", *pair, *options, *files]
    command = [sys.executable, "-m", "fastspec", *job, "--replicas", "2"]
    given = {"env": ENVIRONMENT, "start_new_session": True, "stderr": subprocess.PIPE}
    # Where the tests run in the background of a script, a child would inherit an ignored SIGINT.
    given["preexec_fn"] = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen([*map(str, command)], text=True, **given) as run:
        while run.poll() is None and not (part.exists() and part.read_text().count("\n") > 1):
            time.sleep(0.01)
        os.killpg(run.pid, signal.SIGINT)
        _, said = run.communicate(timeout=60)
    assert (run.returncode, said) == (130, "fastspec: error: interrupted\n")
    while is_running(run.pid):
        time.sleep(0.01)
    kept = dict(json.loads(line) for line in part.read_text().splitlines()[1:])
    assert 0 < len(kept) < 40
    assert not target.exists()
    assert invoke(*job).exit_code == 0
    done = answers(target)
    assert all(done[number]["text"] == answer["text"] for number, answer in kept.items())
    assert len({(row["prompt"], row["text"]) for row in done}) == 4


def test_the_last_process_may_die_while_it_is_given_rows(job):
    here, there = multiprocessing.Pipe()
    there.close()
    with pytest.raises(ValueError, match="every process has died"):
        list(handed_out(job, deque([(0, {"prompt": "a"})]), [here]))


def test_messages_are_a_conversation_and_a_prompt_is_a_text(job, tmp_path):
    rows = [{"messages": "hi"}, {"prompt": 5}, {"prompt": [{"role": "user", "content": "hi"}]}]
    rows.append({"prompt": {"messages": [{"role": "user", "content": "hi"}]}})
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows.append({"messages": [{"role": "user", "content": [{"type": "image_url", "text": "hi"}]}]})
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run_batch(job, tmp_path / "in.jsonl", tmp_path / "out.jsonl") == 5
    errors = [row["error"] for row in answers(tmp_path / "out.jsonl")]
    assert [error.partition(":")[0] for error in errors] == [
        "messages",
        "prompt",
        "prompt",
        "prompt",
        "messages",
    ]
    assert "parts of type text" in errors[-1]


def test_messages_in_a_template_of_ones_own(job, tmp_path, source):
    (tmp_path / "quoted.jinja").write_text("<{{ messages[0].content }}>")
    rows = [{"messages": [{"role": "user", "content": "hi"}]}, {"prompt": "<hi>"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = replace(job, models=replace(job.models, chat_template=tmp_path / "quoted.jinja"))
    (tmp_path / "quoted.jinja").unlink()  # as on another machine
    assert run_batch(job, tmp_path / "in.jsonl", tmp_path / "out.jsonl") == 0
    wrapped, spelt_out = answers(tmp_path / "out.jsonl")
    assert wrapped["token_ids"] == spelt_out["token_ids"]


def test_halves_of_characters_stay_escapes(job, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a", "note": "\\ud800"}\n{"prompt": "b", "note": "\u00e9"}\n')
    assert run_batch(job, source, target) == 0
    assert [row["note"] for row in answers(target)] == ["\ud800", "\u00e9"]


def test_the_rest_of_another_run_is_refused(job, source, tmp_path):
    (tmp_path / "out.jsonl.part").write_text('{"fastspec_batch": 1, "digest": "other"}\n')
    with pytest.raises(ValueError, match=r"output: .*out\.jsonl\.part is from a run"):
        run_batch(job, source, tmp_path / "out.jsonl")


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('[1, {"text"', "line 2 is cut off or not JSON"),
        ('["1", {}]', "line 2 has no result of this command"),
        ("5", "line 2 has no result of this command"),
    ],
)
def test_a_damaged_rest_is_named_and_left(job, source, tmp_path, line, named):
    """Only a last line without its end is what an interruption leaves."""
    part, target = tmp_path / "out.jsonl.part", tmp_path / "out.jsonl"

    def stop(done, total):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_batch(job, source, target, progress=stop)
    assert [*tmp_path.glob("*.lock")] == []
    head = part.read_text().splitlines(keepends=True)[0]
    part.write_text(f"{head}{line}\n")
    with pytest.raises(ValueError, match=rf"^output: .*out\.jsonl\.part is damaged.*{named}"):
        run_batch(job, source, target)
    assert part.read_text() == f"{head}{line}\n"
    part.write_text("somebody's line")
    with pytest.raises(ValueError, match=r"^output: .*out\.jsonl\.part is from a run"):
        run_batch(job, source, target)
    assert part.read_text() == "somebody's line"


def test_a_refused_run_leaves_nothing_in_the_way(invoke, pair, source, tmp_path):
    files = ["--input", source, "--output", tmp_path / "out.jsonl"]
    result = invoke("batch", "--target", tmp_path / "nowhere", *files)
    assert (result.exit_code, "--target: no such folder" in result.stderr) == (1, True)
    assert [*tmp_path.glob("out*")] == []
    assert invoke("batch", *pair, *files, "--max-tokens", "1").exit_code == 0


def test_no_rows_have_no_answers(job, tmp_path):
    (tmp_path / "in.jsonl").write_text("\n")
    assert run_batch(job, tmp_path / "in.jsonl", tmp_path / "out.jsonl") == 0
    assert (tmp_path / "out.jsonl").read_text() == ""


def test_errors_name_the_options(invoke, pair, source, tmp_path):
    (tmp_path / "out.jsonl.part").write_text("{}\n")
    files = ["--input", source, "--output", tmp_path / "out.jsonl"]
    assert "fastspec: error: --output: " in invoke("batch", *pair, *files).stderr
    reading, writing = os.pipe()
    for output in (f"/dev/fd/{writing}", "/dev/null"):
        result = invoke("batch", *pair, "--input", source, "--output", output)
        assert (result.exit_code, "--output: expected a regular" in result.stderr) == (2, True)
    os.close(reading)
    os.close(writing)
    source.write_text('{"prompt": 5, "n": 2}\n')
    assert "fastspec: error: --input: " in invoke("batch", *pair, *files).stderr
    source.write_text('{"prompt": "a", "max_tokens": 0}\n')  # a field of a row is no option
    told = f"fastspec: error: --input: {source}, line 1: max_tokens: expected an int >= 1"
    assert told in invoke("batch", *pair, *files).stderr.replace("\n", " ").replace("  ", " ")


@pytest.mark.check
def test_a_killed_process_loses_nothing(job, source, tmp_path, expected):
    killed = []

    def kill(done, total):
        if done == 3 and not killed:
            victim = multiprocessing.active_children()[0]
            killed.append(victim.pid)
            os.kill(victim.pid, signal.SIGKILL)

    assert run_batch(job, source, tmp_path / "out.jsonl", 2, kill) == 0
    assert killed
    rows = answers(tmp_path / "out.jsonl")
    assert [row["id"] for row in rows] == [*range(12)]
    assert [row["text"] for row in rows] == expected
    assert multiprocessing.active_children() == []


def test_rows_that_cannot_be_answered_fail_alone(invoke, chat_pair, tmp_path):
    rows = [
        {"prompt": "x"},
        {"prompt": "y" * 500},
        {"prompt": ""},
        {"prompt": 5},
        {"messages": []},
        {"messages": [{"role": "user", "content": "hi"}], "name": "kept"},
    ]
    (tmp_path / "in").write_text("\n".join(map(json.dumps, rows)))
    arguments = ["--input", tmp_path / "in", "--output", tmp_path / "out", "--max-tokens", "4"]
    result = invoke("batch", *chat_pair, *arguments)
    assert result.exit_code == 1
    assert "4 prompts failed" in result.stderr
    failed = [row["error"] is not None for row in answers(tmp_path / "out")]
    assert failed == [False, True, True, True, True, False]
    assert answers(tmp_path / "out")[-1]["name"] == "kept"


@pytest.mark.parametrize("line", ["{}", "[1]", '{"prompt": "x", "messages": []}', "{"])
def test_rows_that_are_none(job, tmp_path, line):
    (tmp_path / "in").write_text(f'{{"prompt": "x"}}\n{line}\n')
    with pytest.raises(ValueError, match="line 2"):
        run_batch(job, tmp_path / "in", tmp_path / "out")


def test_processes_that_cannot_load_say_why(source, tmp_path, monkeypatch):
    @contextmanager
    def in_a_thread(job):
        here, there = multiprocessing.Pipe()
        threading.Thread(target=batch.work, args=(there, job)).start()
        yield here

    monkeypatch.setattr(batch, "process", in_a_thread)
    absent = BatchJob(Models(str(tmp_path)), PARAMS, SpecConfig(), EngineConfig())
    with pytest.raises(ValueError, match="target"):
        run_batch(absent, source, tmp_path / "out", 2)


def test_processes_of_a_launcher_are_no_replicas(invoke, pair, source, tmp_path, monkeypatch):
    command = ["batch", *pair, "--input", source, "--output", tmp_path / "out.jsonl"]
    monkeypatch.setenv("WORLD_SIZE", "4")  # alone it is no launcher's
    assert invoke(*command, "--max-tokens", "2").exit_code == 0
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    result = invoke(*command, "--replicas", "2")
    assert (result.exit_code, "--replicas" in result.stderr) == (2, True)
    monkeypatch.setenv("MASTER_ADDR", "host.invalid")
    result = invoke(*command)
    assert (result.exit_code, "MASTER_ADDR: the first process cannot" in result.stderr) == (
        1,
        True,
    )


def test_a_first_process_that_nobody_reaches(invoke, pair, source, tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    store = {"fastspec batch": json.dumps((address, "00"))}
    monkeypatch.setattr(batch, "_store", lambda: SimpleNamespace(get=store.get, set=max))
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    files = ["--input", source, "--output", tmp_path / "out.jsonl"]
    result = invoke("batch", *pair, *files)
    assert (result.exit_code, "RANK: cannot reach the first" in result.stderr) == (1, True)


def test_strangers_are_not_taken_for_processes(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)

    def connect():
        socket.create_connection(listener.address).close()
        with pytest.raises(multiprocessing.AuthenticationError):
            Client(listener.address, authkey=b"other")
        with Client(listener.address, authkey=b"own") as connection:
            connection.send("hello")

    with batch._listener(b"own") as listener:
        caller = threading.Thread(target=connect)
        caller.start()
        with batch._accepted(listener) as connection:
            assert connection.recv() == "hello"
        caller.join()


@pytest.mark.check
@pytest.mark.parametrize("kind", ["torchrun", "accelerate"])
def test_processes_of_several_launchers_share_a_file(batch_command, tmp_path, expected, kind):
    """As on two machines, one launcher on each."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    launch = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    launch += ["--master-addr", "127.0.0.1", "--master-port", port, "--node-rank"]
    if kind == "accelerate":
        pytest.importorskip("accelerate")
        launch = ["-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu"]
        launch += ["--num_machines", "2", "--num_processes", "2", "--main_process_ip", "127.0.0.1"]
        launch += ["--main_process_port", port, "--machine_rank"]
    runs = [
        subprocess.Popen([sys.executable, *launch, number, *batch_command], env=ENVIRONMENT)
        for number in "01"
    ]
    assert [run.wait(300) for run in runs] == [0, 0]
    assert [row["text"] for row in answers(tmp_path / "out.jsonl")] == expected


@pytest.mark.check
def test_processes_of_accelerate_launch_share_a_file(batch_command, tmp_path, expected):
    pytest.importorskip("accelerate")
    launch = ["-m", "accelerate.commands.accelerate_cli", "launch", "--main_process_port", "0"]
    launch += ["--multi_gpu", "--num_processes", "2"]  # no GPU is asked for, but torchrun
    result = subprocess.run(
        [sys.executable, *launch, *batch_command], env=ENVIRONMENT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("out.jsonl") == 1
    rows = answers(tmp_path / "out.jsonl")
    assert [row["id"] for row in rows] == [*range(12)]
    assert [row["text"] for row in rows] == expected


@pytest.mark.check
def test_what_a_launched_process_had_when_it_died_is_answered(batch_command, tmp_path, expected):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ranks = []
    for rank in ("0", "1"):
        place = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        environment = ENVIRONMENT | place | {"MASTER_PORT": str(port)}
        ranks.append(subprocess.Popen([sys.executable, *batch_command], env=environment))
    part = tmp_path / "out.jsonl.part"
    while ranks[0].poll() is None and not (part.exists() and part.read_text().count("\n") > 1):
        time.sleep(0.01)
    ranks[1].kill()
    assert [rank.wait(300) for rank in ranks] in ([0, -signal.SIGKILL], [0, 0])
    assert [row["text"] for row in answers(tmp_path / "out.jsonl")] == expected


def test_without_ray_the_extra_is_named(invoke, pair, source, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "fastspec.serve.on_ray", raising=False)
    files = ["--input", source, "--output", tmp_path / "out.jsonl"]
    result = invoke("batch", *pair, *files, "--ray", "auto")
    assert result.exit_code == 2
    assert "fastspec-kernels[ray]" in result.stderr
