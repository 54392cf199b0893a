"""The real thing: two ranks of vLLM on one machine, on a CPU, tensor parallel, started, asked, killed and restarted.

    python tools/vllm_env.py /tmp/vllm-venv
    TEST_VLLM_VENV=/tmp/vllm-venv python -m pytest -m slow tests/bridges/cluster/test_real_vllm.py

Skipped where the variable names no such environment.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.bridges.cluster.simulated import Simulation, clean
from tests.patience import PATIENT, wait_for

VENV = Path(os.environ.get("TEST_VLLM_VENV", "/nowhere"))
PYTHON, VLLM = str(VENV / "bin/python"), VENV / "bin/vllm"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not VLLM.exists(),
        reason="no vLLM: `python tools/vllm_env.py /tmp/vllm-venv` makes an environment, TEST_VLLM_VENV names it",
    ),
]


def tiny_model(folder: Path) -> Path:
    """A llama of random weights whose heads two ranks can share."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    tokenizer = Tokenizer(
        models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2} | {str(i): 3 + i for i in range(120)}, "<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    return folder


def ask(port: int, ids: list[int]) -> Any:
    body = {"model": "tiny", "prompt": ids, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=PATIENT)
    return answer.json()["choices"][0]["text"]


def test_two_ranks_of_vllm_on_one_machine(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "tiny")
    with clean(Simulation(tmp_path, local=True, silence_seconds=60, restarts=1)) as here:
        environ = 'VLLM_CPU_KVCACHE_SPACE = "1"\nVLLM_CPU_OMP_THREADS_BIND = "nobind"\nOMP_NUM_THREADS = "1"\n'
        here.file.write_text(
            f'vllm = "{VLLM}"\n' + here.file.read_text().replace("[[host]]", f"[environment]\n{environ}[[host]]", 1)
        )
        flags = f"--model {model} --served-name tiny --dtype float32 --no-graphs --max-model-len 128 --spec off"
        with here.up(*flags.split(), "--drain-seconds", "1") as process:
            wait_for(lambda: here.state().get("phase") == "ready" or process.poll() is not None, here.said)
            assert process.poll() is None, here.said()
            text = ask(here.port, [5, 6, 7])
            assert len(text.split()) == 8
            logs = [(here.cache / f"cluster/sparks/rank{rank}.log").read_text() for rank in (0, 1)]
            assert "headless multiproc executor" in logs[1] and "world_size=2" in logs[0]
            os.kill(here.state()["pids"][1], signal.SIGKILL)
            wait_for(lambda: here.state()["restarts"] and here.state()["phase"] == "ready", here.said)
            assert ask(here.port, [5, 6, 7]) == text
            assert here.command("down").returncode == 0 and process.wait(PATIENT) == 0
            wait_for(lambda: not here.processes(), lambda: str(here.processes()))


def test_its_versions_are_read_without_importing_it() -> None:
    from sparkdraft.bridges.cluster.node.look import versions

    found = versions(str(VLLM))
    code = "import importlib.metadata as m; print(m.version('vllm'))"
    told = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert found["vllm"] == told and found["python"] == PYTHON and found["torch"]
