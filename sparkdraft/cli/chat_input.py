"""Where the messages of a chat come from: a person at a terminal, or the lines of a file or pipe.

At a terminal prompt_toolkit provides line editing, a history that outlasts the program (arrow keys, ctrl-r), and keeps
a paste of several lines one message.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from sparkdraft.cli.console import note
from sparkdraft.cli.options import as_text, standard_input
from sparkdraft.util.progress import errors
from sparkdraft.weights.hub import cache_dir

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings

PROMPT, CONTINUED = "> ", "  "


def messages() -> Iterator[str]:
    """The user's messages, one after the other, until there are no more."""
    return _typed(cache_dir() / "chat_history") if standard_input().isatty() else _piped()


def _piped() -> Iterator[str]:
    """Each line is a message."""
    for raw in standard_input().buffer:
        yield as_text(raw, "standard input").strip()


def _typed(history: Path) -> Iterator[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.output import create_output

    session: PromptSession[str] = PromptSession(
        PROMPT,
        multiline=True,
        prompt_continuation=CONTINUED,
        key_bindings=_keys(),
        history=_history(history),
        output=create_output(always_prefer_tty=True),  # answers may be piped on while the prompt stays visible
    )
    while True:
        try:
            yield session.prompt()
        except KeyboardInterrupt:
            errors.print("(ctrl-d or /quit ends the chat)", style="dim")
        except EOFError:
            return


def _keys() -> KeyBindings:
    """Enter sends; alt-enter, which a terminal sends as escape and enter, makes a new line."""
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _history(path: Path) -> History:
    """A history in a file that only its owner may read, or for this chat alone if no file can be written."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.open("a").close()
    except OSError as error:
        note(f"what you type is not kept for the next chat: {path} cannot be written ({error.strerror})")
        return InMemoryHistory()
    return FileHistory(path)
