"""The example of an adapter: a gymnasium game as text, in a worker process."""

from __future__ import annotations

import asyncio
from collections import deque
from pathlib import Path
from typing import Any

from burnish.environments.pool import EnvironmentPool, EnvironmentSpec

FILE = Path(__file__).parents[2] / "recipes/environments/gymnasium_text.py"
MOVES = {"L": (0, -1), "D": (1, 0), "R": (0, 1), "U": (-1, 0)}


def ways(text: str) -> dict[str, str]:
    """The shortest moves from @ to each kind of field of a map."""
    rows = text.split("/")
    cells = {(i, j): field for i, row in enumerate(rows) for j, field in enumerate(row)}
    (start,) = (cell for cell, field in cells.items() if field == "@")
    paths, queue, seen = {"@": ""}, deque([(start, "")]), {start}
    while queue:
        (i, j), path = queue.popleft()
        for letter, (down, right) in MOVES.items():
            cell = (i + down, j + right)
            if cell not in cells or cell in seen:
                continue
            seen.add(cell)
            paths.setdefault(cells[cell], path + letter)
            queue.extend([(cell, path + letter)] if cells[cell] != "H" else [])
    return paths


def test_moves_through_the_adapter_are_those_of_the_game() -> None:
    """The goal gives the reward and a hole none; both end the episode. Other text is counted, and
    an equal seed gives an equal map."""

    async def play(goal: str, seed: int) -> tuple[str, list[Any]]:
        episode = await pool.open({"prompt": "0"}, seed, timeout_s=30)
        try:
            first = episode.start.messages[0]["content"]
            moves = ways(first)[goal]
            return first, [
                await episode.step({"content": content}, timeout_s=30) for content in ("?", *moves)
            ]
        finally:
            await episode.close()

    async def inside() -> None:
        try:
            await pool.start()
            first, steps = await play("G", 5)
            again, fallen = await play("H", 5)
        finally:
            await pool.close()
        assert first == again and len(first.split("/")) == 4
        for played, reward in ((steps, 1.0), (fallen, 0.0)):
            assert played[0].counts == {"invalid_moves": 1}
            assert played[0].messages[0]["content"] == first
            assert [step.done for step in played] == [False] * (len(played) - 1) + [True]
            assert sum(step.rewards.get("goal", 0.0) for step in played) == reward

    pool = EnvironmentPool(EnvironmentSpec(f"{FILE}:FrozenLake", {"size": 4}), workers=1)
    asyncio.run(inside())
