"""From a configuration and a live model to an open session: tiers, locks, stages."""

from __future__ import annotations

import os
import secrets
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, cast

from stepwell.config import (
    Config,
    DirectoryTier,
    MemoryTier,
    PeerTier,
    PluginTier,
    RemoteTier,
    load_config,
)
from stepwell.config.lossy import Quantization, Sparsity, kinds_of_rule
from stepwell.errors import (
    ConfigError,
    FormatError,
    IntegrityError,
    MissingObjectError,
    StoreError,
    TransientStoreError,
    UsageError,
)
from stepwell.pipeline.base import ChunkStage, Kind
from stepwell.pipeline.base_share import BaseShare
from stepwell.pipeline.choice import SMALL_ELEMENTS, Choices, Policy, Rule
from stepwell.pipeline.delta import DifferenceStage, delta_stage
from stepwell.pipeline.derive import Derive, may_derive
from stepwell.pipeline.finish import open_arena
from stepwell.pipeline.keys import INCARNATION_PREFIX, RUN_RECORD
from stepwell.pipeline.live import LiveState
from stepwell.pipeline.loop import Loop
from stepwell.pipeline.quantize import Quantize
from stepwell.pipeline.records import IncarnationRecord, RunRecord
from stepwell.pipeline.session import Session
from stepwell.pipeline.session_options import SessionOptions
from stepwell.pipeline.sparsify import Sparsify
from stepwell.pipeline.tier import RETRIES, OnError, Tier
from stepwell.stores.arena import Arena
from stepwell.stores.base import ObjectStore
from stepwell.stores.file import FileStore
from stepwell.stores.memory import MemoryStore
from stepwell.stores.threads import wait_apart

if TYPE_CHECKING:
    from stepwell.keeper.attend import Attendant

__all__ = ["assemble", "is_lossy", "open_tiers"]

LOCK_NAME = ".stepwell.lock"

# Of a packed base on object storage. With 8 requests at a time 512 MiB of memory, and a put of about a
# second at the 50 to 100 MB/s that services give one connection.
_UPLOAD_BYTES_MAX = 64 << 20


def assemble(
    source: str | os.PathLike[str] | Mapping[str, object] | Config,
    *,
    model: object,
    optimizer: object,
    extra: Mapping[str, object] | None,
    fresh: bool,
    overrides: Mapping[str, object],
) -> Session:
    """Open everything a run needs; what was opened is closed again if any of it fails.

    Raises
    ------
    ConfigError, LockedError, NoSpaceError, PermanentStoreError
        See `stepwell.open_sync`.
    """
    config = load_config(source, overrides)
    choices = _choices(config)
    label = None if choices is None else choices.label
    live = LiveState(model, optimizer, extra, rng=config.rng, label=label)
    with ExitStack() as opened:
        attendant = None if config.keeper is None else _attend(config, opened)
        record, tiers, arena = open_tiers(config, opened, fresh=fresh)
        session = Session(
            live,
            tiers,
            record,
            _options(config),
            stages=lambda: _chunk_stages(config),
            arena=arena,
            fresh=fresh,
            closing=opened.pop_all(),
        )
        try:
            session.open()
        except BaseException:
            session.abandon()
            raise
        if attendant is not None:
            attendant.watch(session.ledger.warn)
        return session


def _attend(config: Config, opened: ExitStack) -> Attendant:
    """See to it that this node's keeper runs, before any peer is asked for anything."""
    from stepwell.keeper.attend import Attendant

    attendant = Attendant(config)
    opened.callback(attendant.close)
    attendant.start()
    return attendant


def is_lossy(config: Config) -> bool:
    """Whether a stage of the pipeline loses something."""
    return _choices(config) is not None


