"""A profile: settings that `sparkdraft tune` measured as faster, for one machine and one model, as a small TOML file.

It lies in the user's cache folder and is picked up by whatever loads the model (engine/load.py). A setting that the
user names beats it. A profile of another machine or model is ignored with a reason, and one with numbers out of bounds
is refused. No torch.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sparkdraft.cache.formats import kv_names
from sparkdraft.config import ENGINE_FIELDS, NO_PROFILE, EngineConfig
from sparkdraft.core import Fallback, UserError
from sparkdraft.plan.hardware import Hardware
from sparkdraft.util.files import write_whole
from sparkdraft.util.names import user_path
from sparkdraft.weights.hub import cache_dir

VERSION = 1
DIGITS = 12  # of a model's digest
LIMITS = {"max_step_tokens": (16, 131_072), "max_seqs": (1, 4096), "threads": (1, 1024)}  # of the numbers it may set
DEEPEST = 63  # drafts per step
OPTIONS = (*LIMITS, "spec_depths", "kv")
# settings that it was measured with, and does not hold without
CONDITIONS = ("dtype", "weights", "drafter_weights", "draft_vocab", "graphs")
REMEDY = "remove the file, write it again with `sparkdraft tune`, or pass --no-profile"


@dataclass(frozen=True, slots=True)
class Subject:
    """What a profile is about: a machine, a model as it is stored, and the drafter beside it."""

    machine: str
    model: str  # the name under which the user loads it
    digest: str  # of its config and of the sizes of its tensors
    drafter: str = ""

    @classmethod
    def of(cls, hardware: Hardware, model: str, config: Mapping[str, Any], stored: object, drafter: str) -> Subject:
        """config: the checkpoint's. stored: how many bytes of which kind it holds."""
        cores = f", {hardware.cores} cores" if hardware.device == "cpu" else ""
        text = json.dumps([config, stored], sort_keys=True, default=str)
        digest = hashlib.sha256(text.encode()).hexdigest()[:DIGITS]
        return cls(f"{hardware.device} {hardware.name}{cores}", model, digest, drafter)

    @property
    def path(self) -> Path:
        """The user's own profile of it."""
        return folder() / f"{self.stem}-{self.digest}@{_slug(self.machine)}.toml"

    @property
    def stem(self) -> str:
        path = user_path(self.model)
        return _slug(path.absolute().name if path.exists() else self.model)


@dataclass(frozen=True, slots=True)
class Profile:
    subject: Subject
    options: dict[str, Any]  # fields of EngineConfig
    date: str
    gain: str = ""  # what was measured, in words
    conditions: dict[str, Any] = field(default_factory=dict)  # CONDITIONS as they were

    def text(self) -> str:
        subject = self.subject
        head = {"version": VERSION, "date": self.date, "machine": subject.machine, "model": subject.model}
        head |= {"digest": subject.digest, "drafter": subject.drafter, "gain": self.gain}
        parts = ["# Written by `sparkdraft tune`. Settings that are named elsewhere beat these.", *_lines(head)]
        for name, table in (("conditions", self.conditions), ("options", self.options)):
            parts += ["", f"[{name}]", *_lines(table)]
        return "\n".join(parts) + "\n"

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, self.text())


def folder() -> Path:
    return cache_dir() / "profiles"


