"""Says where rows come from, and what decides their tokens: sections `source` and `tokenizer`, and `TextSpec`."""

from __future__ import annotations

import re
from datetime import date as Day
from typing import Annotated, Any, Literal

from pydantic import Field, PlainSerializer, WithJsonSchema, field_validator, model_validator

from raysvc.job.carried import RESERVED, CarriedColumn
from raysvc.job.section import FUNCTION, PositiveInt, Section

MediaKind = Literal["image", "audio", "video"]
Format = Literal[
    "auto",
    "chat",
    "alpaca",
    "question_answer",
    "prompt_completion",
    "text",
    "preference",
    "kto",
    "stepwise",
    "pretokenized",
    "prompt",
]
PAIRED = ("preference", "kto")  # formats whose rows give two sequences that stay together
TrainOn = Literal[
    "last_assistant_message",
    "all_assistant_messages",
    "each_assistant_turn",
    "completion",
    "all_tokens",
    "message_weight",
]
TrainEnd = Literal["template", "append"]
Truncation = Literal["error", "drop", "keep_start", "keep_end_turns"]


class MediaConfig(Section):
    """Media of rows: which kinds there may be, and where they may lie."""

    kinds: bool | tuple[MediaKind, ...] | None = Field(
        default=None, description="As `source.media` itself, where that is no section."
    )
    allow: tuple[str, ...] = Field(
        default=(),
        description="Where media may lie beside the folder of the row's file: [images.example.com, s3://bucket/prefix, /data/images].",
    )

    @field_validator("allow")
    @classmethod
    def _known_places(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        from raysvc.media.reference import checked_allow

        return checked_allow(value)


def _is_dataset(value: object) -> bool:
    """Returns whether it is a `ray.data.Dataset`; nobody has one who has not imported Ray."""
    return type(value).__module__.startswith("ray.data") and hasattr(value, "map_batches")


def _ray_name(value: Any) -> str:
    return value if isinstance(value, str) else "a Ray Dataset"


_RayDataset = Annotated[
    Any,
    PlainSerializer(_ray_name, when_used="json-unless-none"),
    WithJsonSchema({"anyOf": [{"type": "string", "pattern": FUNCTION}, {"type": "null"}]}),
]


class SourceConfig(Section):
    """Rows come from files (`path`), a `datasets` name or folder (`dataset`), or a Ray Dataset (`ray`)."""

    path: tuple[str, ...] = Field(default=(), description="Files, globs or folders; any fsspec URL.")
    dataset: str | None = Field(default=None, description="A `datasets` hub name or a `save_to_disk` folder.")
    ray: _RayDataset = Field(
        default=None,
        description="package.module:function of the job's working directory, which returns a Ray Dataset; in Python also the Dataset.",
    )
    args: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments of the function of ray."
    )
    version: str | None = Field(
        default=None,
        description="Names the rows of ray in place of a digest of them, like the snapshot id of a table.",
    )
    subset: str | None = Field(default=None, description="Configuration name of the dataset.")
    stream: bool = Field(
        default=False,
        description="Read the files of a `datasets` name by their addresses, slice by slice, without a download.",
    )
    follow: bool = Field(
        default=False,
        description="The files grow: what appears later is trained after what was there; see docs/howto/follow.md.",
    )
    revision: str | None = Field(default=None, description="Commit, tag or branch of the dataset.")
    split: str | None = Field(default=None, description='Split with an optional slice, like "train[:10%]".')
    format: Format = Field(
        default="auto", description="What a row holds; `auto` looks at the first rows' columns."
    )
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="Our name -> your column, e.g. {messages: talk}; role and content: keys of a message.",
    )
    roles: dict[str, str] = Field(
        default_factory=dict, description="Your role -> ours, e.g. {narrator: system}, before the usual ones."
    )
    ignore: tuple[str, ...] = Field(
        default=(),
        description="Columns to ignore although they would be refused, because they have no meaning in this job: [label].",
    )
    drop_nulls: bool = Field(
        default=False,
        description="Read a null in an object of JSON as absent, as in a table: for rows that `Dataset.to_json` filled up with nulls.",
    )
    carry: dict[str, CarriedColumn] = Field(
        default_factory=dict,
        description="Columns that travel with their row to the worker: [domain, id], or name -> what it holds.",
    )
    media: bool | tuple[MediaKind, ...] | MediaConfig | None = Field(
        default=None,
        description="Whether rows may have media, or the kinds that they may have: [image, video]; None: as the first row shows. {allow: [...]}: where they may lie.",
    )
    storage_options: dict[str, Any] = Field(default_factory=dict, repr=False, description="Passed to fsspec.")

    @property
    def media_kinds(self) -> bool | tuple[MediaKind, ...] | None:
        """Returns whether rows may have media, or which; None: as the first row shows."""
        return self.media.kinds if isinstance(self.media, MediaConfig) else self.media

    @property
    def media_allow(self) -> tuple[str, ...]:
        """The places where media may lie beside the folder of the row's file."""
        return self.media.allow if isinstance(self.media, MediaConfig) else ()

    @property
    def names(self) -> tuple[str, ...]:
        """Returns what it is called: its paths, or the one name of a dataset."""
        return self.path or (str(self.dataset if self.ray is None else _ray_name(self.ray)),)

    @model_validator(mode="before")
    @classmethod
    def _bare_dataset(cls, value: Any) -> Any:
        return {"ray": value} if _is_dataset(value) else value

    @field_validator("ray")
    @classmethod
    def _function_or_dataset(cls, value: Any) -> Any:
        named = isinstance(value, str) and re.match(FUNCTION, value)
        if value is not None and not named and not _is_dataset(value):
            raise ValueError("should be package.module:function, or a ray.data.Dataset")
        return value

    @field_validator("path", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        if not isinstance(value, str | list | tuple):
            raise ValueError("should be a path or a list of paths")
        return (value,) if isinstance(value, str) else value

    @field_validator("carry", mode="before")
    @classmethod
    def _bare_names(cls, value: object) -> object:
        if isinstance(value, str):
            raise ValueError(f"give a list, [{value}], or name -> what it holds")
        return {name: {} for name in value} if isinstance(value, list | tuple) else value

    @field_validator("carry")
    @classmethod
    def _free_names(cls, value: dict[str, CarriedColumn]) -> dict[str, CarriedColumn]:
        if taken := sorted(RESERVED & value.keys()):
            raise ValueError(f"{taken[0]!r} is a name that raysvc uses; rename the column in the source")
        return value

    @model_validator(mode="after")
    def _exactly_one(self) -> SourceConfig:
        if bool(self.path) + (self.dataset is not None) + (self.ray is not None) != 1:
            raise ValueError("give exactly one of `path`, `dataset` and `ray`")
        if self.version is not None and self.ray is None:
            raise ValueError("version is for ray; files and datasets are named by their content")
        if self.args and not isinstance(self.ray, str):
            raise ValueError("args are those of the function that ray names")
        if self.ray is not None and (self.subset or self.revision or self.split):
            raise ValueError(
                "subset, revision and split are of a `datasets` name; select rows in the Ray Dataset"
            )
        if self.stream and self.dataset is None:
            raise ValueError("stream is for a `datasets` name; files of `path` are read by slices anyway")
        if self.follow and not self.path:
            raise ValueError("follow is for files that appear; name their folder in `path`, not a dataset")
        return self


class TokenizerConfig(Section):
    """Which tokenizer, and with which template."""

    name: str = Field(description="Folder or hub name.")
    revision: str | None = Field(default=None, description="Commit, tag or branch on the hub.")
    chat_template: str | None = Field(
        default=None,
        description="A file, the template text itself, or the name of one of the tokenizer's templates.",
    )
    template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Extra variables for the template."
    )
    date: Day | None = Field(
        default=None,
        description="Date for templates that ask for one (`strftime_now`); required for these.",
    )
    trust_remote_code: bool = Field(
        default=False, description="Run Python code that comes with the tokenizer."
    )


class TextSpec(Section):
    """Holds what decides the tokens and the mask of a row, and nothing else."""

    format: Format = "auto"
    columns: dict[str, str] = Field(default_factory=dict)
    roles: dict[str, str] = Field(default_factory=dict)
    ignore: tuple[str, ...] = ()
    drop_nulls: bool = False
    carry: dict[str, CarriedColumn] = Field(default_factory=dict)
    media: tuple[MediaKind, ...] = ()
    media_allow: tuple[str, ...] = ()
    tokenizer: TokenizerConfig
    train_on: TrainOn = "all_assistant_messages"
    train_end: TrainEnd = "template"
    max_length: PositiveInt | None = None
    truncation: Truncation = "drop"
