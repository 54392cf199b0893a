"""The embedded model and its drafter in this engine and in vLLM: the same prompts, greedy; texts and acceptance
compared.

    python tools/vllm_env.py /tmp/vllm-venv
    python tools/peers/against_vllm.py --venv /tmp/vllm-venv [--per-class 2] [--output-len 96] [--bench code]

Both get the same files: the model as float32 safetensors (`sparkdraft export safetensors`) and the drafter in the
speculators layout (`sparkdraft train export`). One server runs at a time, on the same cores: `sparkdraft serve`, then
`sparkdraft serve --engine vllm`, which runs the exported command behind our front. The openai client asks; --bench also
runs `sparkdraft bench serve` on both. Ends in one line of JSON; the status is 1 if acceptance differs by more than 5 %.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI

from sparkdraft.bridges.vllm.child import free_port
from sparkdraft.operate.bench.prompts import read_prompts

DEPTH = 15
TOLERANCE = 0.05
START_SECONDS = 900
OURS = ("--spec", str(DEPTH), "--no-ngram", "--threads", "1")  # of two cores vLLM computes on one
THEIRS = ("--engine", "vllm", "--spec", str(DEPTH), "--memory-fraction", "0.15")
COMMON = ("--dtype", "float32", "--max-model-len", "2048", "--max-seqs", "4", "--no-graphs", "--no-prefix-cache")
SAMPLING = ("--sampling-defaults", "openai", "--served-name", "smollm2")


def sparkdraft(*words: str) -> list[str]:
    return [sys.executable, "-m", "sparkdraft.cli.main", *words]


@contextmanager
def served(words: list[str], environ: dict[str, str]) -> Iterator[str]:
    """A server, from the moment that /health says ready."""
    port = free_port()
    process = subprocess.Popen([*words, "--port", str(port)], env=environ)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
    try:
        while True:
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the server did not become ready: {' '.join(words)}")
            try:
                if httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == httpx.codes.OK:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(0.5)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)


def ask(url: str, prompts: list[str], tokens: int) -> list[dict[str, Any]]:
    """The texts, and what was drafted and accepted for each."""
    client, found = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=600), []
    for prompt in prompts:
        answer = client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": prompt}],
            max_tokens=tokens,
            temperature=0,
            extra_body={"return_speculation": True},
        )
        stats = (answer.model_extra or {})["metrics"]["speculative_decoding"]
        found.append({"text": answer.choices[0].message.content, **stats})
    return found


def length(rows: list[dict[str, Any]]) -> float:
    """Tokens per step that verified drafts."""
    return 1 + sum(row["num_accepted_draft_tokens"] for row in rows) / sum(row["num_spec_steps"] for row in rows)


def same_share(one: str, other: str) -> float:
    """The part of the longer text before the first difference."""
    common = next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    same = min(len(one), len(other)) if common is None else common
    return same / max(len(one), len(other), 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=Path("/tmp/vllm-venv"))
    parser.add_argument("--per-class", type=int, default=2)
    parser.add_argument("--output-len", type=int, default=96)
    parser.add_argument("--bench", default="", metavar="CLASSES", help="classes for `bench serve` (default: not run)")
    parser.add_argument("--keep", type=Path, help="a folder for files and answers; what is there is not made again")
    args = parser.parse_args()
    classes = read_prompts(args.per_class)
    prompts = [prompt for each in classes.values() for prompt in each]
    environ = {**os.environ, "PATH": f"{args.venv / 'bin'}:{os.environ['PATH']}"}
    with tempfile.TemporaryDirectory() as scratch:
        place = args.keep or Path(scratch)
        model, drafter = convert(place)
        both = {}
        for name, flags in (("sparkdraft", OURS), ("vllm", THEIRS)):
            answers = place / f"{name}.json"
            if not answers.exists():
                words = sparkdraft("serve", "--model", model, "--drafter", drafter, *COMMON, *SAMPLING, *flags)
                with served(words, environ) as url:
                    answers.write_text(json.dumps(ask(url, prompts, args.output_len)), encoding="utf-8")
                    if args.bench:
                        bench = ("bench", "serve", "--url", url, "--classes", args.bench, "--concurrency", "1,2")
                        words = sparkdraft(*bench, "--requests", "2", "--output-len", str(args.output_len))
                        subprocess.run(words, check=True)
            both[name] = json.loads(answers.read_text(encoding="utf-8"))
    return report(classes, both)


def convert(place: Path) -> tuple[str, str]:
    """The model and the drafter as vLLM reads them."""
    place.mkdir(parents=True, exist_ok=True)
    model, drafter = place / "smollm2", place / "drafter"
    if not model.exists():
        subprocess.run(sparkdraft("export", "safetensors", "--out", str(model)), check=True)
    if not drafter.exists():
        words = sparkdraft("train", "export", "smollm2", "--layout", "speculators", "--model", str(model))
        subprocess.run([*words, "--out", str(drafter)], check=True)
    return str(model), str(drafter)


def report(classes: dict[str, list[str]], both: dict[str, list[dict[str, Any]]]) -> int:
    ours, theirs = both["sparkdraft"], both["vllm"]
    print("class      prompts  equal texts  same part  length here  length in vLLM")
    start = 0
    for name, each in [*classes.items(), ("all", [""] * len(ours))]:
        begin = 0 if name == "all" else start
        mine, other = ours[begin : begin + len(each)], theirs[begin : begin + len(each)]
        start += len(each)
        pairs = [(a["text"], b["text"]) for a, b in zip(mine, other, strict=True)]
        equal, part = sum(a == b for a, b in pairs), sum(same_share(a, b) for a, b in pairs) / len(pairs)
        print(f"{name:<10} {len(each):7}  {equal:11}  {part:9.3f}  {length(mine):11.3f}  {length(other):14.3f}")
    equal_texts = [(a, b) for a, b in zip(ours, theirs, strict=True) if a["text"] == b["text"]]
    lengths = {"all": (length(ours), length(theirs))}
    if equal_texts:
        lengths["equal texts"] = (length([a for a, _ in equal_texts]), length([b for _, b in equal_texts]))
    ratio = lengths["all"][1] / lengths["all"][0]
    facts = {name: [round(x, 4) for x in pair] for name, pair in lengths.items()}
    print(json.dumps({"prompts": len(ours), "equal": len(equal_texts), "lengths": facts, "ratio": round(ratio, 4)}))
    return 0 if abs(ratio - 1) <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
