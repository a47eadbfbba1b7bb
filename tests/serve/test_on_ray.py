"""Ray: rows of a file on actors, and replicas of the server, on a cluster of this machine."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from functools import partial

import httpx2
import psutil
import pytest

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig
from fastspec.serve import ray_app
from fastspec.tools.batch import BatchJob, run_batch
from fastspec.tools.settings import Models

from ..models import byte_tokenizer, perturbed, random_model
from .helpers import wait_for

# Not in the extra [test]: with it come some fifty packages and 600 MB.
ray = pytest.importorskip("ray")
from fastspec.serve.on_ray import answers  # noqa: E402

pytestmark = pytest.mark.check

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [f"def f{number}(" for number in range(12)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    target = random_model("llama", num_hidden_layers=2)
    for name, model in {"target": target, "draft": perturbed(target, 0.1)}.items():
        model.save_pretrained(root / name)
        byte_tokenizer().save_pretrained(root / name)
    return str(root / "target"), str(root / "draft")


@pytest.fixture(scope="module")
def expected(folders):
    return [output.text for output in Engine(folders[0]).generate(PROMPTS, PARAMS)]


@pytest.fixture(scope="module")
def cluster():
    """Two processors of this machine, with no reports to anybody and no file in the home folder."""
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_TOKEN": "0123456789abcdef" * 2}
    patient = {
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",
        "RAY_raylet_start_wait_time_s": "300",
    }
    temporary = tempfile.TemporaryDirectory(
        ignore_cleanup_errors=True
    )  # paths of sockets are short
    with pytest.MonkeyPatch.context() as patch, temporary as folder:
        for name, value in (quiet | patient).items():
            patch.setenv(name, value)
        ray.init(num_cpus=2, include_dashboard=False, _temp_dir=folder, log_to_driver=False)
        yield
        ray.shutdown()
        wait_for(lambda: not actors(""))


def actors(name):
    """Processes of Ray whose title has a name in it."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            title = " ".join(process.cmdline())
        except psutil.Error:
            continue
        found += [process] if "ray::" in title and name in title else []
    return found


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.usefixtures("cluster")
def test_rows_are_answered_once_though_an_actor_is_killed(folders, expected, tmp_path):
    source = write(tmp_path / "in", [{"id": n, "prompt": text} for n, text in enumerate(PROMPTS)])
    job = BatchJob(Models(*folders), PARAMS, SpecConfig(num_speculative_tokens=3), EngineConfig())
    killed = []

    def kill(done, total):
        if done and not killed:
            killed.append(actors("_Actor")[0])
            killed[0].send_signal(signal.SIGKILL)

    elsewhere = partial(answers, "auto", 2)
    assert run_batch(job, source, tmp_path / "out", progress=kill, elsewhere=elsewhere) == 0
    assert killed
    rows = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [row["id"] for row in rows] == [*range(12)]
    assert [row["text"] for row in rows] == expected


@pytest.mark.usefixtures("cluster")
def test_actors_that_cannot_load_say_why(tmp_path):
    source = write(tmp_path / "in", [{"prompt": "a"}])
    absent = BatchJob(Models(str(tmp_path)), PARAMS, SpecConfig(), EngineConfig())
    with pytest.raises(ValueError, match="target"):
        run_batch(absent, source, tmp_path / "out", elsewhere=partial(answers, "auto", 1))


def test_a_cluster_that_is_not_there(tmp_path):
    source = write(tmp_path / "in", [{"prompt": "a"}])
    job = BatchJob(Models("tiny"), PARAMS, SpecConfig(), EngineConfig())
    with pytest.raises(ValueError, match=r"ray: cannot reach '127\.0\.0\.1:1'"):
        run_batch(job, source, tmp_path / "out", elsewhere=partial(answers, "127.0.0.1:1", 1))


@pytest.fixture(scope="module")
def client(folders, cluster):
    """Of two replicas."""
    target, draft = folders
    options = {"num_replicas": "2", "max_batch_size": "4", "allowed_host": '["ray.example"]'}
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ray.serve.start(http_options={"host": "127.0.0.1", "port": port})
    ray.serve.run(ray_app({"target": target, "draft": draft, "threads": "1", **options}))
    with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
        yield client
    ray.serve.shutdown()
    assert not actors("ServeReplica")


