"""The `pipeline` list of a configuration: which stages, in which order, with which settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, model_validator

from stepwell.config.faults import did_you_mean, plugin_names
from stepwell.config.lossy import QUANTIZE, SPARSIFY, check_quantize, check_sparsify, check_together
from stepwell.config.presets import PRESETS

__all__ = ["DEFAULT_PIPELINE", "StageConfig", "check_order"]


@dataclass(frozen=True, slots=True)
class _Builtin:
    """A stage of ours: its settings (the first is the default) and whether it may be left out."""

    settings: tuple[str, ...] = ()
    required: bool = False


BUILTIN: Mapping[str, _Builtin] = {
    "capture": _Builtin(("gradient", "state"), required=True),
    "delta": _Builtin(("none", "ordered_delta", "predictive", "difference")),
    "quantize": _Builtin(QUANTIZE),
    "sparsify": _Builtin(SPARSIFY),
    "shard": _Builtin(required=True),
    "replicate": _Builtin(required=True),
    "commit": _Builtin(required=True),
}
"""In the order in which they must come."""


class StageConfig(BaseModel):
    """One stage: written as its name, or as a mapping of its name to its setting.

    Attributes
    ----------
    name : str
        A stage of ours, or one from the entry-point group ``stepwell.stages``.
    setting : object
        Checked here for our own stages; handed to ``from_config`` of a third party's class.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    setting: object = None

    @model_validator(mode="before")
    @classmethod
    def _from_short_form(cls, value: object) -> object:
        if isinstance(value, StageConfig):
            return value
        if isinstance(value, str):
            name, setting = value, None
        elif isinstance(value, Mapping) and set(value) == {"name", "setting"}:
            name, setting = str(value["name"]), value["setting"]
        elif isinstance(value, Mapping) and len(value) == 1:
            name, setting = next((str(key), item) for key, item in value.items())
        else:
            raise ValueError("a stage is a name, or a mapping of one name to its setting")
        return {"name": name, "setting": _checked_setting(name, setting)}

    @property
    def written(self) -> object:
        """The short form a person writes."""
        return self.name if self.setting is None else {self.name: self.setting}


def _checked_setting(name: str, setting: object) -> object:
    """Return the setting of a stage, the default filled in.

    Raises
    ------
    ValueError
        No such stage, or one of ours does not take that setting.
    """
    third_party = plugin_names("stepwell.stages")
    if name not in BUILTIN and name not in third_party:
        known = [*BUILTIN, *sorted(third_party)]
        hint = did_you_mean(name, known)
        raise ValueError(f'no stage is called "{name}" (there are {", ".join(known)}){hint}')
    if name not in BUILTIN:
        return setting
    allowed = BUILTIN[name].settings
    if not allowed:
        if setting is not None:
            raise ValueError(f'the stage "{name}" takes no setting, got {setting!r}')
        return None
    if setting is None:
        return allowed[0]
    if name == "quantize":
        return check_quantize(setting)
    if name == "sparsify":
        return check_sparsify(setting)
    if setting not in allowed:
        hint = did_you_mean(str(setting), allowed)
        raise ValueError(f'"{name}" takes {" or ".join(allowed)}, not {setting!r}{hint}')
    return setting


def check_order(stages: Sequence[StageConfig]) -> None:
    """Check that the required stages are there, none twice, each in its place.

    Raises
    ------
    ValueError
        With what is wrong and the order as it should be.
    """
    names = [stage.name for stage in stages]
    right = ", ".join(BUILTIN)
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f'the stage "{name}" is there twice')
    missing = [name for name, stage in BUILTIN.items() if stage.required and name not in names]
    if missing:
        raise ValueError(f"missing: {', '.join(missing)}; the order is {right}")
    ours = [name for name in names if name in BUILTIN]
    if ours != [name for name in BUILTIN if name in ours]:
        raise ValueError(f"wrong order: {', '.join(ours)}; it must be {right}")
    if names[0] != "capture" or names[-3:] != ["shard", "replicate", "commit"]:
        raise ValueError("stages of third parties come after capture and before shard, replicate, commit")
    settings = {stage.name: stage.setting for stage in stages}
    if settings.get("delta", "none") != "none" and settings["capture"] != "state":
        raise ValueError(
            f"delta: {settings['delta']} is a difference of states and needs capture: state; "
            "with capture: gradient leave delta out"
        )
    check_together(settings)


DEFAULT_PIPELINE: tuple[StageConfig, ...] = tuple(
    StageConfig.model_validate(stage) for stage in PRESETS["exact"]
)
"""The preset ``exact``."""
