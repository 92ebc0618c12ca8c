"""The settings of what a run reads and writes: data, checkpoints, metrics."""

from __future__ import annotations

from dataclasses import dataclass

from mkd.config.field import option

SAVE_MINUTES = 15.0
"""Default of --save-interval-in-mins."""
PACKINGS = ("bfd", "none")
OVERLONG = ("split", "truncate", "drop")
OVERLONG_CONVERSATIONS = ("drop", "truncate", "truncate-left", "split")


@dataclass(frozen=True)
class DataConfig:
    """Text to read, and how documents become packs."""

    data_path: tuple[str, ...] = option(
        (),
        "training data: one path, several, or WEIGHT PATH WEIGHT PATH ... Each path is a .jsonl, .json, "
        ".parquet or .arrow file of records, or a .txt file of lines. It may also be a folder of such files, "
        "a quoted pattern, hub:ORG/NAME[:CONFIG][:SPLIT], or the prefix of a tokenised .bin/.idx pair. Lines "
        "may be compressed: .jsonl.gz, .jsonl.zst",
    )
    valid_data_path: tuple[str, ...] = option(
        (),
        "held-out data, in the same forms. With it all of --data-path is for training (default: see --split)",
    )
    data_tags: tuple[str, ...] = option(
        (),
        "PATH=TAG ..., tags of the records of whole paths of data or prompts, for --teacher-combination "
        "route. Records with a tag of their own (--tag-key) keep it (default: none)",
    )
    split: str = option(
        "100,0,0",
        "proportions of documents for training, validation and test, without --valid-data-path. "
        "99,1,0 holds out one document in a hundred",
    )
    tokenizer_type: str = option(
        "HuggingFaceTokenizer",
        "kind of tokenizer, by Megatron's names",
        choices=("HuggingFaceTokenizer", "SentencePieceTokenizer", "TiktokenTokenizer"),
    )
    tokenizer_model: str | None = option(
        None, "tokenizer folder, hub id, SentencePiece .model or .tiktoken file (default: the student's)"
    )
    pack: str = option(
        "bfd",
        "way documents fill packs: bfd (best fit decreasing, hardly any padding) or none (one document a "
        "pack, padded)",
        choices=PACKINGS,
    )
    overlong: str = option(
        "split",
        "treatment of documents longer than --seq-length: split into pieces, truncate, or drop",
        choices=OVERLONG,
    )
    overlong_conversations: str | None = option(
        None,
        "treatment of conversations, and of prompts with a completion, that are longer than --seq-length: "
        "drop, truncate, truncate-left or split. truncate keeps the beginning. truncate-left keeps the last "
        "turns that fit whole, else the end of the last question and its answer. split trains answers "
        "without their question (default: drop; truncate with --overlong truncate)",
        choices=OVERLONG_CONVERSATIONS,
    )
    max_bad_records: int = option(
        0,
        "unreadable records (broken JSON, no text, not UTF-8 ...) to leave out of a data file, at most. They "
        "are listed in quarantine.jsonl in the log folder. One more ends the run and names the first ten. Of "
        "records of agents: in all that a run reads after its start or resumption",
    )
    image_root: str | None = option(
        None,
        "folder of the images that records name by path. Links must stay inside. Images are never fetched "
        "over the network (default: records hold all their images)",
    )
    max_image_pixels: int = option(
        1 << 26, "pixels (width x height) of the largest image that is decoded. A larger one is a bad record"
    )
    max_image_side: int | None = option(
        None,
        "pixels of a side to which the image processors of all models reduce images. SmolVLM applies it to "
        "the longer side, in whole tiles. A Qwen model bounds an image's area by its square (default: as "
        "preprocessor_config.json says)",
    )
    max_patches_per_pack: int | None = option(
        None,
        "image patches in a pack, at most. The limit bounds memory and time of the vision tower, as "
        "--seq-length bounds those of the text model (default: no limit)",
    )
    image_token_share: float = option(
        0.5,
        "assumed share of image tokens in the packs of a model with images, for predicted times and memory. "
        "0: its texts have no images. It changes no result",
    )
    chat_loss: str = option(
        "auto",
        "parts of a conversation with loss. auto: what the chat template marks as generation, else all of "
        "the assistant's turns. turns: all of these turns, marked or not. marks: only marked text. last: the "
        "assistant's messages after the last user message. A record may flag single messages",
        choices=("auto", "turns", "marks", "last"),
    )
    chat_template_kwargs: str | None = option(
        None,
        "variables of the chat template as a JSON object, for example '{\"enable_thinking\": false}'. "
        "`chat_template_kwargs` of a record wins (default: none)",
    )
    chat_date: str | None = option(
        None,
        "date, YYYY-MM-DD, for chat templates that write the present date (default: the day of "
        "the run's first start, also after it resumes)",
    )
    append_eod: bool = option(True, "end every document with the end-of-text token")
    shuffle: bool = option(True, "draw packs in random order, a different one in every epoch")
    num_workers: int = option(
        0,
        "processes that prepare batches ahead. 0 leaves it to the training process. "
        "Raise it to 1 or 2 when a fast device waits for data",
    )
    data_cache_path: str | None = option(
        None, "folder for tokenised text, visible to all processes (default: data_cache in the log folder)"
    )
    eval_multiple_choice: tuple[str, ...] = option(
        (), "multiple-choice tasks of evaluations: .jsonl files with question, choices and answer"
    )
    eval_completions: tuple[str, ...] = option(
        (), "completions whose likelihood evaluations measure: .jsonl files with prompt and completion"
    )
    eval_num_fewshot: int = option(0, "solved questions shown before each multiple-choice question")


