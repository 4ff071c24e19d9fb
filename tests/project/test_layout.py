"""The rooms, the arrows between them, and what a wheel holds."""

from __future__ import annotations

import ast
import functools
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import raysvc

ROOT = Path(__file__).parents[2]
CORE = ("raysvc/chat/", "raysvc/cache/", "raysvc/plan/", "raysvc/collate/", "raysvc/media/", "raysvc/job/")
CORE_FILES = ("raysvc/errors.py", "raysvc/row_batch.py")
ROOMS = ("actors", "pipelines")
UPLOT = ("LICENSE", "uPlot.iife.min.js", "uPlot.min.css")


def code_files() -> list[Path]:
    found = [p for room in ("raysvc", *ROOMS) for p in (ROOT / room).rglob("*.py")]
    return sorted({p for p in found if not any(part.is_symlink() for part in [p, *p.parents])})


@functools.cache
def imports_of(path: Path) -> frozenset[str]:
    """Modules that a file imports anywhere, lazily or not; typing-only imports count too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(str(node.module))
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(names)


def imported_at_the_top(path: Path) -> set[str]:
    """Modules that a file imports when it is loaded."""
    found = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import)]
    return {alias.name for node in found for alias in node.names}


def touches(names: frozenset[str], module: str) -> bool:
    return any(name == module or name.startswith(f"{module}.") for name in names)


def room_of(path: Path) -> str:
    relative = path.relative_to(ROOT).as_posix()
    if relative.startswith(CORE) or relative in CORE_FILES:
        return "core"
    return relative.split("/")[0] if relative.startswith(ROOMS) else "face"


def test_the_core_imports_neither_ray_nor_torch_nor_a_room_above() -> None:
    """But for one function: the processors of videos resize with torch's rounding."""
    core = [path for path in code_files() if room_of(path) == "core"]
    assert len(core) > 20
    for path in core:
        names = imports_of(path)
        if path.relative_to(ROOT).as_posix() == "raysvc/media/video_patches.py":
            assert "torch" not in imported_at_the_top(path)
            names -= {"torch"}
        for banned in (
            "ray",
            "torch",
            "raysvc.actors",
            "raysvc.pipelines",
            "raysvc.api",
            "raysvc.client.batch_client",
            "raysvc.cli",
        ):
            assert not touches(names, banned), f"{path} imports {banned}"


def test_the_rooms_never_import_each_other() -> None:
    for path in code_files():
        if room_of(path) == "actors":
            assert not touches(imports_of(path), "raysvc.pipelines"), path
        if room_of(path) == "pipelines":
            assert not touches(imports_of(path), "raysvc.actors"), path


def test_rooms_import_nothing_of_the_face_when_they_run() -> None:
    face = (
        "raysvc.api",
        "raysvc.builds.find_or_build",
        "raysvc.training.train",
        "raysvc.training.train_loop",
        "raysvc.cli",
        "raysvc.cluster",
    )
    for path in code_files():
        if room_of(path) in ROOMS:
            for module in face:
                assert not touches(imports_of(path), module), f"{path} imports {module}"


def test_no_file_imports_the_rooms_by_their_folder() -> None:
    for path in [*code_files(), *(ROOT / "tests").rglob("*.py")]:
        assert not touches(imports_of(path), "actors"), path
        assert not touches(imports_of(path), "pipelines"), path


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_is_reached_through_a_relative_link(room: str) -> None:
    link = ROOT / "raysvc" / room
    assert link.is_symlink()
    assert link.readlink() == Path("..") / room
    assert link.resolve() == ROOT / room


def expected_modules() -> set[str]:
    def name(path: Path) -> str:
        relative = path.relative_to(ROOT).as_posix()
        return relative if relative.startswith("raysvc/") else f"raysvc/{relative}"

    page = {
        f"raysvc/report/{name}" for name in ("browse.js", "draw.js", *(f"uplot/{each}" for each in UPLOT))
    }
    return {name(path) for path in code_files()} | {"raysvc/py.typed", "raysvc/cli/chatml.jinja"} | page


