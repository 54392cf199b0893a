"""What a wheel holds: every data file of the package, and the version from one place."""

from __future__ import annotations

import tomllib
from pathlib import Path

import sparkdraft

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_data_file_is_packaged() -> None:
    package = ROOT / "sparkdraft"
    packaged = {
        path for glob in PROJECT["tool"]["setuptools"]["package-data"]["sparkdraft"] for path in package.glob(glob)
    }
    data = {path for path in package.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc", ".md")}
    assert data <= packaged, sorted(data - packaged)


def test_the_version_stands_in_one_place() -> None:
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "sparkdraft.__version__"}
    assert (ROOT / "CHANGELOG.md").read_text().count(f"## {sparkdraft.__version__}\n") == 1


def test_entry_points_lead_somewhere() -> None:
    for points in PROJECT["project"]["entry-points"].values():
        for target in points.values():
            module, name = target.split(":")
            path = ROOT / Path(*module.split("."))
            source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            assert f"def {name}(" in source.read_text() or f"class {name}" in source.read_text(), target