def rule_for_conversations(overlong: str, given: str | None) -> str:
    """Return the treatment of long conversations: `given`, else as --overlong, but never split."""
    return given or {"split": "drop"}.get(overlong, overlong)


@dataclass(frozen=True)
class CheckpointConfig:
    """Where the student is saved, and where a run resumes."""

    save: str | None = option(
        None,
        "folder to write checkpoints to (default: --log-dir, else runs/NAME; if that folder holds "
        "checkpoints, the first of FOLDER-2, FOLDER-3 and so on that holds none)",
    )
    no_save: bool = option(False, "write no checkpoints: only --export-hf keeps what the run has learned")
    load: str | None = option(
        None,
        "folder of checkpoints to resume from, usually the --save folder. While it is empty, the run starts "
        "from the student's own weights (default: none)",
    )
    save_interval: int | None = option(
        None,
        "optimizer steps between checkpoints. The last step is always saved (default: only by time, see "
        "--save-interval-in-mins)",
    )
    save_interval_in_mins: float | None = option(
        None,
        "minutes without a save after which the run saves by itself. Such checkpoints, and those of a stop, "
        "stay while they are among the newest two. 0 means never (default: 15, or longer where saves are "
        "slow)",
    )
    save_retain_interval: int | None = option(
        None,
        "iterations between checkpoints that are kept; of all others only the latest stays (default: keep "
        "all)",
    )
    keep_checkpoints: int | None = option(
        None, "latest checkpoints to keep, besides those of --save-retain-interval (default: keep all)"
    )
    async_save: bool = option(
        False,
        "copy a checkpoint to host memory and write it while training continues. "
        "Needs host memory for each process's part",
    )
    ckpt_step: int | None = option(
        None,
        "iteration of --load to resume from (default: the latest, or the newest undamaged one if that is "
        "damaged)",
    )
    accept_change: tuple[str, ...] = option(
        (),
        "differences to accept from the run that saved the checkpoint, by their names in the error: "
        "data, tokenizer, loss, teacher and others (default: none)",
    )
    export_hf: str | None = option(
        None, "folder to export the trained student to, as a Hugging Face model (default: no export)"
    )
    push_to_hub: str | None = option(
        None,
        "repository of the Hugging Face hub to upload the export to at the end: NAME, or ORGANISATION/NAME. "
        "Needs --export-hf, and a token that may write. New repositories are private (default: no upload)",
    )
    overwrite: bool = option(
        False,
        "replace the model that --export-hf or --push-to-hub holds, if it is not an export of the run that "
        "this one resumes",
    )

    @property
    def keeps_weights(self) -> bool:
        """True if trained weights are written: checkpoints or an export."""
        return bool(self.save or self.export_hf)

    @property
    def minutes_without_save(self) -> float:
        """Minutes after which the run saves by itself; 0: it does not."""
        return SAVE_MINUTES if self.save_interval_in_mins is None else self.save_interval_in_mins


@dataclass(frozen=True)
class LogConfig:
    """Reports of a run: metrics, progress lines, profiles."""

    log_interval: int = option(
        1, "optimizer steps between progress lines and metrics records, which hold their means"
    )
    log_format: str = option(
        "compact",
        "form of the progress lines. compact: one short line of what people watch. megatron: the long line "
        "of Megatron-LM with mkd's fields, for scripts that grep it. metrics.jsonl has every number anyway",
        choices=("compact", "megatron"),
    )
    log_dir: str | None = option(None, "folder for metrics.jsonl and config.yaml (default: --save)")
    name: str = option("kd", "name of the run, for its folder under runs/")
    tensorboard_dir: str | None = option(None, "folder for TensorBoard events (default: none)")
    wandb_project: str | None = option(
        None,
        "Weights & Biases project to send metrics to. WANDB_MODE=offline keeps them in the log folder "
        "(default: none)",
    )
    wandb_entity: str | None = option(
        None, "Weights & Biases user or team of the project (default: the account that is logged in)"
    )
    mlflow_experiment: str | None = option(
        None,
        "MLflow experiment to send metrics to, at MLFLOW_TRACKING_URI or in MLflow's own store here "
        "(default: none)",
    )
    trackio_project: str | None = option(
        None,
        "trackio project to send metrics to. TRACKIO_SPACE_ID or TRACKIO_SERVER_URL sends them to a Space or "
        "a server, else they are files (default: none)",
    )
    profile: bool = option(
        False,
        "write a torch.profiler trace of --profile-steps to profile/ in the log folder. "
        "In a run under nsys profile --capture-range=cudaProfilerApi, mark the steps for nsys instead",
    )
    profile_steps: tuple[str, ...] = option(
        ("11", "12"),
        "first and last iteration to profile. The memory history ends with the last one, unless the run "
        "fails first",
    )
    profile_ranks: tuple[str, ...] = option(("0",), "ranks to profile")
    record_memory_history: bool = option(
        False,
        "record the history of GPU memory on --profile-ranks, until the end of --profile-steps or a failure. "
        "It is written to profile/ in the log folder; see pytorch.org/memory_viz",
    )
