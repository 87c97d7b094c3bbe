"""Methods that rltool adds to vLLM's workers (`--worker-extension-cls`): the way out of an update that no one will
finish, and weights that are fetched beside generation.

vLLM's worker refuses to start or to shut down while an update is active, and a failed finish leaves it active for ever;
a trainer that died between two buckets would leave the engine useless.

And how the server asks all of its workers. AsyncLLM.collective_rpc answers for the first of several data-parallel
replicas alone, and where a worker raises, the replies of the workers behind it stay in their queues (get_response in
v1/executor/multiproc_executor.py of 0.32): each later answer of theirs is the one before it. So our methods answer with
a text in place of raising, and all are heard; vLLM's own weight methods are called through one of ours.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from rltool.engines.plugin.patches import experts_with_adapters, keep_block_scales

logger = logging.getLogger(__name__)

FP8_FORMAT = "rltool_fp8"
"""vLLM's --load-format for a checkpoint in 16 or 32 bits whose linear layers are quantised as they are read."""
FP8_VARIABLE = "RLTOOL_FP8"
"""With it the workers know that format."""

if os.environ.get(FP8_VARIABLE):
    from vllm.model_executor.model_loader import register_model_loader

    from rltool.engines.plugin.reload import Fp8Loader

    register_model_loader(FP8_FORMAT)(Fp8Loader)

keep_block_scales()  # before the model is built
experts_with_adapters()


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
        self, version: str, seconds: float, source: str | dict[str, Any], place: dict[str, Any] | None = None
    ) -> str:
        """Begin to get `version` in the background, from the store of this address, or as it is announced; with place
        (rltool.engines.plugin.adapters.place_for) it is an adapter. Returns why it cannot, or ""."""
        engine = self.weight_transfer_engine
        if not hasattr(engine, "prefetch"):
            return "this engine's weight backend is not rltool's: start it with `rltool serve-engines`"

        def begin() -> None:
            if place is None or engine.prefetcher.is_busy:
                engine.prefetch(version, seconds, source)
                return
            from rltool.engines.plugin.adapters import Placing, drop_unnamed
            from rltool.engines.plugin.loading import WeightUpdateError

            manager = getattr(self.model_runner, "lora_manager", None)
            if manager is None:
                raise WeightUpdateError("adapters are not enabled: start the server with --enable-lora")
            if engine.placing is not None:
                engine.placing.give_up()
            drop_unnamed(manager, place["named"])
            engine.placing = Placing(manager, place)
            engine.prefetch(version, seconds, source, engine.placing)

        return _failure_of(begin)

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

    def rltool_drop_adapter(self, lora_id: int) -> str:
        """Returns why it cannot, or ""."""
        return _failure_of(lambda: self.model_runner.lora_manager.remove_adapter(lora_id))

    def rltool_adapter_digests(self, lora_id: int) -> tuple[dict[str, str], str]:
        """(its digests, why there are none or "")."""
        from rltool.engines.plugin.adapters import digests

        found: dict[str, str] = {}
        failure = _failure_of(lambda: found.update(digests(self.model_runner.lora_manager, lora_id)))
        return found, failure

    def rltool_prefetched(self, version: str) -> tuple[bool, str]:
        """(it has come, or never will; why it will not, or ""). An adapter that has come can be named by requests."""
        found: list[bool] = []

        def look() -> None:
            prefetcher = self.weight_transfer_engine.prefetcher
            found.append(prefetcher.fetched(version))
            if found[0] and (placing := prefetcher.prepared(version)) is not None:
                placing.register()

        failure = _failure_of(look)
        return bool(failure) or found[0], failure


def _failure_of(act: Callable[[], object]) -> str:
    """As text."""
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


WEIGHT_METHODS = frozenset(
    {
        "init_weight_transfer_engine",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
        "shutdown_weight_transfer_engine",
    }
)
"""Of vLLM's workers. Each is a route of vllm/entrypoints/rl/online as well."""
WEIGHT_ROUTES = frozenset(f"/{method}" for method in WEIGHT_METHODS)


async def ask_workers(engine_client: Any, method: str, *args: Any) -> list[Any]:
    """The answer of every worker of every replica. engine_client: vLLM's AsyncLLM."""
    ask_all = getattr(getattr(engine_client, "engine_core", None), "call_utility_all_async", None)
    if ask_all is None:  # another vLLM
        return await engine_client.collective_rpc(method, args=args)
    replicas = await ask_all("collective_rpc", method, None, args, None)
    return [answer for answers in replicas for answer in answers]


def failure_in(answers: list[str]) -> str:
    """What workers answered that "" is not; "": all is well."""
    return "; ".join(sorted({answer for answer in answers if answer}))


def hear_all_workers(engine_client: Any) -> None:
    """From now on WEIGHT_METHODS that a worker refuses raise RuntimeError with all of their errors, when all have
    answered. Idempotent. engine_client: vLLM's AsyncLLM, whose weight methods go through its collective_rpc."""
    if "collective_rpc" in vars(engine_client):
        return
    ask_others = engine_client.collective_rpc

    async def collective_rpc(
        method: Any, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if method not in WEIGHT_METHODS:
            return await ask_others(method, timeout, args, kwargs)
        answers = await ask_workers(engine_client, "rltool_call", method, args, kwargs or {})
        if failure := failure_in(answers):
            raise RuntimeError(failure)
        return [None] * len(answers)

    engine_client.collective_rpc = collective_rpc
