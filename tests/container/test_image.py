"""The CPU image is built and run: without root, on a read-only root, by the variables of other DFlash containers; it
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

from tests.container.built import Container, Image, remove, unavailable

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(unavailable()), reason=unavailable())]
CHECK = ("python", "-m", "sparkdraft.server.healthcheck")


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    folder = tmp_path_factory.mktemp("image")
    try:
        yield Image(folder)
    finally:
        remove(folder)


@pytest.fixture(scope="module")
def container(image: Image, smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    """With the embedded model in its volume, as after a first start."""
    cache = tmp_path_factory.mktemp("cache")
    models = cache / "sparkdraft" / "models"
    models.mkdir(parents=True)
    shutil.copy(smollm2_path, models)
    user, group = map(int, image.config["User"].split(":"))
    for path in (cache, *cache.rglob("*")):
        shutil.chown(path, user, group)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    variables = {"MODEL_PATH": "smollm2", "SERVED_MODEL_NAME": "small", "DFLASH_NUM_SPEC_TOKENS": "4"}
    variables |= {"MAX_MODEL_LEN": "2048", "MAX_NUM_SEQS": "3", "MAX_NUM_BATCHED_TOKENS": "1024"}
    variables |= {"ATTENTION_BACKEND": "flash_attn", "VLLM_API_KEY": "key", "MAX_NUM_SEQ": "16"}
    yield (running := Container(image, cache, **variables, SPARKDRAFT_PORT=port))
    running.end()


@pytest.fixture(scope="module")
def client(container: Container) -> Iterator[openai.OpenAI]:
    """Once it is healthy; until then its health check has failed with the stage."""
    unhealthy, deadline = "", time.monotonic() + 600
    while (result := container.run(*CHECK)).returncode:
        unhealthy = result.stderr if "answers 503" in result.stderr else unhealthy
        assert container.outer.poll() is None and time.monotonic() < deadline, container.said()
        time.sleep(0.5)
    assert '"stage":' in unhealthy
    found = re.search(r"API +http://0\.0\.0\.0:(\d+)/v1  \(with the key\)", container.said())
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
    status_page = httpx.get(f"{client.base_url}status", headers={"Authorization": "Bearer key"})
    assert "context 2,048 tokens, 3 requests at once" in status_page.text, status_page.text
    said = container.said()
    assert "MAX_NUM_SEQ is not read; did you mean MAX_NUM_SEQS?" in said
    assert "ATTENTION_BACKEND is flash_attn: accepted and not needed" in said
    assert "no C++ compiler" not in said and "Traceback" not in said, said
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="another").models.list()


def test_it_drains_when_it_is_stopped(container: Container, client: openai.OpenAI) -> None:
    """The last one: a stream that runs when SIGTERM comes is finished, and the process exits with 0."""
    stream = client.completions.create(model="small", prompt="The sea is", max_tokens=200, temperature=0, stream=True)
    pieces = [next(stream)]
    os.kill(container.pid, signal.SIGTERM)
    pieces += list(stream)
    assert pieces[-1].choices[0].finish_reason in ("length", "stop")
    assert container.outer.wait(60) == 0, container.said()
