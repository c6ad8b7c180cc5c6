"""A keeper that a trainer started; what it is told comes as JSON on standard input, and it writes to its log.

By hand it is ``stepwell keeper``.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from stepwell.config.keeper import KeeperConfig
from stepwell.config.strict import Strict
from stepwell.errors import StepwellError
from stepwell.keeper.configured import options_of
from stepwell.keeper.keeper import keep
from stepwell.keeper.record import KeeperRecord
from stepwell.pipeline.records import Link


class Told(Strict):
    """What a trainer tells the keeper that it starts.

    Attributes
    ----------
    run : str
    keeper : KeeperConfig
    finish : list of str
        Arenas of trainers of this node.
    trainer : int or None
        The process that started it, if it is to stay while that lives.
    """

    run: str
    keeper: KeeperConfig
    finish: list[str]
    trainer: int | None


def main() -> int:
    """Keep until there is nothing to keep."""
    try:
        told = Told.model_validate_json(sys.stdin.buffer.read())
        options = options_of(told.keeper, told.run, [Path(directory) for directory in told.finish])
        options = replace(options, linger_s=told.keeper.linger_s, trainer=told.trainer)
        asyncio.run(keep(options, _ready, _finished, _failed))
    except (ValidationError, StepwellError) as error:
        _say(" ".join(str(error).split()))
        return 2
    return 0


def _ready(record: KeeperRecord) -> None:
    _say(f"keeper {record.name} of run {record.run} at {', '.join(record.addresses)}")


def _finished(arena: Path, links: list[Link]) -> None:
    _say(f"committed in {arena}: step {', '.join(str(link.step) for link in links)}")


def _failed(arena: Path, error: StepwellError) -> None:
    _say(f"what was captured in {arena} is not committed: {error}")


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