def source_tree(target: Path, *, links_as_text: bool) -> Path:
    """A copy of what is needed to build; a zip archive turns links into text files."""
    for folder in ("raysvc", *ROOMS):
        shutil.copytree(
            ROOT / folder, target / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    for folder in ("tests/project", "docs", "deploy"):
        shutil.copytree(ROOT / folder, target / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "tests" / "conftest.py", target / "tests" / "conftest.py")
    for file in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "CHANGELOG.md"):
        shutil.copy(ROOT / file, target / file)
    if links_as_text:
        for room in ROOMS:
            link = target / "raysvc" / room
            text = str(link.readlink())
            link.unlink()
            link.write_text(text)
    return target


def build(tree: Path, *kinds: str) -> Path:
    out = tree / "dist"
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), *kinds, str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (wheel,) = out.glob("*.whl")
    return wheel


def modules_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_a_wheel_from_an_sdist_holds_every_module_and_nothing_else(tmp_path: Path) -> None:
    # without --wheel the wheel is built from the unpacked sdist
    wheel = build(source_tree(tmp_path / "tree", links_as_text=False))
    assert modules_in(wheel) == expected_modules()
    assert wheel.name.startswith(f"raysvc-{raysvc.__version__}-")
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        text = archive.read(metadata).decode()
    assert f"\nVersion: {raysvc.__version__}\n" in text
    assert "\nClassifier: Typing :: Typed\n" in text
    urls = dict(re.findall(r"^Project-URL: ([^,]+), (\S+)$", text, re.MULTILINE))
    assert set(urls) == {"Homepage", "Release notes", "Source"}
    assert {url.partition("#")[0] for url in urls.values()} == {"https://pypi.org/project/raysvc/"}
    (sdist,) = wheel.parent.glob("*.tar.gz")
    with tarfile.open(sdist) as archive_of_source:
        names = {name.partition("/")[2] for name in archive_of_source.getnames()}
    assert {"tests/conftest.py", "CHANGELOG.md", "raysvc/__init__.py"} <= names
    for folder in ("tests/project", "docs", "deploy"):
        there = {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*") if path.is_file()}
        assert {name for name in there if "__pycache__" not in name} <= names, folder


def test_the_version_has_its_section_in_the_changelog() -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert raysvc.__version__ in headings[:2]  # behind what is unreleased, if anything is


@pytest.mark.slow
def test_a_wheel_from_a_zip_archive_holds_every_module_too(tmp_path: Path) -> None:
    tree = source_tree(tmp_path / "tree", links_as_text=True)
    assert modules_in(build(tree, "--wheel")) - {"raysvc/actors", "raysvc/pipelines"} == expected_modules()


def test_the_hooks_before_a_commit_are_those_of_ci_and_fetch_nothing() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert [each["repo"] for each in config["repos"]] == ["local"]
    hooks = [hook["entry"].split() for hook in config["repos"][0]["hooks"]]
    makefile = (ROOT / "Makefile").read_text()
    for program, *arguments in hooks:
        words = [each for each in arguments if not each.startswith("-")]
        assert " ".join([program.replace(".venv/bin", "$(BIN)"), *words]) in makefile, program
    assert len(hooks) == 3


def test_importing_brings_in_nothing_but_errors_and_the_standard_library() -> None:
    code = (
        "import sys; before = set(sys.modules); import raysvc; names = set(sys.modules) - before;"
        "print(sorted(m for m in names if m.partition('.')[0] not in sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['raysvc', 'raysvc.errors', 'raysvc.redact']"


def test_every_public_name_is_there() -> None:
    import raysvc

    for name in raysvc.__all__:
        assert getattr(raysvc, name) is not None
    with pytest.raises(AttributeError, match="public names are"):
        _ = raysvc.nonsense  # type: ignore[attr-defined]


def test_the_pinned_versions_install_with_the_first_release_of_every_python() -> None:
    """With one that does not, pip's resolver tries other versions for hours and says nothing."""
    pins = dict(re.findall(r"^([\w.-]+)==([\w.+!-]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    pinned = {canonicalize_name(name): version for name, version in pins.items()}
    project = (ROOT / "pyproject.toml").read_text()
    pythons = [f"{version}.0" for version in re.findall(r"Python :: (3\.\d+)", project)]
    assert pythons
    looked_at, refused = 0, []
    for found in distributions():
        if pinned.get(canonicalize_name(found.name)) == found.version:
            takes = SpecifierSet(found.metadata.get("Requires-Python") or "")
            looked_at += 1
            refused += [f"{found.name} {takes}" for python in pythons if not takes.contains(python)]
    assert looked_at > 100  # of the pins
    assert not refused
