"""Flags of the server's configuration and of vLLM, shared by `serve`, `export vllm`, `recipe run` and `cluster up`."""

from __future__ import annotations

import json
import os
from argparse import SUPPRESS, Action, ArgumentParser, Namespace
from dataclasses import fields

from sparkdraft.bridges.container_env import ATTENTION_BACKEND, merge_with_container, unread_args
from sparkdraft.bridges.tables import whole
from sparkdraft.bridges.vllm.command import Choices
from sparkdraft.cli.options import COMMON, add_field, hide
from sparkdraft.cli.parser import TYPES
from sparkdraft.config import ENGINE_FIELDS
from sparkdraft.server.config import FIELDS, SERVER_FIELDS, ServerConfig, beats_extra_args

CHOICES = {
    "method": "auto, dflash, mtp or ngram (auto: the drafter that is known for the model)",
    "attention_backend": "attention backend of the model, such as TRITON_ATTN (default: vLLM's choice)",
    "draft_attention_backend": "attention backend of the drafter (default: vLLM's choice)",
    "chat_template": "a file with a chat template (default: the model's)",
    "tensor_parallel": "GPUs that share the model",
    "machine": "gb10 (a DGX Spark), other or cpu: some problems exist on one GPU only (default: gb10; serve finds cpu)",
}
# vLLM's names of these
OF_VLLM = {
    "--attention-backend": "attention_backend",
    "--chat-template": "chat_template",
    "--tensor-parallel-size": "tensor_parallel",
    "--speculative-config.attention_backend": "draft_attention_backend",
    "--speculative-config.method": "method",
}


def add_vllm_flags(parser: ArgumentParser) -> None:
    """Add flags for vLLM options that ServerConfig has no field for."""
    group, rare = parser.add_argument_group("vLLM"), list[Action]()
    for name, text in CHOICES.items():
        kind = int if name == "tensor_parallel" else str
        flag = f"--{name.replace('_', '-')}"
        rare.append(group.add_argument(flag, type=kind, default=None, metavar=TYPES[kind], help=text))
    hide(parser, rare)


def add_serve_flags(parser: ArgumentParser) -> None:
    """Add a flag for every field of ServerConfig; flags that are not given are absent from the namespace."""
    parser.add_argument("--config", metavar="FILE", help="a TOML file with any of these names as keys")
    rare = list[Action]()
    for title, flags in (("server", SERVER_FIELDS), ("engine", ENGINE_FIELDS)):
        group = parser.add_argument_group(title)
        for name, each in flags.items():
            added = add_field(group, each, shown=each.default, given=SUPPRESS)
            rare += [] if name in COMMON else added
    hide(parser, rare)


def read_config(args: Namespace) -> ServerConfig:
    """Merge flags, environment variables, the file of --config or SPARKDRAFT_CONFIG, and a recipe (`base`)."""
    flags = {name: value for name, value in vars(args).items() if name in FIELDS}
    file = args.config or os.environ.get("SPARKDRAFT_CONFIG")
    return merge_with_container(flags, file, os.environ, getattr(args, "base", {}))


def read_choices(args: Namespace, version: str = "") -> Choices:
    """Read the vLLM options of the command line, else of EXTRA_ARGS, else of ATTENTION_BACKEND.

    Words of EXTRA_ARGS that are neither such options nor fields are passed on to vLLM.
    """
    given = {each.name: getattr(args, each.name, None) for each in fields(Choices)}
    handed_on = unread_args(os.environ)
    fixed = beats_extra_args(vars(args), os.environ)
    chosen = [each for each in handed_on if each.name in OF_VLLM and not fixed.intersection(each.near)]
    for each in chosen:
        name = OF_VLLM[each.name]
        if given[name] is None:
            value = json.loads(each.value) if "." in each.name else each.value
            given[name] = whole(value) if name == "tensor_parallel" else str(value)
    given |= {"extra": tuple(each for each in handed_on if each not in chosen), "fixed": fixed}
    given["attention_backend"] = given["attention_backend"] or os.environ.get(ATTENTION_BACKEND) or None
    given["version"] = version or None
    if given["machine"] is None and "cpu" in version:
        given["machine"] = "cpu"
    return Choices(**{name: value for name, value in given.items() if value is not None})
