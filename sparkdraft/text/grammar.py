"""Text that must follow a grammar: which ids may come next, as one bit per id of the vocabulary.

A `Grammar` is compiled once and shared; a `GrammarState` follows one request's output. A state can look ahead along
drafts and return, so each drafted token has the mask that plain decoding would have given it.
"""

from __future__ import annotations

import json
import math
import random
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from sparkdraft.core import GrammarSpec, TryLater, UserError
from sparkdraft.text.tokenizer import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions


MAX_BYTES = 64 * 1024  # of a schema or a grammar as text
MAX_DEPTH = 100  # nesting of objects and arrays: the compiler's own reader gives up at 123
MAX_SECONDS = 10.0  # to compile: the limits below are mostly met within one second
# White space in JSON: none, a space, or a line break and its indentation. Some models would write blanks forever.
JSON_OPTIONS: JsonCompileOptions = {"whitespace_pattern": r"( |\n {0,16})", "lenient": False, "coerce_one_of": False}
# A grammar's lexer keeps every state that any of its requests has met. The number of states is bounded, and the states
# that one mask may compute (10,000 units take about 2 ms on a slow core). A text that exceeds a limit ends there. A
# string with a maxLength needs about five states per character; most other grammars need some hundred states.
MAX_LEXER_STATES = 50_000
STATE_BYTES = 2048  # at most
STEP_LEXER_FUEL = 10_000
CACHE_BYTES = 1 << 30
NUM_CACHED = CACHE_BYTES // (MAX_LEXER_STATES * STATE_BYTES)
MAX_LATE = 2  # compilations that exceeded the time and still run
NUM_WALKS, NUM_STEPS = 16, 8  # random walks that try out a new grammar, and their length
DEEP_STACK = 256 << 20  # bytes: the compiler recurses along references, and 64 KB of these overflow a usual stack
EMPTY = ("NoExtension", "NoExtensionBias")  # llguidance's names where no token can follow
COMPLEX = {"LexerTooComplex": "its strings have too many states", "ParserTooComplex": "it has too many alternatives"}
INTEGER_DIGITS, FRACTION_DIGITS, EXPONENT_DIGITS = 18, 17, 2
SPELLINGS = frozenset('0123456789"<')  # how a token begins whose bytes begin with a digit or a quote ("<0x31>")
TAIL = 64  # bytes of text that are looked at: more than the longest number
DIGITS, NUMBER = b"0123456789", b"0123456789+-.eE"
BEFORE_NUMBER = b" \n\t\r,:["  # within a string other characters may precede digits too
NAMES = {"json_object": "JSON", "json_schema": "the JSON schema", "regex": "the regex", "lark": "the grammar"}

Mask = NDArray[np.uint8]
Json = dict[str, Any] | list[Any]
Result = TypeVar("Result")


