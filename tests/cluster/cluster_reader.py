"""A process that reads all that keepers hold, each alone, and says what each save there is; see its test.

``cluster_reader.py CONFIG``: prints, as JSON, for each peer tier of CONFIG what is there: for each committed
step the digest of its bits or what is wrong with it; and the steps of the bases.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "face"))

from cluster_trainer import hash_of

from stepwell.config import Config, PeerTier
from stepwell.errors import StepwellError
from stepwell.peers import open_peer
from stepwell.pipeline.commit import Commit
from stepwell.pipeline.inventory import Inventory
from stepwell.pipeline.offline import OfflineState
from stepwell.pipeline.records import Link
from stepwell.pipeline.replicate import Replicate
from stepwell.pipeline.source import SaveSource
from stepwell.pipeline.tier import Tier

PARAMETERS = ("0.weight", "0.bias", "2.weight", "2.bias")  # of failure_rig.Job, in its optimizer's order


async def main() -> None:
    config = Config.model_validate(json.loads(sys.argv[1]))
    print(json.dumps([await _held(tier, config.run) for tier in config.tiers if isinstance(tier, PeerTier)]))


async def _held(told: PeerTier, run: str) -> dict[str, object]:
    store = open_peer(told, run, read_only=True)
    tier = Tier(told.label, store)
    inventory = await Inventory.read([tier])
    found: dict[int, str] = {}
    for link in sorted(inventory.links()):
        assert link.step not in found, "two lives lead to one step"
        try:
            found[link.step] = await _bits_of(tier, inventory, link)
        except StepwellError as error:
            found[link.step] = f"{type(error).__name__}: {error}"
    store.close()
    return {"saves": found, "bases": sorted(link.step for link in inventory.bases)}


async def _bits_of(tier: Tier, inventory: Inventory, link: Link) -> str:
    state = await OfflineState.open(SaveSource([tier], inventory, Commit(Replicate())), link)
    bits: dict[str, bytes] = {}
    for index, spec in enumerate(state.layout.tensors):
        name = _name_in_job(spec.name)
        if name is not None:
            bits[name] = (await state.piece(index, 0, spec.element_count)).tobytes()
    return hash_of(bits)


def _name_in_job(name: str) -> str | None:
    """Return what ``Job.bits`` calls a tensor, None for what it has not."""
    if name == "rng/torch":
        return "rng"
    head, _, rest = name.partition("/")
    if head == "model":
        return f"model.{rest}"
    if head != "optim":
        return None
    _, parameter, what = rest.split("/")
    return f"optim.{PARAMETERS.index(parameter)}.{what}"


if __name__ == "__main__":
    asyncio.run(main())