def open_tiers(
    config: Config, opened: ExitStack, *, fresh: bool = False
) -> tuple[RunRecord, list[Tier], Arena | None]:
    """Open the tiers of a configuration as the only ones that write there; `opened` closes them.

    Parameters
    ----------
    config : Config
    opened : ExitStack
    fresh : bool
        An arena of another run in the place of this one's is removed.

    Returns
    -------
    RunRecord, list of Tier, Arena or None

    Raises
    ------
    ConfigError, LockedError, NoSpaceError, PermanentStoreError
        See `stepwell.open_sync`.
    """
    lossy = is_lossy(config)
    stores: dict[str, ObjectStore] = {}
    for tier in config.tiers:
        if isinstance(tier, DirectoryTier):
            store = stores[tier.label] = FileStore(Path(tier.path))
            lock = store.lock(LOCK_NAME)
            lock.acquire()
            opened.callback(lock.release)
            opened.callback(store.close)
        elif isinstance(tier, RemoteTier):
            stores[tier.label] = _open_remote(tier, opened)
        elif isinstance(tier, PeerTier):
            stores[tier.label] = _open_peer(tier, config.run, opened)
    record = _run_record(config, stores)
    tiers: list[Tier] = []
    arena: Arena | None = None
    for tier in config.tiers:
        built: ObjectStore
        if isinstance(tier, MemoryTier):
            arena = _open_arena(config.arena_directory(tier), record.run, fresh=fresh)
            opened.callback(arena.close)
            for region in arena.left():
                arena.recycle(region)  # the caller begins anew
            built = MemoryStore(arena)
            opened.callback(built.close)
        elif isinstance(tier, DirectoryTier | PeerTier | RemoteTier):
            built = stores[tier.label]
        else:
            built = _plugin_store(tier)
            opened.callback(built.close)
        tiers.append(
            Tier(
                tier.label,
                built,
                keep=tier.keep,
                on_error=OnError(config.error_policy(tier)),
                # These have their own retries, with deadlines.
                retries=0 if isinstance(tier, PeerTier | RemoteTier) else RETRIES,
                # A lossy log does not lead to the bits of a base, so every tier has all of them.
                bases=BaseShare(tier.log_budget if tiers and not lossy else 0.0, config.base_every),
                packed=isinstance(tier, DirectoryTier | RemoteTier) and tier.layout == "pack",
                # Each upload is in memory once more, and several at a time are faster than one.
                data_bytes_max=min(tier.put_bytes_max, _UPLOAD_BYTES_MAX)
                if isinstance(tier, RemoteTier)
                else None,
            )
        )
    return record, tiers, arena


def _open_remote(tier: RemoteTier, opened: ExitStack) -> ObjectStore:
    """Open a place on object storage as the only one that writes there."""
    from stepwell.stores.remote import RemoteStore  # loads tensorstore

    store = RemoteStore(tier.options)
    opened.callback(store.close)
    opener = store.lock(LOCK_NAME)
    opener.acquire()
    opened.callback(opener.release)
    return store


def _open_peer(tier: PeerTier, run: str, opened: ExitStack) -> ObjectStore:
    from stepwell.peers import open_peer

    store = open_peer(tier, run)
    opened.callback(store.close)
    return store


def _run_record(config: Config, stores: Mapping[str, ObjectStore]) -> RunRecord:
    """Return the record a tier of the run has, or that its arena or its lives imply, or a new one.

    Raises
    ------
    IntegrityError
        The record is damaged and nothing else tells whose directory it is.
    """
    damaged: IntegrityError | None = None
    tiers = {tier.label: tier for tier in config.tiers}
    silent: set[str] = set()
    for label, store in stores.items():
        what = f"{store.url}/{RUN_RECORD}"
        try:
            return RunRecord.decode(wait_apart(store.fetch(RUN_RECORD)), what)
        except MissingObjectError:
            continue
        except TransientStoreError:
            if config.error_policy(tiers[label]) != "degrade":
                raise
            silent.add(label)
        except IntegrityError as error:
            if isinstance(error, FormatError) and error.newer:
                raise
            damaged = error
    run = _run_of_arena(config) or _run_of_lives(
        [store for label, store in stores.items() if label not in silent]
    )
    if damaged is not None:
        if run is None:
            raise damaged
        warnings.warn(f"stepwell: {damaged}; the run is known from what else is there", stacklevel=4)
    return RunRecord(run or secrets.token_hex(16), config.run, time.time())


def _run_of_arena(config: Config) -> str | None:
    """Return whose the arena is: it may live on where the directory is gone or was never reached."""
    if config.memory is None:
        return None
    try:
        with Arena.inspect(config.arena_directory(config.memory)) as arena:
            return arena.run
    except MissingObjectError:
        return None


def _run_of_lives(stores: Iterable[ObjectStore]) -> str | None:
    """Return the run that the newest whole incarnation record of a tier names."""

    async def run_in(store: ObjectStore) -> str | None:
        keys = [key async for key in store.list_prefix(INCARNATION_PREFIX) if key.endswith(".json")]
        for key in sorted(keys, reverse=True):
            try:
                return IncarnationRecord.decode(await store.fetch(key), f"{store.url}/{key}").run
            except (StoreError, IntegrityError):
                continue
        return None

    return next(filter(None, (wait_apart(run_in(store)) for store in stores)), None)