def read_profile(path: Path) -> Profile:
    """Raises UserError if it is no profile, or one that this version would not have written."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
        if found["version"] != VERSION:
            raise ValueError(f"its version is {found['version']}, and this is {VERSION}")
        subject = Subject(*(str(found[name]) for name in ("machine", "model", "digest", "drafter")))
        options, conditions = dict(found["options"]), dict(found["conditions"])
        profile = Profile(subject, options, str(found["date"]), str(found["gain"]), conditions)
        for name, value in profile.options.items():
            _check(name, value)
        EngineConfig(**profile.options)
    except OSError as error:
        raise UserError(f"the profile {path} cannot be read: {error.strerror}") from None
    except KeyError as error:
        raise UserError(f"the profile {path} lacks {error}: {REMEDY}") from None
    except (ValueError, TypeError, UserError) as error:
        raise UserError(f"the profile {path} is refused, {error}: {REMEDY}") from None
    return profile


def conditions_of(config: EngineConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in CONDITIONS}


def pick_up(config: EngineConfig, subject: Subject, deepest: int = DEEPEST) -> tuple[EngineConfig, list[Fallback]]:
    """The config with the profile's settings where the user has named none, and fallbacks to tell. deepest: drafts per
    step, at most."""
    if config.profile == NO_PROFILE:
        return config, []
    path = subject.path if config.profile == "auto" else user_path(config.profile)
    if config.profile == "auto" and not path.is_file():
        return config, _others(config, subject)
    profile = read_profile(path)
    if reason := mismatch(profile, config, subject):
        return config, [Fallback(f"the profile {path.name} is ignored", reason)]
    return _applied(config, profile, path, subject, deepest)


def mismatch(profile: Profile, config: EngineConfig, subject: Subject) -> str:
    """Why a profile does not hold here; empty if it does."""
    other = profile.subject
    if other.machine != subject.machine:
        return f"it was measured on {other.machine}, and this is {subject.machine}: run `sparkdraft tune` here"
    if other.digest != subject.digest:
        changed = "another version of it" if other.model == subject.model else subject.model
        return f"it was measured with {other.model}, and this is {changed}: run `sparkdraft tune` again"
    for name, value in profile.conditions.items():
        if name in CONDITIONS and value != getattr(config, name):
            return f"it was measured with {name} {value}, and {name} is {getattr(config, name)}"
    return ""


def _applied(
    config: EngineConfig, profile: Profile, path: Path, subject: Subject, deepest: int
) -> tuple[EngineConfig, list[Fallback]]:
    used, left = dict[str, Any](), list[str]()
    depths = EngineConfig(spec_depths=profile.options.get("spec_depths", "auto")).depths or [0]
    for name, value in profile.options.items():
        if not config.is_open(name):
            left.append(f"{name} is {getattr(config, name)} as you say")
        elif name == "spec_depths" and profile.subject.drafter != subject.drafter:
            left.append(f"spec_depths is left out, it was measured with {profile.subject.drafter or 'no drafter'}")
        elif name == "spec_depths" and max(depths) > deepest:
            left.append(f"spec_depths is left out, {max(depths)} drafts are more than the {deepest} that can be made")
        elif name == "max_seqs" and 0 < config.max_step_tokens < value:
            left.append(f"max_seqs is left out, {value} is above max_step_tokens ({config.max_step_tokens})")
        elif name == "max_step_tokens" and value < config.max_seqs:
            left.append(f"max_step_tokens is left out, {value} is below max_seqs ({config.max_seqs})")
        else:
            used[name] = value
    kept = ", ".join(f"{name} {value}" for name, value in used.items()) or "nothing of it is used"
    reason = "; ".join([kept, *left, "--no-profile ignores it"])
    return replace(config, **used), [Fallback(f"profile {path.name} from {profile.date}", reason, is_choice=True)]


def _others(config: EngineConfig, subject: Subject) -> list[Fallback]:
    """Profiles that a user may expect to be picked up: of this model on another machine, under another name or in
    another version."""
    near = [*folder().glob(f"*-{subject.digest}@*.toml"), *folder().glob(f"{subject.stem}-{'?' * DIGITS}@*.toml")]
    for path in sorted(set(near)):
        try:
            found = read_profile(path)
            usable = f"it was written for {found.subject.model}, and this is {subject.model}: --profile {path} uses it"
            reason = mismatch(found, config, subject) or usable
        except UserError as error:
            reason = str(error)
        return [Fallback(f"the profile {path.name} is ignored", reason)]
    return []


def _check(name: str, value: Any) -> None:
    """Raises ValueError for what a profile may not set."""
    if name not in OPTIONS:
        raise ValueError(f"it sets {name}, and a profile may set {', '.join(OPTIONS)} only")
    kind: type = type(ENGINE_FIELDS[name].default)
    fits = isinstance(value, kind) and not isinstance(value, bool)
    if not fits:
        raise ValueError(f"{name} is {value!r}, and it must be {'text' if kind is str else 'a whole number'}")
    if name in LIMITS:
        least, most = LIMITS[name]
        if not least <= value <= most:
            raise ValueError(f"{name} is {value}, and it must be between {least} and {most}")
    if name == "spec_depths" and (depths := EngineConfig(spec_depths=value).depths) and max(depths) > DEEPEST:
        raise ValueError(f"{name} is {value}, and {DEEPEST} drafts are the most")
    if name == "kv" and value not in kv_names():
        raise ValueError(f"{name} is {value}, and it must be one of {', '.join(kv_names())}")


def _lines(table: Mapping[str, Any]) -> list[str]:
    """A JSON string, number or boolean is one of TOML too."""
    return [f"{name} = {json.dumps(value)}" for name, value in table.items()]


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-").lower()
