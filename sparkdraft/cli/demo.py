"""`sparkdraft demo`: one answer written twice, plainly and with drafts, to show what drafting is worth.

The model is loaded once, and the two texts must be the same to the letter: that is the promise of drafting, and a
difference is an error. In float32 on a CPU, where a token's last bit depends on the batch, two equally likely
ids may change places; then a message says so. `sparkdraft bench accept` measures carefully.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

from sparkdraft.cli.console import fail
from sparkdraft.cli.generate import write
from sparkdraft.cli.options import add_engine_flags, as_text, load_llm
from sparkdraft.core import SamplingParams, UserError
from sparkdraft.util.names import user_path
from sparkdraft.util.side_by_side import Run, Writing, side_by_side
from sparkdraft.util.this_machine import OtherPrograms

HELP = "see one answer written plainly, then with drafts"
EXAMPLES = """examples:
  sparkdraft demo
  sparkdraft demo --prompt "Count from one to thirty." --max-tokens 100
  sparkdraft demo --picture demo.svg          (draws both texts as they were written)
"""
PROMPT = "Write a Python function that counts the vowels in a string, with an example."


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("--prompt", default=PROMPT, help="what to ask (default: for a small Python function)")
    parser.add_argument("--max-tokens", type=int, default=160, help="maximum number of tokens to write (default 160)")
    parser.add_argument("--picture", metavar="FILE", help="also write an animated SVG of the two texts side by side")
    add_engine_flags(parser)


def run(args: Namespace) -> int:
    prompt = as_text(args.prompt.encode("utf-8", "surrogateescape"), "the prompt")
    plain = SamplingParams(max_tokens=args.max_tokens, num_draft=0)
    drafted = SamplingParams(max_tokens=args.max_tokens)
    if not prompt:
        raise UserError("the prompt is empty; give at least one character")
    if args.spec in ("off", "0"):
        raise UserError(f"--spec is {args.spec}, and the demo shows drafting; leave it on auto or give a number")
    others = OtherPrograms()  # loading times steps too, to decide when to draft
    llm = load_llm(args)
    ids = llm.chat_ids([{"role": "user", "content": prompt}])
    llm.generate([ids], SamplingParams(max_tokens=8))  # so that neither run is the first
    print(f"{args.model}, asked: {prompt}\n\n--- plainly, one token per step\n")
    runs: tuple[list[Run], list[Run]] = [], []
    before = write(llm, ids, plain, thoughts=llm.style.reasoning, runs=runs[0])
    print(f"\n--- again, with drafts that the model checks (to beat: {before['tok_s']} tok/s)\n")
    after = write(llm, ids, drafted, thoughts=llm.style.reasoning, runs=runs[1])
    busy = others.disturbance(llm.plan.device, llm.plan.threads)
    if args.picture:
        picture = _picture((before, after), runs)
        user_path(args.picture).write_text(picture, encoding="utf-8")
    return _compare(before, after, llm.engine.decodes_exactly, busy)


def _picture(reports: tuple[dict[str, Any], dict[str, Any]], runs: tuple[list[Run], list[Run]]) -> str:
    names = "plain: one token per step", "drafted: blue runs are one step each"
    notes = (f"{report['tok_s']:.0f} tok/s, {len(own)} steps" for report, own in zip(reports, runs, strict=True))
    return side_by_side([Writing(*each) for each in zip(names, notes, runs, strict=True)])


def _compare(before: dict[str, Any], after: dict[str, Any], exact: bool, busy: str = "") -> int:
    """Print both speeds and whether the texts are equal; returns the exit status. exact: drafts change no bit of a
    token. busy: why the speeds compare nothing."""
    stats = after["speculative_decoding"] or {}
    length = stats.get("mean_acceptance_length")
    ratio = "" if busy or not before["tok_s"] else f", {after['tok_s'] / before['tok_s']:.2f} times as fast"
    drafts = f"{length:.2f} tokens per drafting step" if length else "no step found a draft worth its cost"
    print(f"\nplainly      {before['tok_s']:7.1f} tok/s")
    print(f"with drafts  {after['tok_s']:7.1f} tok/s{ratio}; acceptance length: {drafts}")
    if busy:
        print(f"The machine is busy: {busy}. Both speeds are too low and do not compare; try again when it is idle.")
    if all(before[part] == after[part] for part in ("reasoning", "text")):
        print(f"The two texts are the same, all {after['num_output']} tokens.")
    elif exact:
        return fail("the two texts differ, which is a bug; please report it with the prompt")
    else:
        print("The two texts differ: in float32 on a CPU, a token's last bit depends on the others in its step, and")
        print("where two tokens were equally likely, the other one was taken. Leave --dtype on auto to avoid it.")
    return 0
