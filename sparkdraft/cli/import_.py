"""`sparkdraft import`: a command of vLLM or of llama.cpp, a compose file, or vLLM's YAML file, as ours."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from sparkdraft.cli.console import note
from sparkdraft.cli.options import read_text
from sparkdraft.core import UserError

HELP = "read a command of vLLM or llama.cpp, a compose file or vLLM's YAML, and print ours"
EXAMPLES = """examples:
  sparkdraft import "vllm serve Qwen/Qwen3-8B --max-num-seqs 16 --gpu-memory-utilization 0.8"
  sparkdraft import "llama-server -m model.gguf -c 32768 -np 4 -ngl 99"
  sparkdraft import "llama-cli -m model.gguf --temp 0.7"      (becomes `sparkdraft chat`)
  sparkdraft import compose.yaml --toml > server.toml      (then: sparkdraft serve --config server.toml)
  cat run.sh | sparkdraft import -
Our command goes to standard output; what has no counterpart is named on standard error, flag by flag.
"""


def configure(parser: ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="COMMAND",
        help="a command in quotes, a compose file, vLLM's YAML file, a script, or - for stdin",
    )
    parser.add_argument(
        "--service", default="", metavar="NAME", help="which service of a compose file that has several"
    )
    parser.add_argument("--toml", action="store_true", help="print a file for `serve --config` instead of a command")


def run(args: Namespace) -> int:
    from sparkdraft.bridges.importing import read

    text = read_text("-") if args.source == "-" else args.source
    if not text.strip():
        raise UserError('the command is empty; give one such as "vllm serve Qwen/Qwen3-8B"')
    found = read(text, args.service)
    secret = ["api_key: not written into the file; set SPARKDRAFT_API_KEY where the server starts"]
    unwritten = [*(secret if "api_key" in found.values else []), *found.unfilled()]
    for line in found.notes + (unwritten if args.toml else []):
        note(line)
    print(found.toml() if args.toml else found.command(), end="" if args.toml else "\n")
    return 0
