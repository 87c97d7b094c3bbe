"""The table of per-token and per-sample fields: each is declared once, here, and travels by its declaration.

From it follow how a sample holds the field, dumps and checkpointed buffers, the checks and the selection of a batch,
what goes to the ranks, how a micro-batch is cut and packed, and what the loss gets. A new field costs an entry here,
code that sets it (on a sample, a completion or the batch), and code that reads it.

The bodies of `LossFields` and `BatchFields` are the table. `LossFields` are also in algorithms.losses.LossTokens.
"""

from __future__ import annotations

import dataclasses
import math
from array import array
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, dataclass_transform

if TYPE_CHECKING:  # processes that have samples and nothing else, as those of rewards, do without torch
    from torch import Tensor

    from rltool.algorithms.batch import Ragged

CODES = {"B": "uint8", "h": "int16", "i": "int32", "q": "int64", "f": "float32", "d": "float64"}
"""array's type codes, which are numpy's characters too, and torch's names of the same types."""
LARGEST = {"uint8": 2**8 - 1, "int16": 2**15 - 1, "int32": 2**31 - 1, "int64": 2**63 - 1}


@dataclass(frozen=True)
class Column:
    """One sequence of numbers that a sample has. code: its array's type, None: a list of floats; wider: another type
    that the array may have, the same for all samples of a batch."""

    name: str
    code: str | None = None
    wider: str | None = None

    def empty(self) -> Any:
        return [] if self.code is None else cast(Any, array)(self.code)


@dataclass(frozen=True)
class Held:
    """How a sample holds a field: one number or a row of them a token, token after token, or of a ragged field its
    numbers; empty: the sample has none.

    what: the field in messages. code, wider: as in Column.
    over: the tokens that have a value: those of the response, or of prompt and response; the others get Field.fill. Of
        a ragged field "prompt": it is there before the response, and stays without it.
    comes: "appended": each completion brings the values of its own tokens, and the environment's tokens get Field.fill;
        "newest": each completion brings those of all tokens so far; "later": set once the response is there.
    counted: rows differ in length: NAME_ids has the numbers and NAME_counts how many each token has. In a batch they
        are filled up to the longest. Rows of sampled tokens contain the token.
    """

    what: str
    code: str | None = None
    wider: str | None = None
    over: Literal["response", "sequence", "prompt"] = "response"
    comes: Literal["appended", "newest", "later"] = "later"
    counted: bool = False

    def __post_init__(self) -> None:
        if self.comes != "later" and (self.comes == "newest") != (self.over == "sequence"):
            raise ValueError(f"{self.what}: what is appended is of the response, what is the newest of the sequence")

    @property
    def outlives(self) -> bool:
        """Whether a sample that forgets its response keeps it."""
        return self.over == "prompt"

    def columns(self, name: str) -> tuple[Column, ...]:
        if self.counted:
            return Column(f"{name}_ids", self.code, self.wider), Column(f"{name}_counts", "i")
        return (Column(name, self.code, self.wider),)


@dataclass(frozen=True)
class Field:
    """of: one value, or one row of them, a sample or a token; "ragged": any number of values a sample, whatever its
        tokens (algorithms.batch.Ragged).
    dtypes: torch's names of those that it may have.
    row: what a row counts, "": no row; fields with equal `row` have rows of one length.
    fill: the value where there is none, None: the dtype's largest. held: None: samples do not have it.
    cut: where a rank needs it. "batch": beside the micro-batch, on the CPU, whole on all context-parallel ranks;
        "input": at the tokens that the rank's part of the model reads, packed and cut by context parallelism as they
        are; "target": at the loss tokens whose states the rank holds. "driver": nowhere.
    wide: the driver does not read it, and has references in the values' place (algorithms.batch.Wide).
    at: of a ragged field that is cut at tokens: the field that is not 0 at the tokens which its values belong to, one
        each, in order. Ranks have `fill` at the others.
    """

    of: Literal["sample", "token", "ragged"]
    dtypes: tuple[str, ...] = ("float32",)
    row: str = ""
    fill: float | None = 0.0
    held: Held | None = None
    cut: Literal["batch", "input", "target", "driver"] = "batch"
    wide: bool = False
    at: str = ""

    def __post_init__(self) -> None:
        if (self.of == "ragged" and self.cut in ("input", "target")) != bool(self.at):
            raise ValueError("ragged fields, and no others, need `at` to be cut at tokens")
        if self.wide and (self.cut == "driver" or self.of == "sample"):
            raise ValueError("wide are fields of tokens, and ragged ones, that ranks read and the driver does not")

    def dtype_of(self, found: Any) -> str:
        """The one to expect where `found` was found."""
        name = str(found).removeprefix("torch.")
        return name if name in self.dtypes else self.dtypes[0]

    def filler(self, dtype: Any) -> float:
        return LARGEST[str(dtype).removeprefix("torch.")] if self.fill is None else self.fill


