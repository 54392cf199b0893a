"""A second backend, as small as one can be, and a program that runs the real engine process with it.

`EchoBackend` writes each prompt once more, one id per step; where JSON is asked for it writes {}. An id is the ASCII
code of its character. The echo needs no torch, and neither does the process around it, which is checked here.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from sparkdraft.backend import BackendStatus, CodingError, ModelInfo, Report
from sparkdraft.core import FinishReason, GrammarSpec, SamplingParams, StepOutput, UserError
from sparkdraft.server.engine_process import main

BUG, LOST = 1300, 1301  # seeds: a step raises while a request with one of them runs
HELD = 1302  # a seed: after two ids, a step lasts until the file of the option "go_on" exists


class LostDevice(Exception):
    """What this backend cannot go on after."""


@dataclass
class Echo:
    """One request. 'left' is what is to be written, the same for each of its n texts."""

    params: SamplingParams
    num_prompt: int
    left: list[int]


@dataclass
class EchoBackend:
    info: ModelInfo
    running: dict[str, Echo] = field(default_factory=dict)
    ended: list[StepOutput] = field(default_factory=list)
    num_steps: int = 0
    go_on: str = ""
    dies: bool = False  # under the canary's first probe

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.ended)

    def compile_grammar(self, spec: GrammarSpec) -> list[int]:
        if spec.kind != "json_object":
            raise UserError(f"an echo knows no grammar of kind {spec.kind}; use json_object")
        return list(b"{}")

    def add(self, request_id: str, prompt_ids: list[int], params: SamplingParams, grammar: Any = None) -> None:
        if 0 in prompt_ids:
            raise UserError("the prompt holds the token id 0, which cannot be echoed; remove it")
        left = list(grammar if grammar is not None else prompt_ids)[: params.max_tokens]
        self.running[request_id] = Echo(params, len(prompt_ids), left)

    def abort(self, request_id: str) -> None:
        if echo := self.running.pop(request_id, None):
            self.ended += [StepOutput(request_id, i, [], "", FinishReason.ABORT) for i in range(echo.params.n)]

    def step(self) -> list[StepOutput]:
        seeds = {echo.params.seed for echo in self.running.values()}
        if BUG in seeds:
            raise ZeroDivisionError("the echo met a bug")
        if LOST in seeds:
            raise LostDevice("the echo has lost its device")
        for echo in self.running.values():
            while echo.params.seed == HELD and echo.num_prompt - len(echo.left) == 2 and not os.path.exists(self.go_on):
                time.sleep(0.01)
        outputs, self.ended = self.ended, []
        for name, echo in list(self.running.items()):
            token = echo.left.pop(0)
            finish = None if echo.left else FinishReason.LENGTH
            for index in range(echo.params.n):
                outputs.append(StepOutput(name, index, [token], chr(token), finish, num_prompt=echo.num_prompt))
            if finish:
                del self.running[name]
        self.num_steps += 1
        return outputs

    def fail_batch(self, error: Exception) -> list[str]:
        if isinstance(error, LostDevice):
            raise error
        lost = list(self.running)
        self.running.clear()
        return lost

    def status(self) -> BackendStatus:
        return BackendStatus(
            running=len(self.running),
            waiting=0,
            kv_blocks_free=7,
            kv_blocks_total=8,
            block_size=16,
            preemptions=3,
            drafting={"num_spec_steps": self.num_steps},
        )

    def reset_counts(self) -> None:
        self.num_steps = 0

    def switch(self, part: str, on: bool) -> None: ...

    def coding_errors(self) -> list[CodingError]:
        if self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return []


def load_echo(options: dict[str, Any], report: Report) -> EchoBackend:
    report("weights", 1, 1)
    letters = {"Ġ": ord(" ")} | {chr(i): i for i in range(33, 127)}  # a space is spelled so in byte-level tokenizers
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    assert "torch" not in sys.modules, "the process around a backend needs no torch"
    return EchoBackend(
        ModelInfo(
            model=options["model"],
            model_type="echo",
            max_model_len=100,
            vocab_size=127,
            tokenizer=tokenizer.to_str(),
            special={},
            eos_ids=[],
            chat_template="{% for m in messages %}{{ m.content }}{% endfor %}",
            sampling={},
            plan="an echo",
            plan_facts={"max_seqs": 4},
            fallbacks=[],
            drafter=None,
            created=1,
        ),
        go_on=options.get("go_on", ""),
        dies="dies" in options,
    )


if __name__ == "__main__":
    main(sys.argv[1:], load_echo)
