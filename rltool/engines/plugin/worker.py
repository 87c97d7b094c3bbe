"""A method that rltool adds to vLLM's workers (`--worker-extension-cls`): the way out of an update that nobody will
finish.

vLLM's worker refuses to start or to shut down while an update is active, and a failed finish leaves it active for ever;
a trainer that died between two buckets would leave the engine useless.
"""

from __future__ import annotations

from typing import Any


class WeightUpdateRecovery:
    """Mixed into vllm.v1.worker.gpu_worker.Worker, whose attributes it uses."""

    # Declared and not assigned: vLLM refuses an extension with an attribute that its worker has.
    weight_transfer_engine: Any
    _weight_update_active: bool

    def rltool_end_unfinished_update(self) -> bool:
        """End the update that is active, if one is. True if the weights may be a mixture of old and new since then."""
        engine = self.weight_transfer_engine
        if engine is None:
            return False
        was_active, self._weight_update_active = self._weight_update_active, False
        if hasattr(engine, "abandon"):
            engine.abandon()
        elif was_active:  # one of vLLM's own backends
            from rltool.engines.plugin.reload import abandon_reload

            abandon_reload(engine.model)
        engine.reset_weight_update_target()
        return getattr(engine, "changed", was_active)
