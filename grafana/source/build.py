"""Writes grafana/dashboards/*.json. Run with `cargo xtask dashboards`; a test proves that what is committed is current."""

import json
from pathlib import Path

import dumps
import extraction
import proxy
import server
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from parts import Board

FOLDER = Path(__file__).parents[1] / "dashboards"
BOARDS = [extraction.BOARD, proxy.BOARD, server.BOARD, dumps.BOARD]


def content(board: Board) -> dict:
    """What Grafana imports."""
    made = json.loads(JSONEncoder().encode(board.build()))
    for variable in made["templating"]["list"]:
        # The SDK writes these for every variable; Grafana's schema knows them for intervals only.
        for key in ("auto", "auto_min", "auto_count"):
            variable.pop(key, None)
    return made


def texts() -> dict[str, str]:
    """File name to content."""
    return {f"{board.uid}.json": json.dumps(content(board), indent=2, sort_keys=True) + "\n" for board in BOARDS}


if __name__ == "__main__":
    for name, text in texts().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
        print(FOLDER / name)