def _open_arena(directory: Path, run: str, *, fresh: bool) -> Arena:
    try:
        return Arena.open(directory, run=run) if fresh else open_arena(directory, run)
    except UsageError as error:
        if not fresh or type(error) is not UsageError:
            raise
        # An arena of another run lies where this one's belongs, and the caller begins anew.
        with Arena.inspect(directory) as stale:
            other = stale.run
        Arena.open(directory, run=other).remove()
        return Arena.open(directory, run=run)


def _plugin_store(tier: PluginTier) -> ObjectStore:
    """Make a third party's store.

    Raises
    ------
    ConfigError
        What its entry point names is not a store.
    """
    (entry,) = entry_points(group="stepwell.stores", name=tier.kind)
    factory = entry.load()
    made = factory.from_config(dict(tier.options))
    if not isinstance(made, ObjectStore):
        raise ConfigError(
            f"tier {tier.label!r}: {entry.value} made a {type(made).__name__}, not an ObjectStore"
        )
    return made


def _chunk_stages(config: Config) -> list[ChunkStage]:
    """Make the chunk stages of the configured pipeline, in order; lossy ones share one loop."""
    choices = _choices(config)
    loop = None if choices is None else Loop(choices)
    stages: list[ChunkStage] = []
    for stage in config.pipeline:
        if stage.name == "delta":
            told = stage.setting == "difference"
            stages.append(DifferenceStage(loop) if told else delta_stage(str(stage.setting)))
        elif stage.name == "quantize" and stage.setting != "none":
            quantize = Quantization.of(stage.setting)
            stages.append(Quantize(loop, eps=quantize.eps, block=quantize.block))
        elif stage.name == "sparsify" and stage.setting != "none":
            sparsify = Sparsity.of(stage.setting)
            stages.append(Sparsify(loop, rate=sparsify.rate, values=sparsify.values, eps=sparsify.eps))
        elif stage.name in ("capture", "quantize", "sparsify", "shard", "replicate", "commit"):
            continue  # nothing to do with chunks, or nothing to do
        else:
            (entry,) = entry_points(group="stepwell.stages", name=stage.name)
            made = cast("Callable[[object], object]", entry.load().from_config)(stage.setting)
            if not isinstance(made, ChunkStage):
                raise ConfigError(f"pipeline: {entry.value} made a {type(made).__name__}, not a chunk stage")
            stages.append(made)
    return [Derive(), *stages] if may_derive(stages) else stages


_KINDS = {
    "gradient": Kind.GRADIENT,
    "weight": Kind.WEIGHT,
    "momentum": Kind.MOMENT1,
    "variance": Kind.MOMENT2,
}


def _choices(config: Config) -> Choices | None:
    """Return what decides over the lossy stages; None where the pipeline has none."""
    settings = {stage.name: stage.setting for stage in config.pipeline}
    quantize = Quantization.of(settings.get("quantize", "none"))
    sparsify = Sparsity.of(settings.get("sparsify", "none"))
    difference = settings.get("delta") == "difference"
    if not (quantize.kinds or quantize.rules or sparsify.on or difference):
        return None
    # Gradients made sparse are sound only where the trainer trains on them: never chosen adaptively.
    sparse = {Kind.WEIGHT} if sparsify.adaptive else {Kind.WEIGHT, Kind.GRADIENT} if sparsify.on else set()
    rules = []
    for pattern, rule in (quantize.rules or {}).items():
        by_kind = dict.fromkeys(kinds_of_rule(rule), rule) if isinstance(rule, str) else rule
        rules.append(Rule(pattern, {_KINDS[kind]: treatment for kind, treatment in by_kind.items()}))
    return Choices(
        Policy(
            treatments={_KINDS[kind]: name for kind, name in quantize.kinds.items() if name != "none"},
            sparse=frozenset(sparse),
            small_elements=SMALL_ELEMENTS if quantize.small is None else quantize.small,
            difference=difference,
            rules=tuple(rules),
        )
    )


def _options(config: Config) -> SessionOptions:
    memory = config.memory
    return SessionOptions(
        capture=config.capture,
        save_every=config.save_every,
        base_every=config.base_every,
        log_budget=config.log_budget,
        stall_limit_s=config.stall_limit_s,
        skip=config.backpressure == "skip",
        on_lost_steps=config.on_lost_steps,
        inexact=config.inexact,
        chunk_bytes=config.chunk_bytes,
        budget_bytes=config.memory_budget_bytes,
        read_deadline_s=config.read_deadline_s,
        drain_deadline_s=config.drain_deadline_s,
        close_deadline_s=config.close_deadline_s,
        threads=config.threads,
        slots=memory.slots if memory is not None else 3,
        handle_sigterm=config.handle_sigterm,
    )
