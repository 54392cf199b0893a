"""Sparkdraft: large language models served faster than their memory bandwidth seems to allow, on one machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sparkdraft.core import SamplingParams, UserError

if TYPE_CHECKING:
    from sparkdraft.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "UserError", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":  # imported on first use, because it imports torch
        from sparkdraft.llm import LLM

        return LLM
    raise AttributeError(name)