KEY = "rltool field"


def token(*dtypes: str, required: bool = False, **options: Any) -> Any:
    """A `Field` of tokens, float32 where no dtype is given, as the value of a dataclass's attribute."""
    return _entry(Field("token", dtypes or ("float32",), **options), required=required)


def sample(*dtypes: str, required: bool = False, **options: Any) -> Any:
    """Likewise of samples."""
    return _entry(Field("sample", dtypes or ("float32",), **options), required=required)


def ragged(*dtypes: str, **options: Any) -> Any:
    """Likewise of samples with any number of values."""
    return _entry(Field("ragged", dtypes or ("float32",), **options), required=False)


def _entry(field: Field, *, required: bool) -> Any:
    return dataclasses.field(default=MISSING if required else None, metadata={KEY: field})  # type: ignore[arg-type]


class Record:
    """A dataclass that may get fields after its class was made. Takes them by position or name."""

    def __init__(self, *values: Any, **named: Any) -> None:
        items = dataclasses.fields(self)  # type: ignore[arg-type]
        given = dict(zip((item.name for item in items), values, strict=False))
        unknown = [*(given.keys() & named.keys()), *(named.keys() - {item.name for item in items})]
        unknown += map(repr, values[len(items) :])
        if unknown:
            raise TypeError(f"{type(self).__name__}: unknown, or given twice: {', '.join(unknown)}")
        given |= named
        missing: list[str] = []
        for item in items:
            if item.name not in given and item.default_factory is not MISSING:
                given[item.name] = item.default_factory()
            elif item.name not in given:
                missing += [item.name] * (item.default is MISSING)
                given[item.name] = item.default
        if missing:
            raise TypeError(f"{type(self).__name__} lacks {', '.join(missing)}")
        vars(self).update(given)
        self.__post_init__()

    def __post_init__(self) -> None:
        pass

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


T = TypeVar("T")


@dataclass_transform(field_specifiers=(dataclasses.field,))
def record(*, frozen: bool = False, kw_only: bool = False) -> Callable[[type[T]], type[T]]:
    """A subclass of Record as a dataclass."""

    def made(cls: type[T]) -> type[T]:
        return dataclass(init=False, repr=False, eq=False, frozen=frozen, kw_only=kw_only)(cls)

    return made


@record(frozen=True, kw_only=True)
class LossFields(Record):
    """[T] of the batch's tokens or [N] of its samples; in LossTokens [R] each, at the loss tokens. Float32 and None
    where it was not made, unless noted."""

    old_logprobs: Tensor | None = token()
    """Trainer's log-probability before the first optimizer step."""
    advantages: Tensor | None = token()
    """0 where loss_mask is 0. None for supervised data."""
    rollout_logprobs: Tensor | None = token()
    """Behaviour log-probability by the engine, 0 where the policy did not sample the token. None for supervised
    data."""
    ref_logprobs: Tensor | None = token()
    """The reference model's."""
    teacher_logprobs: Tensor | None = token(held=Held("log-probabilities of the teacher"))
    """The teacher's; of one on engines 0 where the policy did not sample the token."""
    teacher_topk_logprobs: Tensor | None = token(
        row="teacher's tokens", fill=-math.inf, wide=True, held=Held("most probable tokens of the teacher", "f")
    )
    """[T, K], log-probabilities of teacher_topk_ids; any values where loss_mask is 0. None unless the loss has a KL
    over them."""
    kl_cov_coefs: Tensor | None = token()
    """Weight of |log p - log p_old| in each token's loss (token_selection.py); None: 0."""
    kl_coefs: Tensor | None = sample()
    """algorithm.kl.coef as it is in this training step (controllers.py); None: as configured."""
    entropy_coefs: Tensor | None = sample()
    """Likewise of algorithm.entropy.coef."""


