"""The CPU image is built and run: without root, on a read-only root, by every variable of other DFlash containers; it
answers the openai client, its health check tells the truth, and it drains."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from sparkdraft.drafters.find import default_drafter
from tests.container.built import Container, Image, remove, unavailable
from tests.container.test_container_files import SEEDS
from tests.patience import PATIENT

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(unavailable()), reason=unavailable())]
CHECK = ("python", "-m", "sparkdraft.server.healthcheck")
# Each has another value than it has by default, and /v1/status, the log or an answer shows it.
VARIABLES = {
    **{"MODEL_PATH": "/cache/target.gguf", "SERVED_MODEL_NAME": "small", "DFLASH_DRAFTER": "/cache/drafter"},
    **{"DFLASH_NUM_SPEC_TOKENS": "4", "MAX_MODEL_LEN": "2048", "MAX_NUM_SEQS": "3", "MAX_NUM_BATCHED_TOKENS": "1024"},
    **{"GPU_MEMORY_UTILIZATION": "0.5", "ATTENTION_BACKEND": "flash_attn", "VLLM_API_KEY": "key"},
    **{"EXTRA_ARGS": "--generation-config vllm --seed 3", "ENABLE_TURBOQUANT": "1", "TQ_MODE": "hybrid"},
    **{"TQ_KEY_BITS": "3", "TQ_VALUE_BITS": "4", "TQ_RING_CAPACITY": "64", "TQ_INITIAL_LAYERS": "2"},
}
MISSPELT = {"MAX_NUM_SEQ": "16"}


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    folder = tmp_path_factory.mktemp("image")
    try:
        yield Image(folder)
    finally:
        remove(folder)


@pytest.fixture(scope="module")
def container(image: Image, smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    """With a model and its drafter in the volume, as another container has them in a mounted folder."""
    assert VARIABLES.keys() == set(SEEDS)
    cache, drafter = tmp_path_factory.mktemp("cache"), default_drafter("smollm2")
    assert drafter
    shutil.copy(smollm2_path, cache / "target.gguf")
    shutil.copytree(drafter, cache / "drafter")
    user, group = map(int, image.config["User"].split(":"))
    for path in (cache, *cache.rglob("*")):
        shutil.chown(path, user, group)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    yield (running := Container(image, cache, **VARIABLES, **MISSPELT, SPARKDRAFT_PORT=port))
    running.end()


@pytest.fixture(scope="module")
def client(container: Container) -> Iterator[openai.OpenAI]:
    """Once it is healthy; until then its health check has failed with the stage."""
    unhealthy, deadline = "", time.monotonic() + 600
    while (result := container.run(*CHECK)).returncode:
        unhealthy = result.stderr if "answers 503" in result.stderr else unhealthy
        assert container.outer.poll() is None and time.monotonic() < deadline, container.said()
        time.sleep(3)  # a check costs half a second of a core, which the server needs
    assert '"stage":' in unhealthy
    found = re.search(r"API +http://0\.0\.0\.0:(\d+)/v1  \(an API key is required\)", container.said())
    assert found, container.said()
    with openai.OpenAI(base_url=f"http://127.0.0.1:{found[1]}/v1", api_key="key", max_retries=0) as made:
        yield made


def test_what_the_image_says(image: Image) -> None:
    config = image.config
    assert config["User"] == "10001:10001" and config["StopSignal"] == "SIGTERM"
    assert config["Healthcheck"]["Test"] == ["CMD", *CHECK]
    assert config["Entrypoint"] == ["sparkdraft"] and config["Cmd"] == ["serve"]
    assert list(config["Volumes"]) == ["/cache"] and list(config["ExposedPorts"]) == ["8000/tcp"]
    names = [variable.partition("=")[0] for variable in config["Env"]]
    assert not [name for name in names if re.search("KEY|TOKEN|SECRET|PASS", name)]


def test_it_answers_as_another_user_on_a_root_that_cannot_be_written(
    container: Container, client: openai.OpenAI
) -> None:
    status = Path(f"/proc/{container.pid}/status").read_text()
    assert re.search(r"Uid:\s+10001\s+10001", status) and re.search(r"CapEff:\s+0+\n", status)
    assert re.search(r"NSpid:\s+\d+\s+1\n", status), "it is the first process, as in any container"
    assert "Read-only file system" in container.run("touch", "/opt/sparkdraft/x", user="0:0").stderr
    answer = client.chat.completions.create(
        model="small",
        messages=[{"role": "user", "content": "Count from one to twenty."}],
        max_tokens=32,
        temperature=0,
        extra_body={"return_speculation": True},
    )
    assert answer.model == "small" and answer.choices[0].message.content
    assert answer.model_extra
    assert len(answer.model_extra["metrics"]["speculative_decoding"]["acceptance_histogram"]) == 5, "0 to 4 drafts"
    said = container.said()
    assert "no C++ compiler" not in said and "Traceback" not in said, said
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="another").models.list()


def test_every_variable_means_what_it_means_in_other_containers(container: Container, client: openai.OpenAI) -> None:
    found = httpx.get(f"{client.base_url}status", headers={"Authorization": "Bearer key"}, timeout=PATIENT).json()
    plan = found["plan_facts"]
    assert (found["source"], found["names"], found["drafter"]["name"]) == ("/cache/target.gguf", ["small"], "dflash")
    assert (plan["max_model_len"], plan["max_seqs"], plan["max_step_tokens"]) == (2048, 3, 1024), plan
    assert found["sampling_defaults"] == {"temperature": 1.0}, "EXTRA_ARGS: vLLM's own, not the model's"
    coded = plan["coded"]
    assert (plan["kv"], coded["key_bits"][:3], coded["value_bits"]) == ("turboquant", [4, 4, 3], 4), coded
    assert (coded["recent"], coded["captured"]) == (64, False), "TQ_MODE: hybrid keeps the last tokens as they are"
    engine = Path(f"/proc/{container.pid}/task/{container.pid}/children").read_text().split()[0]
    told = Path(f"/proc/{engine}/cmdline").read_text()
    assert '"memory_fraction": 0.5' in told and '"drafter": "/cache/drafter"' in told, told
    assert "key" not in told.split('"'), "the key is on no command line"
    said = container.said()
    assert "MAX_NUM_SEQ is not read; did you mean MAX_NUM_SEQS?" in said
    assert "ATTENTION_BACKEND is flash_attn: accepted and not needed" in said
    assert "EXTRA_ARGS: --seed: requests have seeds" in said


def test_it_drains_when_it_is_stopped(container: Container, client: openai.OpenAI) -> None:
    """The last one: a stream that runs when SIGTERM comes is finished, and the process exits with 0."""
    stream = client.completions.create(model="small", prompt="The sea is", max_tokens=20, temperature=0, stream=True)
    next(stream)
    os.kill(container.pid, signal.SIGTERM)
    pieces = list(stream)
    assert pieces and pieces[-1].choices[0].finish_reason in ("length", "stop")
    assert container.outer.wait(PATIENT) == 0, container.said()
