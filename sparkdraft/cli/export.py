"""`sparkdraft export vllm`: our configuration as a `vllm serve` command, a YAML file or a systemd unit.

`sparkdraft export safetensors`: a model as a folder that other engines load.
"""

from __future__ import annotations

import json
import os
from argparse import SUPPRESS, Action, ArgumentParser, Namespace
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from sparkdraft.bridges.container_env import ATTENTION_BACKEND, container_notes, merge_with_container, unread_args
from sparkdraft.cli.console import note
from sparkdraft.cli.options import COMMON, add_field, hide
from sparkdraft.cli.parser import TYPES
from sparkdraft.config import ENGINE_FIELDS
from sparkdraft.core import UserError
from sparkdraft.server.config import FIELDS, SERVER_FIELDS, ServerConfig, beats_extra_args
from sparkdraft.util.progress import progress

if TYPE_CHECKING:
    from sparkdraft.bridges.vllm.command import Choices

HELP = "write the configuration of `serve`, or a model, for another engine"
EXAMPLES = """examples:
  sparkdraft export vllm --model google/gemma-4-31B-it --weights fp8 --max-model-len 16384
  sparkdraft export vllm --model Qwen/Qwen3.5-27B --form systemd --out vllm.service
  sparkdraft export vllm --config server.toml --form yaml --out vllm.yaml     (vllm serve --config vllm.yaml)
  sparkdraft export vllm --model google/gemma-4-26B-A4B-it --method mtp --vllm-version 0.20.2   (refused, with the fix)
  sparkdraft export safetensors --model smollm2 --out smollm2-hf      (for engines that do not read GGUF files)
The command goes to standard output, and what is different in vLLM to standard error. Nothing is loaded or started.
"""
FORMS = ("command", "yaml", "systemd")
CHOICES = {
    "method": "auto, dflash, mtp or ngram (auto: the drafter that is known for the model)",
    "attention_backend": "attention backend of the model, such as TRITON_ATTN (default: vLLM's choice)",
    "draft_attention_backend": "attention backend of the drafter (default: vLLM's choice)",
    "chat_template": "a file with a chat template (default: the model's)",
    "tensor_parallel": "GPUs that share the model",
    "machine": "gb10 (a DGX Spark), other or cpu: some problems exist on one GPU only (default: gb10; serve finds cpu)",
}
# the same by their names there
OF_VLLM = {
    "--attention-backend": "attention_backend",
    "--chat-template": "chat_template",
    "--tensor-parallel-size": "tensor_parallel",
    "--speculative-config.attention_backend": "draft_attention_backend",
    "--speculative-config.method": "method",
}


def configure(parser: ArgumentParser) -> None:
    engines = parser.add_subparsers(dest="to", required=True, metavar="ENGINE")
    vllm = engines.add_parser("vllm", help="a `vllm serve` command", description=HELP, epilog=EXAMPLES)
    vllm.add_argument("--form", default="command", choices=FORMS, help="command, yaml or systemd (default command)")
    vllm.add_argument("--out", default="", metavar="FILE", help="file to write to (default: print it)")
    vllm.add_argument("--vllm-version", default="", metavar="TEXT", help="the version it is for (default: 0.32.0)")
    add_vllm_flags(vllm)
    add_serve_flags(vllm)
    text = "a model as a folder in the Hugging Face layout, its weights as floats"
    folder = engines.add_parser("safetensors", help=text, description=text, epilog=EXAMPLES)
    folder.add_argument("--model", default="smollm2", help="a known name, a folder, a .gguf file or a hub id")
    folder.add_argument("--out", required=True, metavar="FOLDER", help="where it is written")
    folder.add_argument("--dtype", default="float32", metavar="TEXT", help="float32 or bfloat16 (default float32)")


def add_vllm_flags(parser: ArgumentParser) -> None:
    """What can be said to vLLM and has no field of ours."""
    group, rare = parser.add_argument_group("vLLM"), list[Action]()
    for name, text in CHOICES.items():
        kind = int if name == "tensor_parallel" else str
        flag = f"--{name.replace('_', '-')}"
        rare.append(group.add_argument(flag, type=kind, default=None, metavar=TYPES[kind], help=text))
    hide(parser, rare)


def add_serve_flags(parser: ArgumentParser) -> None:
    """Every field of ServerConfig; one that is not given is left out of the result."""
    parser.add_argument("--config", metavar="FILE", help="a TOML file with any of these names as keys")
    rare = list[Action]()
    for title, flags in (("server", SERVER_FIELDS), ("engine", ENGINE_FIELDS)):
        group = parser.add_argument_group(title)
        for name, each in flags.items():
            added = add_field(group, each, shown=each.default, given=SUPPRESS)
            rare += [] if name in COMMON else added
    hide(parser, rare)


def read_config(args: Namespace) -> ServerConfig:
    """The configuration of flags, environment, file and, as `base`, a recipe. The file may also be named by
    SPARKDRAFT_CONFIG."""
    flags = {name: value for name, value in vars(args).items() if name in FIELDS}
    file = args.config or os.environ.get("SPARKDRAFT_CONFIG")
    return merge_with_container(flags, file, os.environ, getattr(args, "base", {}))


def read_choices(args: Namespace, version: str = "") -> Choices:
    """The choices of the command line, else of EXTRA_ARGS, else of ATTENTION_BACKEND. What of EXTRA_ARGS is no choice
    and no field is handed on."""
    from sparkdraft.bridges.tables import whole
    from sparkdraft.bridges.vllm.command import Choices

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


def run(args: Namespace) -> int:
    return _safetensors(args) if args.to == "safetensors" else _vllm(args)


def _safetensors(args: Namespace) -> int:
    from sparkdraft.weights.checkpoint import open_checkpoint
    from sparkdraft.weights.safetensors import write_checkpoint

    with progress(f"writing {args.model}") as report:
        write_checkpoint(open_checkpoint(args.model), Path(args.out), args.dtype, report)
    size = sum(file.stat().st_size for file in Path(args.out).iterdir())
    print(f"{args.out}: {args.dtype}, {size / 1e6:.1f} MB")
    return 0


def _vllm(args: Namespace) -> int:
    from sparkdraft.bridges.vllm.command import vllm_command, write

    command = vllm_command(read_config(args), read_choices(args, args.vllm_version))
    for text in [*container_notes(os.environ, to_vllm=True), *command.notes]:
        note(text)
    written = write(command, args.form)
    if not args.out:
        print(written, end="")
        return 0
    try:
        Path(args.out).write_text(written, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{args.out} cannot be written: {error.strerror}") from None
    return 0