@record(frozen=True, kw_only=True)
class BatchFields(LossFields):
    """T tokens of N samples, back to back. [T] float32 and None where it was not made, unless noted."""

    tokens: Tensor = token("int64", required=True)
    """Int64, prompt then response of each sample."""
    lengths: Tensor = sample("int64", required=True)
    """[N] int64, tokens per sample."""
    loss_mask: Tensor = token(required=True)
    """1 where the token has a loss: sampled by the policy and not masked, or a target of supervised training."""
    rewards: Tensor = sample(required=True, cut="driver")
    """[N]."""
    group_ids: Tensor = sample("int64", required=True, cut="driver")
    """[N] int64, equal for samples of one prompt."""
    loss_weights: Tensor = token(required=True)
    """Weight of each token's loss, so that "weighted sum / loss tokens of the *global* batch" is the configured
    reduction whatever the split into ranks and micro-batches (algorithms/shaping.py)."""
    baselines: Tensor | None = sample(cut="driver")
    """[N], reward of a greedy response to each sample's prompt; None unless one was sampled."""
    reward_parts: Tensor | None = sample(row="reward.parts", cut="driver")
    """[N, P], what each of [[reward.parts]] gave the sample, 0 where it did not score it; None unless the advantages
    are made of them."""
    part_weights: Tensor | None = sample(row="reward.parts", cut="driver")
    """[N, P], its weight; 0 likewise."""
    episode_ids: Tensor | None = sample("int64", cut="driver")
    """[N] int64, equal for samples of one episode of an agent, which has one reward and counts once in its group's
    baseline; None: each sample is an episode."""
    turns: Tensor | None = token("int64", cut="driver")
    """Int64, number of the turn within its episode in which the policy sampled the token, over all samples of the
    episode in order of time; -1 where it did not sample it. None: each sample is one turn; None again once there are
    advantages."""
    turn_rewards: Tensor | None = token(cut="driver")
    """At the last token of a turn what the turn has earned, as a part of `rewards`, 0 elsewhere; None where turns
    is."""
    response_mask: Tensor | None = token(cut="driver")
    """1 where the policy sampled the token, with a loss or without (truncated, removed or stale tokens may be masked);
    None: the same as loss_mask."""
    token_versions: Tensor | None = token("int64", cut="driver")
    """Int64, training steps that the weights had which sampled the token, -1 where loss_mask is 0; None where unknown
    (recorded by an earlier release, synthetic) and for supervised data."""
    sampling_mask: Tensor | None = token(
        "int32", row="those that top-p and top-k left to choose from", fill=-1, cut="target", wide=True,
        held=Held("sampling masks", "i", comes="appended", counted=True),
    )  # fmt: skip
    """[T, K] int32, the tokens that top-p and top-k left to choose from in each token's place, -1 beyond their number;
    all -1 where the policy did not sample the token. Log-probabilities of the model are then those of these tokens
    alone. None where sampling was not truncated."""
    teacher_topk_ids: Tensor | None = token(
        "int32", row="teacher's tokens", fill=-1, cut="target", wide=True,
        held=Held("most probable tokens of the teacher", "i"),
    )  # fmt: skip
    """[T, K] int32, the teacher's K most probable tokens at each position, most probable first."""
    routed_experts: Tensor | None = token(
        "uint8", "int16", row="layers * experts a token", fill=None, cut="input", wide=True,
        held=Held("experts that the engine's router chose", "B", wider="h", over="sequence", comes="newest"),
    )  # fmt: skip
    """[T, layers * experts a token] uint8 or int16, the experts that the engine's router chose for each token of prompt
    and response, layer by layer; the dtype's largest value where it chose none: in layers without experts, and for what
    was never forwarded, the last token, and what an environment appended behind the last reply. Those of a sample's
    newest request, which has computed everything before its own tokens, after a weight sync with the newer weights: of
    one forward pass, by the weights that are closest to those in training. None unless they are replayed."""
    picture_places: Ragged | None = ragged("int64", held=Held("places of pictures", "q", over="prompt"))
    """Ragged int64, four numbers for each picture of the sample, in order (models.pictures.Place). None: no sample has
    a picture."""
    picture_files: Ragged | None = ragged("uint8", wide=True)
    """Ragged uint8, the files of a sample's pictures, one after the other."""
    token_rewards: Tensor | None = token(cut="driver")
    """Rewards of single tokens beside `rewards`: the KL penalty; 0 where the policy did not sample the token."""
    target_ids: Tensor | None = token("int64")
    """Int64, whose log-probabilities are wanted in the place of the tokens': those that a served model's client names.
    None: the tokens themselves."""
    old_entropies: Tensor | None = token(cut="driver")
    """Entropy of the old policy's distribution at the token, in nats; None unless needed."""
    is_weights: Tensor | None = token()
    """Factor of each token's policy loss (algorithms/corrections.py, token_selection.py); None: 1."""
    values: Tensor | None = token()
    """Critic's value of the state in which the token was chosen, before its first update on this rollout; 0 where
    loss_mask is 0, None without a critic."""
    value_targets: Tensor | None = token()
    """What the critic is trained towards (algorithms/gae.py); None without a critic."""


