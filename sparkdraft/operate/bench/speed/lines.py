"""The lines of `bench check-speed`: what each compares. Their expected ratios are in expected_ratios.json."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    what: str
    lower_is_better: bool = False


def for_streams(kind: str, streams: int) -> str:
    """The name of a line that is measured at several numbers of streams."""
    return f"{kind}-{streams}-stream" + ("s" if streams > 1 else "")


CPU = (
    Line("parked-drafter", "plain steps with a drafter loaded, against --spec off, one stream"),
    Line("drafted-code", "default against --spec off: tok/s of `generate --chat`, one prompt in a fresh process"),
    Line("drafted-json", "the same, prompts that ask for JSON"),
    Line("drafted-questions", "the same, questions"),
    Line("drafted-prose", "the same, prose"),
    Line("auto-sampled", "default against --spec off: tok/s of whole requests, temperature 0.7, one stream"),
    Line("auto-4-streams", "default against --spec off: tok/s of whole requests, 4 streams"),
    Line("auto-16-streams", "the same, 16 streams"),
    Line("first-token-16-streams", "default against --spec off: time to the first token, 16 streams", True),
    Line("server-1-stream", "tok/s through HTTP against LLM.generate, one stream"),
    Line("server-4-streams", "the same, 4 streams"),
    Line("start-in-steps", "a fresh process's time to its first token, against 1000 plain steps", True),
    Line("start-with-drafter", "the same, default against --spec off", True),
    Line(
        "long-prompt-largest-gap", "8 streams while a long prompt is read: largest gap, against the step target", True
    ),
    Line("long-prompt-median-gap", "the same, median gap", True),
    Line("long-prompt-first-token", "that prompt's time to its first token, against alone", True),
)
CUDA = (
    Line("floor-1-stream", "Qwen3-8B's shape, plain: bytes read per second against the measured bandwidth, 1 stream"),
    Line("floor-4-streams", "the same, 4 streams"),
    Line("floor-16-streams", "the same, 16 streams"),
    Line("parked-1-stream", "Qwen3-8B's shape: tok/s with a parked drafter against none, 1 stream"),
    Line("parked-16-streams", "the same, 16 streams"),
    Line("drafted-1-stream", "Qwen3-8B's shape, 15 drafts per step, synthetic acceptance 6.5, against plain, 1 stream"),
    Line("drafted-4-streams", "the same, 4 streams"),
    Line("drafted-16-streams", "the same, 16 streams"),
    Line("prompt-of-matmul", "a prompt of 8,192 tokens: operations per second against a matmul's measured rate"),
    Line("floor-32000-tokens", "plain at 32,000 tokens, 1 stream: bytes read per second against the bandwidth"),
    Line("turboquant-32000-tokens", "TurboQuant against exact: tok/s of 4 streams at 32,000 tokens"),
    Line("turboquant-prompt", "TurboQuant against exact: reading those prompts"),
    Line("embedded-drafted-code", "the embedded model, drafted against plain, code prompts, one stream"),
)
LINES = {"cpu": CPU, "cuda": CUDA}
