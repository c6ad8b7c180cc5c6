"""All targets by name: they share the suite's time and the command line."""

from __future__ import annotations

from collections.abc import Mapping

from decoder_targets import DECODERS
from document_targets import DOCUMENTS
from fuzzing import Target
from pack_targets import PACKS
from reference_targets import REFERENCES

READERS: Mapping[str, Target] = {**PACKS, **DOCUMENTS, **REFERENCES}
TARGETS: Mapping[str, Target] = {**DECODERS, **READERS}