def test_replicas_answer_as_the_engine_does(client, expected):
    assert len(actors("ServeReplica")) == 2
    body = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    texts = [client.post("/v1/completions", json=body | {"prompt": each}) for each in PROMPTS]
    assert [each.json()["choices"][0]["text"] for each in texts] == expected
    response = client.post("/v1/completions", json=body | {"prompt": PROMPTS[0], "stream": True})
    events = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event)["choices"][0]["text"] for event in events[:-1]]
    assert (len(chunks) >= 8, "".join(chunks)) == (True, expected[0])
    assert client.get("/health").status_code == 200
    assert client.get("/health", headers={"host": "elsewhere.example"}).status_code == 403


def test_a_client_that_goes_is_aborted(client):
    body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_raw())

    def is_aborted():  # of the replica that answers this time
        return 'finished_reason="abort",model_name="target"} 1.0' in client.get("/metrics").text

    wait_for(is_aborted, 60)


def interrupted(command, begun, folder):
    """Interrupt a command and all that it has started, as Ctrl-C does: its status and its words."""
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_raylet_start_wait_time_s": "300"}
    paths = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **quiet, **paths, "RAY_TMPDIR": folder}
    environment.pop("RAY_ADDRESS", None)
    options = {"env": environment, "start_new_session": True, "stdout": subprocess.PIPE}
    options |= {"stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen([*map(str, command)], **options) as run:
        wait_for(lambda: run.poll() is not None or begun(), 300)
        processes = psutil.Process(run.pid).children(recursive=True)
        os.killpg(run.pid, signal.SIGINT)
        said, _ = run.communicate(timeout=90)
    _, left = psutil.wait_procs(processes, timeout=30)
    assert left == []
    return run.returncode, said


@pytest.fixture
def ray_folder():
    """A short path, as sockets need it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        yield folder


def test_interrupted_rows_on_ray_go_on(folders, expected, tmp_path, ray_folder):
    source = write(tmp_path / "in", [{"id": n, "prompt": text} for n, text in enumerate(PROMPTS)])
    part, (target, draft) = tmp_path / "out.part", folders
    options = ["--max-tokens", 8, "--temperature", 0, "--ignore-eos", "--max-batch-size", 1]
    command = [sys.executable, "-m", "fastspec", "batch", "--target", target, "--draft", draft]
    command += ["--input", source, "--output", tmp_path / "out", *options]
    on_ray = ["--ray", "local", "--replicas", 1, "--threads", 1]

    def has_begun():
        return part.exists() and part.read_text().count("\n") > 1

    status, said = interrupted([*command, *on_ray], has_begun, ray_folder)
    assert (status, said.splitlines()[-1]) == (130, "fastspec: error: interrupted")
    assert "Traceback" not in said
    assert all(json.loads(line) for line in part.read_text().splitlines())
    subprocess.run([*map(str, command)], check=True)  # without Ray: answers are the same
    rows = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [row["text"] for row in rows] == expected


def test_an_interrupted_application_ends(folders, tmp_path, ray_folder):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    args = {"target": folders[0], "methods": "", "threads": 1, "drain_timeout": 5}
    application = {"name": "app", "import_path": "fastspec.serve:ray_app", "args": args}
    http = {"host": "127.0.0.1", "port": port}
    config = tmp_path / "config.yaml"  # of which JSON is a part
    config.write_text(json.dumps({"http_options": http, "applications": [application]}))

    def answers_now():
        try:
            return httpx2.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200
        except httpx2.HTTPError:
            return False

    command = [sys.executable, "-c", "from ray.serve.scripts import cli; cli()", "run", config]
    status, said = interrupted(command, answers_now, ray_folder)
    assert (status, "Traceback" in said) == (0, False)
    assert "Got KeyboardInterrupt, shutting down" in said


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"port": "8000"}, "set them in Ray Serve"),
        ({"max_batch_size": "many"}, "max_batch_size: expected an int"),
        ({"num_replicas": "0"}, "num_replicas: expected an int >= 1 or auto"),
        ({"replicas": "2"}, "replicas: ray_app has no such argument"),
        ({"methods": "medusa"}, "medusa"),
    ],
)
def test_arguments_that_are_none(args, message):
    with pytest.raises(ValueError, match=message):
        ray_app(args)
