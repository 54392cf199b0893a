"""The server's configuration, in one frozen record around the engine's own.

Flags, the environment and a TOML file use the same names and meet in one function, `merge`: flags beat the environment,
the environment beats the file, and the file beats the defaults. Between file and defaults comes the profile of
`sparkdraft tune`, which the engine's process reads. bridges/container_env.py adds the variables of vLLM's containers.
"""

from __future__ import annotations

import ipaddress
import math
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from sparkdraft.config import ENGINE_FIELDS, EngineConfig, option, parse_sampling
from sparkdraft.core import UserError
from sparkdraft.text.families import AUTO, NONE, REASONING_PARSERS, TOOL_PARSERS
from sparkdraft.util.names import did_you_mean

PREFIX = "SPARKDRAFT_"
# Variables that are not fields: weights/hub.py, cli/serve.py, kernels/native/build.py and the plugin in vLLM read them.
OTHER_NAMES = ("SPARKDRAFT_CACHE", "SPARKDRAFT_CONFIG", "SPARKDRAFT_CXXFLAGS", "SPARKDRAFT_VLLM_SKIP")
TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
RANGES: dict[str, tuple[float, float, str]] = {  # of fields, and the rule in words
    "port": (0, 65535, "between 0 (any free one) and 65535"),
    "max_queue": (0, math.inf, "0 (no request waits) or positive"),
    "max_body": (1024, math.inf, "at least 1024 bytes"),
    "log_prompts": (0, 100_000, "between 0 (none) and 100000 characters"),
    "repetition_limit": (0, math.inf, "0 (off) or positive"),
    "drain_seconds": (0, 3600, "between 0 and 3600"),
    "hang_seconds": (0, 86400, "between 0 (no limit) and 86400"),
    "step_seconds": (0, 86400, "between 0 (no limit) and 86400"),
}
REQUEST_LOGS = ("off", "text", "json")
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@*]+")  # as browsers send it
USUAL_PORTS = {"http": ":80", "https": ":443"}  # browsers leave them out


@dataclass(frozen=True, slots=True)
class ServerConfig:
    engine: EngineConfig = field(default_factory=EngineConfig)
    host: str = option(
        "127.0.0.1", "address to listen on; one that other machines reach needs --api-key or --allow-public"
    )
    port: int = option(8000, "port to listen on (0: any free one)")
    api_key: str = option(
        "", "key that clients must send; set SPARKDRAFT_API_KEY instead to keep it out of `ps`", secret=True
    )
    api_keys_file: str = option(
        "", "TOML file with named keys and their limits, read again when it changes; docs/operations.md has its form"
    )
    served_name: str = option("", "the model's name in requests, or several separated by commas (default: as --model)")
    allow_public: bool = option(False, "let other machines connect without a key")
    allowed_hosts: str = option(
        "",
        "host names, besides localhost, that clients may use for this server, separated by commas; '*' allows all "
        "(default: only localhost if --host is this machine, else all)",
    )
    cors_origins: str = option(
        "",
        "origins of web pages that may read this server's answers, separated by commas, such as "
        "https://a.example,http://localhost:3000; '*' allows every page (default: none)",
    )
    request_log: str = option("text", "log one line per request when it ends: text, json or off")
    log_prompts: int = option(
        0, "also log the last characters of each prompt and the first of its answer, so many of each (0: none)"
    )
    max_queue: int = option(256, "maximum number of waiting sequences; requests beyond it get status 429")
    max_body: int = option(8 << 20, "maximum size of a request body in bytes")
    sampling_defaults: str = option(
        "model",
        "sampling of requests that set none: model (from its generation_config.json), openai (temperature 1), or "
        "values such as temperature=0.7,top_p=0.9",
    )
    repetition_limit: int = option(
        200,
        "end a text after this many tokens of pure repetition, if its request sets neither max_tokens nor "
        "repetition_limit (0: never)",
    )
    reasoning_parser: str = option(
        AUTO,
        f"format of reasoning: auto (by the model), {', '.join(REASONING_PARSERS)}, or none (leave it in the text)",
    )
    tool_parser: str = option(AUTO, f"format of tool calls: auto (by the model), {', '.join(TOOL_PARSERS)}")
    drain_seconds: float = option(30.0, "seconds that running requests have to finish after SIGTERM")
    hang_seconds: float = option(
        60.0, "restart an engine process that gives no sign of life for this many seconds (0: never)"
    )
    step_seconds: float = option(
        600.0, "restart an engine process whose step takes longer than this many seconds (0: never)"
    )
    canary: bool = option(True, "ask questions with known answers at each start, and switch off what fails")
    watchdog: bool = option(True, "watch memory, throttling, step times and acceptance, and react to problems")

    def __post_init__(self) -> None:
        for name, (low, high, rule) in RANGES.items():
            if not low <= (value := getattr(self, name)) <= high:
                raise UserError(f"{name} is {value}; it must be {rule}")
        parse_sampling(self.sampling_defaults)
        parsers = {"reasoning_parser": (*REASONING_PARSERS, NONE), "tool_parser": TOOL_PARSERS}
        for name, known in parsers.items():
            if getattr(self, name) not in (AUTO, *known):
                raise UserError(f"{name} is '{getattr(self, name)}'; it must be one of auto, {', '.join(known)}")
        if self.request_log not in REQUEST_LOGS:
            raise UserError(f"request_log is '{self.request_log}'; it must be one of {', '.join(REQUEST_LOGS)}")
        if self.log_prompts and self.request_log == "off":
            raise UserError(f"log_prompts is {self.log_prompts} and request_log is off; set that to text or json")
        for origin in self.origins:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                form = "whole origins without a path, such as https://a.example, or '*' alone for every page"
                raise UserError(f"cors_origins has '{origin}'; it must be {form}")
        if "*" in self.origins and len(self.origins) > 1:
            raise UserError("cors_origins has '*' beside other origins; it must be '*' alone, or origins without it")
        for name in (part.strip() for part in self.allowed_hosts.split(",")):
            if "*" in name and name != "*":
                raise UserError(f"allowed_hosts has '{name}'; it must be whole names, or '*' alone for all names")
        if not self.api_key.isascii() or self.api_key != self.api_key.strip():
            raise UserError("api_key has characters that a header cannot carry; use ASCII without spaces around it")
        if not (self.is_local or self.needs_key or self.allow_public):
            raise UserError(
                f"host {self.host} is reachable from other machines and there is no api_key and no api_keys_file; "
                "set one, or allow it with --allow-public (SPARKDRAFT_ALLOW_PUBLIC=1)"
            )

    @property
    def needs_key(self) -> bool:
        """True if clients must send a key."""
        return bool(self.api_key or self.api_keys_file)

    @property
    def origins(self) -> list[str]:
        """The origins of `cors_origins` as browsers send them: in lower case, without the scheme's usual port."""
        given = (part.strip().lower() for part in self.cors_origins.split(","))
        return [origin.removesuffix(USUAL_PORTS.get(origin.split(":")[0], "\n")) for origin in given if origin]

    @property
    def is_local(self) -> bool:
        """True if only this machine can reach the address."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def names(self) -> list[str]:
        """The model's names in requests; answers carry the first one."""
        given = [name.strip() for name in self.served_name.split(",") if name.strip()]
        model = self.engine.model
        path = Path(model)
        return given or ([path.name, model] if path.exists() and path.name else [model])


