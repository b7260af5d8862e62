from __future__ import annotations

from pathlib import Path

import pytest

from pagerelay.bench.sharing import SharingOptions, measure_sharing


@pytest.mark.slow
async def test_what_is_shared_is_shipped_once_and_held_once(
    tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = SharingOptions(
        model_path=str(tiny_dir), prompt_tokens=256, max_tokens=400, results=str(tmp_path)
    )
    assert await measure_sharing(options) == 0
    assert "| 8" in capsys.readouterr().out
    assert list(tmp_path.glob("sharing-*.json"))
