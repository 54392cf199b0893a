"""The keys that clients send: the one of --api-key, and named ones with limits from a file.

A key is kept and compared as its SHA-256 digest. The file is read at the start and again when it has changed, so keys
are added and removed without a restart. `guards.Auth` asks for a request's key here and reports when the request ends.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import os
import re
import time
import tomllib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sparkdraft.core import UserError
from sparkdraft.server.protocol.validation import ApiError
from sparkdraft.util.names import did_you_mean

log = logging.getLogger(__name__)
log.setLevel(logging.INFO)  # a file that was read again is told at this level

FLAG = "--api-key"  # the name of that flag's key; no key of a file can have it
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}")
DIGEST = re.compile(r"[0-9a-f]{64}")
LIMITS = ("max_concurrent", "requests_per_minute")
ENTRIES = ("key", "sha256", *LIMITS)
LOOK = 1.0  # seconds between two looks at the file
MINUTE = 60.0
MAX_FILE = 1 << 20  # bytes


@dataclass(frozen=True, slots=True)
class Key:
    name: str
    digest: bytes
    max_concurrent: int = 0  # 0: no limit, as below
    requests_per_minute: int = 0


@dataclass(slots=True)
class Use:
    """What the requests of one key do now."""

    running: int = 0
    began: deque[float] = field(default_factory=deque)  # of the requests of the last minute


class Keys:
    """file: the path of a keys file, or ""."""

    def __init__(self, key: str = "", file: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self._own = [Key(FLAG, digest_of(key.encode()))] if key else []
        self._file, self._clock = file, clock
        self._named: list[Key] = []
        self._use: dict[str, Use] = {}  # by name, so that a file that is read again resets no limit
        self._looked = 0.0
        self._version: tuple[int, ...] | None = None  # of the file that was looked at last
        if file:
            self._read()
            if not self._own + self._named:
                raise UserError(f"the keys file {file} has no keys; add one, such as [keys.alice] with key or sha256")

    def find(self, given: bytes) -> Key | None:
        """The key that a client sent. Every key is compared, in a time that does not depend on what was sent."""
        self._look()
        digest, found = digest_of(given), None
        for key in (*self._own, *self._named):
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    def enter(self, key: Key) -> None:
        """Count a request, or refuse it with 429 if it is past one of its key's limits."""
        use, now = self._use.setdefault(key.name, Use()), self._clock()
        while use.began and now - use.began[0] >= MINUTE:
            use.began.popleft()
        if key.max_concurrent and use.running >= key.max_concurrent:
            what = f"may run {_requests(key.max_concurrent)} at once, and {use.running} run"
            raise _limited(key, "max_concurrent", f"{what}; wait for one to end", 1)
        if key.requests_per_minute and len(use.began) >= key.requests_per_minute:
            wait = math.ceil(MINUTE - (now - use.began[-key.requests_per_minute]))
            what = f"may send {_requests(key.requests_per_minute)} per minute, and it has"
            raise _limited(key, "requests_per_minute", f"{what}; retry in {wait} s", max(1, wait))
        use.running += 1
        if key.requests_per_minute:
            use.began.append(now)

    def leave(self, key: Key) -> None:
        self._use[key.name].running -= 1

    # ---- the file

    def _look(self) -> None:
        """Read the file again if it has changed. One that cannot be read changes nothing, and the log says why."""
        now = self._clock()
        if not self._file or now - self._looked < LOOK:
            return
        self._looked = now
        try:
            version = _version(self._file)
        except OSError:
            version = ()
        if version == self._version:
            return
        try:
            self._read()
            names = ", ".join(key.name for key in self._named) or "none"
            log.info("the keys file %s was read again; its keys: %s", self._file, names)
        except UserError as error:
            self._version = version
            log.error("%s; the keys that were read before stay in use", error)

    def _read(self) -> None:
        try:
            with open(self._file, "rb") as file:
                status = os.fstat(file.fileno())
                text = file.read(MAX_FILE + 1)
        except OSError as error:
            raise UserError(f"the keys file {self._file} cannot be read: {error.strerror}") from None
        if len(text) > MAX_FILE:
            raise UserError(f"the keys file {self._file} is larger than {MAX_FILE:,} bytes")
        self._named = parsed(text, self._file)
        self._version, self._looked = _version_of(status), self._clock()
        if status.st_mode & 0o077:
            mode = f"{status.st_mode & 0o777:03o}"
            log.warning("the keys file %s is open to other users (mode %s); chmod 600 it", self._file, mode)


def digest_of(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def parsed(text: bytes, path: str) -> list[Key]:
    """The keys of a file; UserError with one sentence, which never has a key in it."""
    try:
        found = tomllib.loads(text.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"the keys file {path} is not valid TOML: {error}") from None
    if found.keys() != {"keys"} or not isinstance(found["keys"], dict):
        raise UserError(f"the keys file {path} must have the table 'keys' and nothing else, such as [keys.alice]")
    keys = [_key(name, entry, f"the keys file {path}") for name, entry in found["keys"].items()]
    names: dict[bytes, str] = {}
    for key in keys:
        if (other := names.setdefault(key.digest, key.name)) != key.name:
            raise UserError(f"the keys file {path} gives '{other}' and '{key.name}' the same key; give each its own")
    return keys


def _key(name: str, entry: Any, where: str) -> Key:
    if not NAME.fullmatch(name):
        raise UserError(f"{where} has the name '{name[:64]}'; it must be 1 to 64 letters, digits or characters of _.@-")
    if not isinstance(entry, dict):
        raise UserError(f"{where} has no table for '{name}'; write [keys.{name}] with key or sha256")
    for field_name in entry:
        if field_name not in ENTRIES:
            question = did_you_mean(field_name, ENTRIES) or f"it may have {', '.join(ENTRIES)}"
            raise UserError(f"{where} has the unknown field '{field_name}' in '{name}'; {question}")
    if ("key" in entry) == ("sha256" in entry):
        raise UserError(f"{where} must have either key or sha256 for '{name}'")
    return Key(name, _digest(name, entry, where), *(_limit(name, entry, limit, where) for limit in LIMITS))


def _digest(name: str, entry: Mapping[str, Any], where: str) -> bytes:
    if "sha256" in entry:
        value = entry["sha256"]
        if not isinstance(value, str) or not DIGEST.fullmatch(value.lower()):
            raise UserError(f"{where} has a sha256 for '{name}' that is not 64 hexadecimal digits")
        return bytes.fromhex(value)
    key = entry["key"]
    if not isinstance(key, str) or not key or not key.isascii() or not key.isprintable() or key != key.strip():
        raise UserError(f"{where} has a key for '{name}' that no header can carry; use ASCII without spaces around it")
    return digest_of(key.encode())


def _limit(name: str, entry: Mapping[str, Any], limit: str, where: str) -> int:
    value = entry.get(limit, 0)
    if type(value) is not int or (limit in entry and value < 1):
        raise UserError(f"{where} has a {limit} for '{name}' that is no whole number of at least 1")
    return value


def _requests(count: int) -> str:
    return f"{count} request{'s' * (count > 1)}"


def _limited(key: Key, limit: str, what: str, wait: int) -> ApiError:
    sentence = f"The key '{key.name}' {what}, or raise its {limit} in the keys file."
    return ApiError(429, sentence, code="rate_limit_exceeded", headers={"Retry-After": str(wait)})


def _version(path: str) -> tuple[int, ...]:
    return _version_of(os.stat(path))


def _version_of(status: os.stat_result) -> tuple[int, ...]:
    return status.st_mtime_ns, status.st_size, status.st_ino