@cache
def _table(cls: Any) -> dict[str, Field]:
    return {item.name: item.metadata[KEY] for item in dataclasses.fields(cls) if KEY in item.metadata}


def fields_of(records: Any) -> Mapping[str, Field]:
    """Name -> declaration of what a record, or a class of records, has of the table."""
    return _table(records if isinstance(records, type) else type(records))


@cache
def held_fields() -> Mapping[str, tuple[Field, Held]]:
    """Those that samples have."""
    return {name: (field, field.held) for name, field in fields_of(BatchFields).items() if field.held is not None}


@cache
def sample_columns() -> Mapping[str, Column]:
    """What samples have of the table, by the name of the attribute."""
    return {column.name: column for name, (_, held) in held_fields().items() for column in held.columns(name)}


_HOLDERS: list[type] = []


def holds_columns(cls: type[T]) -> type[T]:
    """A class of samples: it gets a dataclass field for each column, behind its own."""
    _HOLDERS.append(cls)
    for column in sample_columns().values():
        _add(cls, column.name, "array[Any] | list[float]", dataclasses.field(default_factory=column.empty))
    return cls


def declare(name: str, entry: Any, *, in_loss: bool = False) -> None:
    """Another field, in all records of this process: `entry` as in the table. Samples that exist do not get it.
    ValueError for a name that is taken."""
    field: Field = entry.metadata[KEY]
    if name in fields_of(BatchFields):
        raise ValueError(f"the table has a field {name} already")
    if field.of == "ragged" and in_loss:
        raise ValueError(f"{name} is ragged by sample: the loss has single tokens")
    if field.at and fields_of(BatchFields).get(field.at, field).of != "token":
        raise ValueError(f"{name} is at the tokens of {field.at}, and no field of tokens has this name")
    _add(LossFields if in_loss else BatchFields, name, "Tensor | None", entry)
    forget_cached()
    for column in field.held.columns(name) if field.held else ():
        for cls in _HOLDERS:
            _add(cls, column.name, "array[Any] | list[float]", dataclasses.field(default_factory=column.empty))


def forget_cached() -> None:
    """The table was changed."""
    for cached in (_table, held_fields, sample_columns):
        cached.cache_clear()


def _add(cls: type, name: str, annotation: str, entry: Any) -> None:
    [known] = dataclasses.fields(dataclasses.make_dataclass("_", [(name, annotation, entry)]))
    cast(Any, cls).__dataclass_fields__[name] = known
    if known.default is not MISSING:
        setattr(cls, name, known.default)
    for each in cls.__subclasses__():
        _add(each, name, annotation, entry)
