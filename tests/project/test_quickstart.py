"""The quick start, as a reader types it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_command_of_the_quick_start_runs_in_its_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_session: None, capsys: pytest.CaptureFixture[str]
) -> None:
    from raysvc.cli.main import app

    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "quickstart.md").read_text()
    commands = re.findall(r"^\$ raysvc (.*)$", page, re.MULTILINE)
    assert len(commands) == 8
    said = []
    for command in commands:
        result = CliRunner().invoke(app, shlex.split(command))
        assert result.exit_code == 0, f"raysvc {command}: {result.output[-2000:]}"
        said.append(result.output)
    assert any("already=complete" in text for text in said)
    assert (tmp_path / "report.html").exists()
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(block, "quickstart.md", "exec"), {})
    out = capsys.readouterr().out
    assert out.startswith("400 ")
    assert "\n0 torch.Size([" in out
