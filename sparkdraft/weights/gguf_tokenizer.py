"""The tokenizer of a GGUF file, rebuilt from its metadata as a `tokenizers.Tokenizer`.

There are two families: byte-level BPE ("gpt2"), whose merges are in the file and whose rule for splitting text into
words is given by name, and SentencePiece ("llama"), whose merges are reconstructed from the scores. Ids equal those of
transformers for the same file (checked for the embedded model).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as RawTokenizer

from sparkdraft.core import UserError

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # token types: the first two are never text, the last is always one token
SPACE = "▁"

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
GPT2 = "gpt2"  # built into the library
DIGITS = "digits"  # every digit is a word of its own, then as GPT-2
# Metadata name -> rule. llama.cpp's own rule for smollm is DIGITS; the ids here are those of transformers, which reads
# these files with GPT2. They differ only where more than one blank precedes a digit ("\n\n1.").
RULES = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "olmo", "smollm"), GPT2),
    **dict.fromkeys(("starcoder", "refact", "command-r", "codeshell"), DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe"), LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), QWEN2),
}


def build(meta: dict[str, Any], path: Path) -> RawTokenizer:
    """Build the tokenizer from a file's metadata. path: for messages."""
    tokens = meta.get("tokenizer.ggml.tokens")
    if not tokens:
        raise UserError(f"{path} holds no tokenizer: use a file that was converted with its vocabulary.")
    kind = meta.get("tokenizer.ggml.model")
    if kind == "gpt2":
        raw = _byte_level(meta, tokens, path)
    elif kind == "llama":
        raw = _sentencepiece(meta, tokens, path)
    else:
        raise UserError(f"{path} has a tokenizer of the kind {kind!r}, and gpt2 and llama are read: use another file.")
    _add_tokens(raw, meta, tokens)
    _add_ends(raw, meta, tokens, starts=kind == "llama" or _rule(meta, path) is LLAMA3)
    return raw


def _rule(meta: dict[str, Any], path: Path) -> str:
    name = meta.get("tokenizer.ggml.pre", "default")
    if name not in RULES:
        raise UserError(f"{path} cuts text into words by the rule {name!r}, and {', '.join(RULES)} are known.")
    return RULES[name]


def _byte_level(meta: dict[str, Any], tokens: list[str], path: Path) -> RawTokenizer:
    rule = _rule(meta, path)
    merges = [tuple(merge.split(" ", 1)) for merge in meta.get("tokenizer.ggml.merges", [])]
    vocab = {token: index for index, token in enumerate(tokens)}
    # A byte that is not in the vocabulary becomes the unknown token, as in transformers.
    unknown = _token(meta, tokens, "unknown")
    try:
        model = models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, ignore_merges=rule is LLAMA3)
    except Exception as error:  # the library raises plain Exception
        raise UserError(f"The tokenizer of {path} is inconsistent ({error}): fetch the file again.") from error
    raw = RawTokenizer(model)
    if rule is QWEN2:
        raw.normalizer = normalizers.NFC()
    bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule in (GPT2, DIGITS))
    if rule == DIGITS:
        raw.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_of_words])
    elif rule == GPT2:
        raw.pre_tokenizer = bytes_of_words
    else:
        words = pre_tokenizers.Split(Regex(rule), "isolated")
        raw.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_of_words])
    raw.decoder = decoders.ByteLevel()
    return raw


def _sentencepiece(meta: dict[str, Any], tokens: list[str], path: Path) -> RawTokenizer:
    scores = meta.get("tokenizer.ggml.scores")
    if not scores or len(scores) != len(tokens):
        raise UserError(f"The tokenizer of {path} has no score for each token: fetch the file again.")
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = _merges_of(vocab, scores)
    unknown = _token(meta, tokens, "unknown")
    raw = RawTokenizer(models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = bool(meta.get("tokenizer.ggml.add_space_prefix", True))
    spaces = [normalizers.Prepend(SPACE)] if prefix else []
    raw.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", SPACE)])
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    raw.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return raw


def _merges_of(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Rebuild the merges of SentencePiece: every way to make a token from two others, ordered by the token's score,
    then by the parts' scores."""
    found: list[tuple[float, list[tuple[str, str]]]] = []
    for token, index in vocab.items():
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [pair for pair in pairs if pair[0] in vocab and pair[1] in vocab]
        pairs.sort(key=lambda pair: (scores[vocab[pair[0]]], scores[vocab[pair[1]]]), reverse=True)
        if pairs:
            found.append((scores[index], pairs))
    found.sort(key=lambda entry: entry[0], reverse=True)
    return [pair for _, pairs in found for pair in pairs]


def _token(meta: dict[str, Any], tokens: list[str], stem: str) -> str | None:
    index = meta.get(f"tokenizer.ggml.{stem}_token_id")
    return tokens[index] if isinstance(index, int) and 0 <= index < len(tokens) else None


def _add_tokens(raw: RawTokenizer, meta: dict[str, Any], tokens: list[str]) -> None:
    types = meta.get("tokenizer.ggml.token_type", [])
    special = [tokens[i] for i, kind in enumerate(types) if kind in (UNKNOWN, CONTROL) and i < len(tokens)]
    if not types:
        named = [_token(meta, tokens, stem) for stem in ("bos", "eos", "unknown", "padding")]
        special = [token for token in dict.fromkeys(named) if token is not None]
    user = [tokens[i] for i, kind in enumerate(types) if kind == USER_DEFINED and i < len(tokens)]
    raw.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    raw.add_tokens([AddedToken(token, normalized=False, special=False) for token in user])


def _add_ends(raw: RawTokenizer, meta: dict[str, Any], tokens: list[str], starts: bool) -> None:
    """Add begin and end of text to every encoded text, if the file says so. starts: the default for the begin."""
    first = _token(meta, tokens, "bos") if meta.get("tokenizer.ggml.add_bos_token", starts) else None
    last = _token(meta, tokens, "eos") if meta.get("tokenizer.ggml.add_eos_token", False) else None
    ends = [token for token in (first, last) if token is not None]
    if ends:
        single = [*([first] if first else []), "$A", *([last] if last else [])]
        special = [(token, raw.token_to_id(token)) for token in dict.fromkeys(ends)]
        raw.post_processor = processors.TemplateProcessing(single=single, pair=None, special_tokens=special)
