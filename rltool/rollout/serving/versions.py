"""What this run may train on: its own published versions, and earlier attempts' up to the checkpoint it was resumed
from."""

from __future__ import annotations

from dataclasses import dataclass

from rltool.engines.weight_version import BadWeightVersion, Lineage, WeightVersion
from rltool.errors import RltoolError


@dataclass
class VersionBook:
    """published: training steps of the weights that the last sync gave out, None before the first; publishing: of the
    sync that is in progress, whose tokens may come back before it has ended everywhere."""

    lineage: Lineage
    published: int | None = None
    publishing: int | None = None

    def begin(self, step: int) -> WeightVersion:
        """A sync of the weights after `step` training steps begins."""
        self.publishing = step
        return self.lineage.version(step)

    def publish(self, step: int) -> None:
        """At least one engine serves them."""
        self.published, self.publishing = step, None

    def adapter(self) -> WeightVersion | None:
        """The version whose adapter new requests name; None: they are sampled with what engines hold. RltoolError where
        they must name one and there is none yet: the model alone is not the policy."""
        if not self.lineage.adapters:
            return None
        if self.published is None:
            raise RltoolError('weights.lora_sync = "adapter": no adapter is published that a request could name')
        return self.lineage.version(self.published)

    def refusal(self, version: str) -> str | None:
        """Either "foreign", "unpublished", or None: see Lineage.refusal."""
        newest = max((n for n in (self.published, self.publishing) if n is not None), default=-1)
        return self.lineage.refusal(version, published=newest)

    def is_behind(self, version: str, published: int) -> bool:
        """Whether a request that was sent when `published` was out came back with older tokens:
        its engine has missed a sync."""
        try:
            found = WeightVersion.parse(version)
        except BadWeightVersion:
            return False
        return found.attempt != self.lineage.attempt or found.number < published
