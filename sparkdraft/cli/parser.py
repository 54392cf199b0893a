"""argparse with short errors: one sentence that names the nearest flag or verb, instead of a page of usage.

Flags are written in full: an abbreviation gets an error that names the full flag.
"""

from __future__ import annotations

import sys
from argparse import SUPPRESS, Action, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

from sparkdraft.util.names import did_you_mean

MISUSED = 2  # the exit status of a wrong command line
TYPES = {int: "INT", float: "FLOAT", str: "TEXT"}  # what --help shows for a flag's value


class Verb(NamedTuple):
    """A verb of the command, where a module has several."""

    HELP: str
    EXAMPLES: str
    configure: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]


class Parser(ArgumentParser):
    """The parser of the command and, because argparse makes subparsers of the same class, of every verb."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "formatter_class": RawDescriptionHelpFormatter, **options})
        self._has_verbs = False
        self._rare: list[Action] = []

    def add_argument(self, *names: Any, **options: Any) -> Action:
        if options.get("type") in TYPES:
            options.setdefault("metavar", TYPES[options["type"]])
        return super().add_argument(*names, **options)

    def hide(self, actions: Iterable[Action]) -> None:
        """Show these flags by --help-all only, which --help names."""
        if not self._rare:
            self.add_argument("--help-all", action=HelpAll, help="show every flag of this command and exit")
        self._rare += actions

    def format_help(self, is_all: bool = False) -> str:
        if is_all or not self._rare:
            return super().format_help()
        texts = [action.help for action in self._rare]
        for action in self._rare:
            action.help = SUPPRESS
        short = super().format_help()
        for action, text in zip(self._rare, texts, strict=True):
            action.help = text
        return f"{short}\n{len(self._rare)} more flags: `{self.prog} --help-all`\n"

    def add_subparsers(self, **options: Any) -> Any:
        self._has_verbs = True
        return super().add_subparsers(**options)

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        """Refuse unknown flags first, in the parser that knows the verb's own flags."""
        given = sys.argv[1:] if args is None else list(args)
        if self._has_verbs and not given:
            self.print_help()
            self.exit(MISUSED)
        for text in given:
            if text == "--" or (self._has_verbs and not text.startswith("-")):
                break  # the rest is text, or belongs to the verb
            name = text.split("=", 1)[0]
            if name.startswith("--") and " " not in text and name not in self._option_string_actions:
                self.error(f"unknown flag {name}{suggestion(name, self._option_string_actions)}")
        return super().parse_known_args(given, namespace)

    def _check_value(self, action: Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            names = list(map(str, action.choices))
            self.error(f"there is no '{value}'{suggestion(str(value), names) or ', only ' + ', '.join(names)}")

    def error(self, message: str) -> NoReturn:
        self.exit(MISUSED, f"{self.prog}: {message} (see `{self.prog} --help`)\n")


class HelpAll(Action):
    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, SUPPRESS, nargs=0, default=SUPPRESS, help=help)

    def __call__(self, parser: ArgumentParser, *rest: Any) -> NoReturn:
        assert isinstance(parser, Parser)
        print(parser.format_help(is_all=True), end="")
        parser.exit()


def suggestion(given: str, known: Iterable[str]) -> str:
    """The names that were probably meant, as the end of a sentence; empty if none is near."""
    question = did_you_mean(given, known)
    return f": {question}" if question else ""