SERVER_FIELDS: dict[str, Field[Any]] = {f.name: f for f in fields(ServerConfig) if f.name != "engine"}
FIELDS = SERVER_FIELDS | ENGINE_FIELDS
OWN_NAMES = {PREFIX + name.upper(): name for name in FIELDS}  # variables and their fields


def default_of(name: str) -> Any:
    value = FIELDS[name].default
    assert value is not MISSING, name
    return value


def merge(
    flags: Mapping[str, Any],
    toml_path: str | Path | None,
    environ: Mapping[str, str],
    base: Mapping[str, Any] | None = None,
    more: Callable[[Mapping[str, str]], dict[str, Any]] | None = None,
) -> ServerConfig:
    """One config from the three sources; a flag that was not given is None or missing. base: values that all three
    beat; its drafter is only for its own model. more: reads variables between the file and SPARKDRAFT_ ones."""
    named = _from_toml(toml_path) if toml_path else {}
    check_names(environ)
    named |= more(environ) if more else {}
    named |= {name: converted(name, environ[key], key) for key, name in OWN_NAMES.items() if environ.get(key)}
    named |= {name: value for name, value in flags.items() if value is not None}
    values = dict(base or {}) | named
    if base and "drafter" not in named and values["model"] != base["model"]:
        values.pop("drafter", None)
    engine = {name: value for name, value in values.items() if name in ENGINE_FIELDS}
    server = {name: value for name, value in values.items() if name in SERVER_FIELDS}
    assert len(engine) + len(server) == len(values), values.keys() - FIELDS.keys()
    return ServerConfig(EngineConfig.of(**engine), **server)


def beats_extra_args(flags: Mapping[str, Any], environ: Mapping[str, str]) -> frozenset[str]:
    """The fields that flags or SPARKDRAFT_ variables set."""
    return frozenset(name for name in FIELDS if flags.get(name) is not None or environ.get(PREFIX + name.upper()))


def check_names(environ: Mapping[str, str]) -> None:
    """Refuse unknown SPARKDRAFT_ variables. An empty variable counts as not set: containers pass such on."""
    for key, value in environ.items():
        if key.startswith(PREFIX) and value and key not in OWN_NAMES and key not in OTHER_NAMES:
            question = did_you_mean(key, [*OWN_NAMES, *OTHER_NAMES], PREFIX)
            raise UserError(
                f"the environment variable {key} is not known; {question and question + ' '}Rename or unset it"
            )


def _from_toml(path: str | Path) -> dict[str, Any]:
    try:
        found = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"the file {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"the file {path} is not valid TOML: {error}") from None
    for key in found:
        if key not in FIELDS:
            question = did_you_mean(key, FIELDS) or "docs/api.md lists all keys"
            raise UserError(f"{path} has the unknown key '{key}'; {question}")
    return {key: converted(key, value, f"{key} in {path}") for key, value in found.items()}


def converted(name: str, value: Any, source: str) -> Any:
    """Convert a value from TOML's types, or from an environment variable's text, to the field's own type."""
    kind = type(default_of(name))
    if kind is bool:
        if isinstance(value, str) and value.lower() in TRUE + FALSE:
            return value.lower() in TRUE
        if isinstance(value, bool):
            return value
        raise UserError(f"{source} is '{value}'; it must be true or false")
    if isinstance(value, bool | list | dict) or (kind is int and isinstance(value, float)):
        raise UserError(f"{source} is {value}; it must be a {_word(kind)}")
    try:
        return kind(value)
    except (TypeError, ValueError):
        raise UserError(f"{source} is '{value}'; it must be a {_word(kind)}") from None


def _word(kind: type) -> str:
    return {int: "whole number", float: "number"}.get(kind, "text")
