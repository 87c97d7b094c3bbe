"""Methods that rltool adds to vLLM's workers (`--worker-extension-cls`): the way out of an update that no one will
finish, and weights that are fetched beside generation.

vLLM's worker refuses to start or to shut down while an update is active, and a failed finish leaves it active for ever;
a trainer that died between two buckets would leave the engine useless.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rltool.engines.plugin.prefetch import Buckets

logger = logging.getLogger(__name__)


class WeightUpdateRecovery:
    """Mixed into vllm.v1.worker.gpu_worker.Worker, whose attributes it uses."""

    # Declared and not assigned: vLLM refuses an extension with an attribute that its worker has.
    weight_transfer_engine: Any
    _weight_update_active: bool
    model_runner: Any
    vllm_config: Any
    start_weight_update: Callable[[], None]
    update_weights: Callable[[dict[str, Any]], None]
    finish_weight_update: Callable[[], None]

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

    def rltool_prefetch(
        self, version: str, seconds: float, source: str | dict[str, Any], peft: dict[str, Any] | None = None
    ) -> str:
        """Begin to get `version` in the background, from the store of this address, or as it is announced; with peft it
        is an adapter. Returns why it cannot, or ""."""
        engine = self.weight_transfer_engine
        if not hasattr(engine, "prefetch"):
            return "this engine's weight backend is not rltool's: start it with `rltool serve-engines`"
        prepare = None if peft is None else partial(self._rltool_adapter, peft)
        return _failure_of(lambda: engine.prefetch(version, seconds, source, prepare))

    def _rltool_adapter(self, peft: dict[str, Any], buckets: Buckets) -> Any:
        from rltool.engines.plugin.adapters import build

        return build(self.model_runner.lora_manager, buckets, peft)

    def rltool_update_weights(self, update_info: dict[str, Any]) -> str:
        """An update up to its finish. Returns why it failed, or ""."""

        def update() -> None:
            self.rltool_end_unfinished_update()
            self.start_weight_update()
            self.update_weights(update_info)

        return _failure_of(update)

    def rltool_reload_checkpoint(self) -> str:
        """The weights that the server started with, again. Returns why it failed, or ""."""

        def load() -> None:
            from rltool.engines.plugin.loading import missing_error
            from rltool.engines.plugin.reload import reload_checkpoint

            self.rltool_end_unfinished_update()
            if missing := reload_checkpoint(self.model_runner.get_model(), self.vllm_config):
                raise missing_error(missing)
            self.model_runner.reset_encoder_cache()
            self.model_runner.reset_mm_cache()

        return _failure_of(load)

    def rltool_call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """One of this worker's own methods. Returns why it failed, or ""."""
        return _failure_of(lambda: getattr(self, method)(*args, **kwargs))

    def rltool_finish_update(self) -> str:
        """Returns why it failed, or ""."""
        return _failure_of(self.finish_weight_update)

    def rltool_take_adapter(self, version: str, lora_id: int, peft: dict[str, Any]) -> str:
        """What was fetched as `version` becomes the adapter of this id. Returns why it cannot, or ""."""

        def take_it() -> None:
            from rltool.engines.plugin.adapters import take

            prefetcher = self.weight_transfer_engine.prefetcher
            buckets = prefetcher.buckets(version)
            lora = prefetcher.prepared(version)
            take(self.model_runner.lora_manager, lora or self._rltool_adapter(peft, buckets), lora_id)
            prefetcher.forget()

        return _failure_of(take_it)

    def rltool_drop_adapter(self, lora_id: int) -> str:
        """Returns why it cannot, or ""."""
        return _failure_of(lambda: self.model_runner.lora_manager.remove_adapter(lora_id))

    def rltool_prefetched(self, version: str) -> tuple[bool, str]:
        """(it has come, or never will; why it will not, or "")."""
        found: list[bool] = []
        failure = _failure_of(lambda: found.append(self.weight_transfer_engine.prefetcher.fetched(version)))
        return bool(failure) or found[0], failure


def _failure_of(act: Callable[[], object]) -> str:
    """As text: see rltool.engines.plugin.workers."""
    from rltool.engines.plugin.loading import WeightUpdateError
    from rltool.engines.plugin.prefetch import NotFetched

    try:
        act()
    except (NotFetched, WeightUpdateError) as error:
        return str(error)
    except Exception as error:
        logger.exception("a question of the trainer's failed")
        return f"{type(error).__name__}: {error}"
    return ""