class GrammarCompiler:
    """Compiles and caches grammars; thread-safe."""

    def __init__(self, tokenizer: Vocabulary, vocab_size: int) -> None:
        """vocab_size: the width of the model's logits, often more than the tokenizer's ids."""
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._known: LLTokenizer | None = None
        self._numbers: NumberBounds | None = None
        self._lock = threading.Lock()
        self._compiled: OrderedDict[GrammarSpec, Grammar] = OrderedDict()  # the most recently used is last

    def compile(self, spec: GrammarSpec) -> Grammar:
        """Compile, or return from the cache. Raises only UserError for anything wrong with the text."""
        with self._lock:
            found = self._compiled.pop(spec, None)
            if found and not found.spent:
                self._compiled[spec] = found
                return found
        _check_text(spec)
        known, name = self._vocabulary(), NAMES[spec.kind]
        try:
            made = on_a_deep_stack(lambda: self._build(known, spec), MAX_SECONDS)
        except TimeoutError:
            limit = f"{MAX_SECONDS:g} s to compile, the limit"
            raise UserError(f"{name} takes more than {limit}; make it smaller") from None
        with self._lock:
            self._compiled[spec] = made
            while len(self._compiled) > NUM_CACHED:
                self._compiled.popitem(last=False)
        return made

    def _build(self, known: LLTokenizer, spec: GrammarSpec) -> Grammar:
        name = NAMES[spec.kind]
        try:
            numbers = self._number_bounds() if _has_json(spec) else None
            return Grammar(_matcher(known, _source(spec), name), self._vocab_size, numbers)
        except UserError:
            raise
        except BaseException as error:  # a panic of the compiler is not an Exception
            raise UserError(f"{name} cannot be used: {_reason(str(error))}; change that part of it") from error

    def _number_bounds(self) -> NumberBounds:
        with self._lock:
            if self._numbers is None:
                vocab = self._tokenizer.raw.get_vocab(with_added_tokens=True)  # type: ignore[attr-defined]
                self._numbers = NumberBounds(self._tokenizer, vocab, self._vocab_size)
            return self._numbers

    def _vocabulary(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        raw, ends = getattr(self._tokenizer, "raw", None), sorted(self._tokenizer.eos_ids)
        ends = [token for token in ends if 0 <= token < self._vocab_size]
        if raw is None or not ends:
            missing = "an end-of-text id" if raw is not None else "a tokenizer.json"
            raise UserError(f"grammars need {missing}, which this model's tokenizer lacks; leave the grammar out")
        with self._lock:
            if self._known is None:
                try:
                    num = max(self._vocab_size, raw.get_vocab_size(with_added_tokens=True))
                    self._known = LLTokenizer(raw.to_str(), n_vocab=num, eos_token=ends)
                except ValueError as error:
                    reason = _reason(str(error))
                    raise UserError(f"grammars do not know this tokenizer ({reason}); leave the grammar out") from None
            return self._known


class Grammar:
    def __init__(self, matcher: LLMatcher, vocab_size: int, numbers: NumberBounds | None = None) -> None:
        self.numbers = numbers  # None: the grammar has no JSON
        self.matcher = matcher  # never advanced: states are copies that share its lexer
        self.num_bytes = -(-vocab_size // 8)
        self.spent = False  # a limit was exceeded: the lexer may be full, so the next request compiles anew

    def start(self) -> GrammarState:
        return GrammarState(self)


class GrammarState:
    """The state of one request in its grammar. Not thread-safe."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._matcher = grammar.matcher.deep_copy()
        self._ids: list[int] = []
        self._tail = b""  # the end of the text, for NumberBounds
        self.failed = False  # an id was refused, or a limit of the parser exceeded

    def masks(self, drafts: Sequence[int] = ()) -> Mask:  # [1 + k, bytes], id i is bit i % 8 of byte i // 8
        """The ids that may follow the text, and those after each of the k drafts up to the first that is refused."""
        masks = np.zeros((1 + len(drafts), self._grammar.num_bytes), np.uint8)
        tail = self._tail
        self._fill(masks[0], tail)
        count = 0
        for token in drafts:
            if self._matcher.try_consume_tokens([token]) != 1:
                break
            count += 1
            tail = self._extended(tail, [token])
            self._fill(masks[count], tail)
        self._return(count)
        return masks[: count + 1]

    def num_valid(self, drafts: Sequence[int]) -> int:
        """The number of drafts up to the first that the grammar refuses."""
        count = self._matcher.validate_tokens(list(drafts))
        self._return(0)
        return count

    def advance(self, ids: Sequence[int]) -> None:
        """Commit ids. Past the end of the grammar nothing changes."""
        self._ids += ids
        self._tail = self._extended(self._tail, ids)
        finished = self.finished
        taken = self._matcher.try_consume_tokens(list(ids))
        self.failed |= self._matcher.is_error() or (taken < len(ids) and not finished)
        self._grammar.spent |= self._matcher.is_error()

    @property
    def finished(self) -> bool:
        """True if only the end may follow."""
        return self.failed or self._matcher.is_stopped()

    def _fill(self, mask: Mask, tail: bytes) -> None:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)[: len(mask)]
        mask[: len(bits)] = bits
        if self._grammar.numbers:
            self._grammar.numbers.apply(mask, tail)

    def _extended(self, tail: bytes, ids: Sequence[int]) -> bytes:
        return self._grammar.numbers.tail(tail, ids) if self._grammar.numbers else tail

    def _return(self, num_ahead: int) -> None:
        """Return to the committed text. A matcher that exceeded a limit stays failed: a new one starts over."""
        if not self._matcher.is_error():
            self._matcher.rollback(num_ahead)
        elif not self.failed:
            self._grammar.spent = True
            self._matcher = self._grammar.matcher.deep_copy()
            self._matcher.try_consume_tokens(self._ids)


def _check_text(spec: GrammarSpec) -> None:
    try:
        size = len(spec.text.encode())
    except UnicodeEncodeError:
        raise UserError(f"{NAMES[spec.kind]} is not valid Unicode; send it without lone surrogates") from None
    if size > MAX_BYTES:
        raise UserError(f"{NAMES[spec.kind]} has {size:,} bytes and {MAX_BYTES:,} are allowed; shorten it")


def _has_json(spec: GrammarSpec) -> bool:
    return spec.kind in ("json_object", "json_schema") or (spec.kind == "lark" and "%json" in spec.text)


def _source(spec: GrammarSpec) -> str:
    """The grammar in llguidance's format, not checked yet."""
    from llguidance import LLMatcher

    if spec.kind == "regex":
        return LLMatcher.grammar_from_regex(spec.text)
    if spec.kind == "lark":
        return LLMatcher.grammar_from_lark(spec.text)
    return LLMatcher.grammar_from_json_schema(json_source(spec))


def json_source(spec: GrammarSpec) -> str:
    """The JSON schema to compile, alone or after "%json" in Lark, with our options in place of its own."""
    schema = {"type": "object"} if spec.kind == "json_object" else _read_schema(spec.text)
    return json.dumps({**schema, "x-guidance": JSON_OPTIONS})


def _read_schema(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise UserError(f"the JSON schema is not JSON ({error}); send a valid one") from None
    except RecursionError:
        raise _too_deep() from None
    if not isinstance(schema, dict):
        raise UserError("the JSON schema is not a JSON object; send one, such as {} for any value")
    if _is_deep(schema):
        raise _too_deep()
    return schema


def _is_deep(schema: Json) -> bool:
    level = [schema]
    for _ in range(MAX_DEPTH):
        inner = (child for item in level for child in (item.values() if isinstance(item, dict) else item))
        level = [child for child in inner if isinstance(child, dict | list)]
    return bool(level)


def _too_deep() -> UserError:
    return UserError(
        f"the JSON schema has more than {MAX_DEPTH} objects and arrays within each other, the limit; "
        "flatten it, or refer to $defs"
    )


def _matcher(known: LLTokenizer, text: str, name: str) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, step_lexer_fuel=STEP_LEXER_FUEL, verbose_errors=False)
    matcher = LLMatcher(known, text, log_level=0, limits=limits)
    if matcher.is_error():
        raise UserError(f"{name} cannot be used: {_reason(matcher.get_error())}; change that part of it")
    problem = _try_out(matcher.deep_copy())
    if problem and _reason(problem) in EMPTY:
        raise UserError(f"{name} cannot be used: no text satisfies it; change it so that one does")
    if problem:
        raise UserError(f"{name} is too complex: {_reason(problem)}; make it smaller")
    return matcher


def _try_out(matcher: LLMatcher) -> str:
    """Return the error of short random walks, where a grammar that exceeds the limits mostly does so; "" for none."""
    draw = random.Random(0)
    for _ in range(NUM_WALKS):
        tried = matcher.deep_copy()
        for _ in range(NUM_STEPS):
            bits = np.frombuffer(tried.compute_bitmask(), np.uint8)
            ids = np.unpackbits(bits, bitorder="little").nonzero()[0].tolist()
            if tried.is_stopped() or tried.try_consume_tokens([draw.choice(ids)]) != 1:
                break
        if tried.is_error():
            return tried.get_error()
    return matcher.get_error()


def _reason(message: str) -> str:
    """The informative line of an error message; for a regex, it comes after a picture of it."""
    lines = [line.strip() for line in message.strip().splitlines()] or ["unknown reason"]
    told = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    told = COMPLEX.get(told, told).replace("Unimplemented keys", "unsupported keywords")
    told = told.replace(". Enable 'coerce_one_of' option to approximate oneOf with anyOf", ", use anyOf")
    return told[:200].rstrip(" .:")


def on_a_deep_stack(work: Callable[[], Result], seconds: float) -> Result:
    """Run in a thread with a large stack. Raises TimeoutError after so many seconds, though the thread runs on, because
    the compiler cannot be stopped; TryLater while MAX_LATE such threads still run."""
    done: list[Result] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="grammar", daemon=True)
    with _stack_lock:
        _late[:] = [late for late in _late if late.is_alive()]
        if len(_late) >= MAX_LATE:
            raise TryLater(
                f"{len(_late)} grammars that took too long still compile, the limit; send this one later",
                math.ceil(MAX_SECONDS),
            )
        usual = threading.stack_size(DEEP_STACK)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    thread.join(seconds)
    if thread.is_alive():
        _late.append(thread)
        raise TimeoutError
    if raised:
        raise raised[0]
    return done[0]


_stack_lock = threading.Lock()
_late: list[threading.Thread] = []


class NumberBounds:
    """Bounds the numbers of JSON: small models at temperature 0 would write digits until they are stopped.

    18 digits of an integer part fit into 64 bits; 17 of a fraction and 2 of an exponent keep a double finite. Tokens
    whose digits would exceed a bound are removed from the mask, except where nothing else may follow: a schema's
    `minimum`, `const` or `multipleOf` can ask for a longer number.
    """

    def __init__(self, tokenizer: Vocabulary, vocab: Mapping[str, int], vocab_size: int) -> None:
        """vocab: the tokens as the tokenizer's file spells them, and their ids."""
        self._tokenizer = tokenizer
        self._leading = np.zeros(vocab_size, np.uint8)  # digits that each token begins with
        quotes = np.zeros(vocab_size, bool)
        for name, token in vocab.items():
            if name[:1] not in SPELLINGS or not 0 <= token < vocab_size:
                continue
            data = tokenizer.token_bytes(token)
            if data[:1].isdigit():
                self._leading[token] = min(len(data) - len(data.lstrip(DIGITS)), 255)
            elif data[:1] == b'"':
                quotes[token] = True
        self._quotes = np.packbits(quotes, bitorder="little")
        self._longest = int(self._leading.max(initial=0))
        self._kept: dict[int, Mask] = {}  # number of digits -> tokens that begin with no more

    def tail(self, tail: bytes, ids: Sequence[int]) -> bytes:
        """The end of the text after these ids. tail: its end before them."""
        return (tail + b"".join(map(self._tokenizer.token_bytes, ids)))[-TAIL:]

    def apply(self, mask: Mask, tail: bytes) -> None:
        """Remove from the mask the tokens that would exceed a bound. tail: the end of the text."""
        room = _room(tail)
        if room is None or room >= self._longest or (mask & self._quotes).any():  # a quote is possible: in a string
            return
        bounded = mask & self._at_most(max(room, 0))
        if bounded.any():
            mask[:] = bounded

    def _at_most(self, room: int) -> Mask:
        if room not in self._kept:
            self._kept[room] = np.packbits(self._leading <= room, bitorder="little")
        return self._kept[room]


def _room(tail: bytes) -> int | None:
    """Digits that the number at the end of a text may still get; None if there is no number."""
    before = tail.rstrip(DIGITS)
    count = len(tail) - len(before)
    start = tail.rstrip(NUMBER)
    if start == tail or (start and start[-1] not in BEFORE_NUMBER):
        return None
    if before.endswith((b"e", b"E", b"e+", b"e-", b"E+", b"E-")):
        return EXPONENT_DIGITS - count
    return (FRACTION_DIGITS if before.endswith(b".") else INTEGER_DIGITS) - count
