"""The meaning of every error code: what is wrong, and what the reader can do about it.

A code stands for one remedy. Two errors share it if the reader has to do the same.
"""

from __future__ import annotations

from mkd.errors import (
    EXIT_CHECKPOINT,
    EXIT_CRASH_LOOP,
    EXIT_DATA,
    EXIT_NON_FINITE,
    EXIT_PREEMPTED,
    EXIT_USAGE,
    MkdError,
)

MEANINGS: dict[int, dict[str, str]] = {  # exit code -> code -> meaning
    MkdError.exit_code: {
        "data-worker-ended": (
            "A process that loads data was ended, mostly for want of memory: give the job more."
        ),
        "metrics-not-written": "metrics.jsonl cannot be written: free disk space and start the run again.",
        "out-of-gpu-memory": "A GPU ran out of memory: change one of the settings that the message lists.",
        "packaged-file-missing": "The installation of mkd is incomplete: install it again.",
        "peer-cannot-start": "Another rank failed first: read the error of that rank.",
        "rollout-server-answer": (
            "The rollout server answers in another way than vLLM does: start a vLLM server of the student."
        ),
        "rollout-server-weights": (
            "The rollout server, or the writer of records, does not have the student's weights: start it for "
            "this run alone."
        ),
        "sbatch-missing": "Slurm is not installed here: submit from a login node.",
    },
    EXIT_USAGE: {
        "add-flag": "The run needs one more setting: add the one that the message names.",
        "already-exists": "The output exists: choose another name, or give --overwrite.",
        "batch-not-divisible": (
            "--global-batch-size does not divide over ranks or stages: use a value of the message."
        ),
        "chat-template-without-marks": (
            "The chat template has no {% generation %} marks: add them, or use --chat-loss turns."
        ),
        "choose-another-folder": "The folder holds something that must stay: choose another one.",
        "command-line-not-valid": "The command line cannot be parsed: see --help.",
        "command-unknown": "mkd has no such command: correct its name.",
        "cut-not-supported": "mkd cannot cut this model in this way: cut something else.",
        "data-path-missing": "No training data, held-out data or prompts are given: name their files.",
        "disk-too-small": (
            "The disk has less room than the run will write: make room, or choose another disk."
        ),
        "exclude-each-other": "Two settings cannot be given together: keep one of them.",
        "flag-not-yet": (
            "mkd does not have this feature of Megatron-LM yet: do as the message says until then."
        ),
        "flag-replaced": "mkd has another flag for this: use that one.",
        "flag-unknown": "mkd has no such flag: correct its name, or leave it out.",
        "fp8-not-possible": (
            "The teacher, or this machine, cannot run this FP8 recipe: use another recipe, or bf16."
        ),
        "gpu-missing": "A setting needs a GPU, and there is none: change it, or use a machine with a GPU.",
        "host-memory-not-pinned": (
            "The host has too little memory that can be page-locked: give the job more."
        ),
        "hub-login": "The hub does not let you write there: use a token that may write, or another name.",
        "hub-unreachable": "The hub cannot be asked: try again later, or export without an upload.",
        "image-processor-not-valid": (
            "The image processor cannot be loaded or used: repair preprocessor_config.json."
        ),
        "image-processors-differ": (
            "Teacher and student read images in different ways: use one preprocessor_config.json."
        ),
        "key-unknown": "A file of settings has a key that mkd does not know: correct its name.",
        "layers-not-divisible": (
            "Layers do not divide over pipeline stages: give a layout, or use other stages."
        ),
        "layout-not-valid": (
            "A pipeline layout does not fit the model or the stages: use one like that of the message."
        ),
        "length-not-divisible": (
            "A sequence length does not divide as layout or precision need it: use a value of the message."
        ),
        "load-holds-no-checkpoint": (
            "--load names a folder without a checkpoint: check the path, or leave --load out."
        ),
        "logger-not-started": (
            "A service that gets the metrics did not start: do what the message says, or leave its flag out."
        ),
        "model-feature-not-supported": (
            "The model has a feature that mkd does not compute: use a model without it."
        ),
        "model-missing": "No student or no teacher is given: name its folder, or what replaces it.",
        "model-not-divisible": (
            "A model's size does not divide over the processes: use another parallel size."
        ),
        "model-type-not-supported": (
            "mkd does not know this kind of model: use a model of a supported family."
        ),
        "names-equal": "Two things have one name: give each its own.",
        "not-writable": "A file or folder cannot be written: choose another one, or mend its permissions.",
        "number-of-processes": (
            "The command was started with the wrong number of processes: start it as the message says."
        ),
        "numbers-contradict": "Two numbers do not fit each other: change one of them.",
        "out-of-range": "A number is too small or too large: choose one in the range that the message names.",
        "package-missing": (
            "A Python package is not installed: install it, or leave out the setting that needs it."
        ),
        "path-not-found": "A file or folder that a flag names cannot be read: check the path.",
        "preferences-exclude": (
            "A loss of preference pairs cannot be combined with this setting: change the setting."
        ),
        "projection-does-not-fit": (
            "A projection matrix is of other tokenizers: remove the file, so that mkd builds it again."
        ),
        "ranks-chose-differently": (
            "Ranks have different values of what must be one: start again, or give the value."
        ),
        "remove-flag": "A flag or key has no effect in this run, or no meaning: remove it.",
        "reward-needs": (
            "A run with --reward, or with a reference, needs another value of a setting: give that one."
        ),
        "reward-not-found": "The function of --reward cannot be imported: name one that can.",
        "rollout-server-not-loopback": (
            "The rollout server is on another machine: allow that, or use one on this machine."
        ),
        "rollout-server-not-ready": (
            "The rollout server is missing, or was started in another way: start it as the message says."
        ),
        "rollout-server-token": (
            "The rollout server refuses the token: set the environment variable that the message names."
        ),
        "rollouts-exclude": (
            "Completions in training cannot be combined with this setting or model: change it."
        ),
        "stop-ids-not-valid": "It is not clear which tokens end a text: correct eos_token_id.",
        "stored-teacher-excludes": (
            "A stored teacher cannot be combined with this setting: change it, or run the teacher."
        ),
        "teacher-cache-temperature-differs": (
            "The stored teacher was exported at another temperature: use that, or export again."
        ),
        "teacher-prefetch-not-possible": (
            "Teacher forwards ahead are not possible here: leave --teacher-prefetch out, or give 0."
        ),
        "tokenizer-file-not-valid": (
            "A file of a tokenizer or of its model is damaged or of another kind: download it again."
        ),
        "tokenizer-missing": (
            "There is no tokenizer that mkd can load: put its files into the folder, or name another one."
        ),
        "tokenizer-of-another-model": "The tokenizer does not belong to the model: use the model's own one.",
        "tokenizers-differ": (
            "Two models have other tokens: use models with one tokenizer, or xtoken settings for a teacher."
        ),
        "value-not-valid": "A value is not written as this setting needs it: write it as the message shows.",
        "value-unknown": "A value is none of those that this setting has: choose one of the list.",
        "world-not-divisible": (
            "The number of processes does not divide as the settings ask: change one of the two."
        ),
        "yaml-not-valid": (
            "A file of settings is not written as mkd reads it: correct the line that the message names."
        ),
    },
    EXIT_DATA: {
        "bad-record": "A record was bad when the corpus was built: the message has its place and the reason.",
        "cached-file-damaged": (
            "A file that mkd made is damaged or outdated: remove it, and mkd makes it again."
        ),
        "chat-marks-not-usable": (
            "The template's marks do not fit this record: use --chat-loss turns, or correct the marks."
        ),
        "chat-template-drops-tools": "The chat template does not write tools or calls: use one that does.",
        "chat-template-missing": (
            "The tokenizer has no chat template: add one, or write records without conversations."
        ),
        "chat-template-refuses": "The chat template refuses a conversation: check roles and their order.",
        "chat-turn-not-found": (
            "mkd cannot tell which tokens an answer has: use another template, or prompt and completion."
        ),
        "continuation-not-scorable": (
            "An answer of a held-out task cannot be scored: repair or remove the record."
        ),
        "corpus-damaged": "A tokenised corpus is damaged or incomplete: tokenise it again.",
        "corpus-without-numbers": (
            "The loss reads a number of each record that the corpus was made without: make it with --numbers."
        ),
        "corpus-of-another-model": (
            "A corpus was tokenised for another model or run: tokenise the raw files for this run."
        ),
        "corpus-without-loss-tokens": "Nothing in the data has loss: check how the records are written.",
        "data-file-empty": "A file of data holds nothing: check how it was made.",
        "data-file-kind-unknown": "mkd does not read files of this kind: convert it to one of the list.",
        "data-file-unreadable": (
            "A file of data cannot be read: check its permissions, and that it was written completely."
        ),
        "data-not-writable": (
            "Prepared data cannot be written: name a folder with room and the right permissions."
        ),
        "data-package-missing": "A Python package that reads these data is not installed: install it.",
        "data-files-unclear": "A path names files of several kinds, or one twice: name the ones to read.",
        "data-path-not-found": "A file of data is not there: check the path.",
        "data-set-not-found": (
            "A data set of the Hugging Face hub cannot be had: check its name, the network and the login."
        ),
        "data-set-part-unknown": (
            "A data set of the hub does not have what is asked for: name one of the parts it has."
        ),
        "data-preparation-failed": (
            "Preparing the data failed for a reason of the system: the message has it."
        ),
        "image-changed": (
            "An image has changed since its corpus was tokenised: restore it, or tokenise again."
        ),
        "image-not-valid": "An image cannot be decoded: repair, convert or remove it.",
        "image-outside-root": (
            "An image is not below --image-root: name that folder, or copy the image into it."
        ),
        "image-placeholders-differ": (
            "A text and its images do not fit in the chat template: remove what stands for an image."
        ),
        "image-too-large": "An image is too large: make it smaller, or raise --max-image-pixels.",
        "image-unreadable": "An image cannot be read: check its path or data URI; download what is a URL.",
        "images-not-read": (
            "Images stand where nothing reads them: use another model, or remove those records."
        ),
        "longer-than-seq-length": (
            "Records are longer than --seq-length: raise it, or shorten or leave out the records."
        ),
        "metrics-empty": "Runs have no metrics to show or to compare yet: let them run on.",
        "metrics-unreadable": "metrics.jsonl cannot be read: repair it, or name another folder.",
        "pair-not-valid": (
            "The answers of a pair are the same, or repeat the prompt: correct or remove the record."
        ),
        "pairs-and-others": (
            "Preference pairs need a loss, such as --dpo-beta, and files of their own: give both."
        ),
        "record-ambiguous": "A record can be read in two ways: keep one of the two.",
        "record-empty": "A prompt or an answer is empty: repair or remove the record.",
        "record-field-not-text": "A field is not a text, or is empty: repair or remove the record.",
        "record-images-not-valid": (
            "Images and their places in a record do not fit: correct the list or the parts."
        ),
        "record-incomplete": "A record lacks a part: add it.",
        "record-key-not-supported": (
            "A record has a key that changes its meaning, and that mkd does not read: do as the message says."
        ),
        "record-loss-flag-not-valid": (
            "A flag of a message asks for a loss that cannot be: correct or remove the flag."
        ),
        "record-not-json": "A line is not a JSON object in UTF-8: repair or convert it.",
        "record-text-damaged": "A text has characters that are none: repair or remove the record.",
        "record-too-long": "A record is far too long: split it, or remove it.",
        "record-value-not-valid": "A field has a value of the wrong kind: write it as the message shows.",
        "record-without-known-keys": "A record has none of the keys that mkd reads: rename its keys.",
        "reward-failed": "The function of --reward failed, or returned no usable number: repair it.",
        "reward-timed-out": (
            "The function of --reward took too long: raise --reward-timeout-s, or make it faster."
        ),
        "split-leaves-nothing": (
            "--split leaves no document for training or held-out loss: give that part more."
        ),
        "teacher-cache-differs": (
            "A stored teacher was exported with other data or settings: use those, or export again."
        ),
        "teacher-cache-in-the-way": (
            "The folder holds other files, or another stored teacher: choose another --out, or --overwrite."
        ),
        "teacher-cache-incomplete": (
            "A stored teacher is incomplete or damaged: start its export again, which completes it."
        ),
        "teacher-cache-not-found": (
            "The folder holds no stored teacher: name the --out folder of `mkd topk` or `mkd hidden`."
        ),
        "token-beyond-vocabulary": (
            "Tokens do not fit the model, or not the text: use the model's own tokenizer."
        ),
        "tokenizer-without-eos": (
            "The tokenizer has no token that ends a text: set one, or use --no-append-eod."
        ),
        "too-little-data": "There are too few examples, questions or tokens: give more, or ask for fewer.",
        "too-many-bad-records": (
            "More records are bad than --max-bad-records allows: repair them, or raise it."
        ),
    },
    EXIT_CHECKPOINT: {
        "after-export-failed": (
            "The export is complete, and what came after it failed: repair the cause, and repeat that alone."
        ),
        "checkpoint-damaged": (
            "A checkpoint, or the file that names the last one, is damaged: choose one with --ckpt-step."
        ),
        "checkpoint-missing": (
            "The folder holds no checkpoint: name one that --save or `mkd convert` has written to."
        ),
        "checkpoint-none-whole": (
            "No checkpoint of the folder is whole: restore it from a copy, or start anew."
        ),
        "checkpoint-not-found": "--ckpt-step names no checkpoint of this folder: choose another step.",
        "checkpoint-of-another-model": (
            "A checkpoint or folder is of another model: name the folder that it was made from."
        ),
        "hf-adapter": "The folder holds an adapter: merge it into its model first.",
        "hf-config-of-other-weights": "config.json belongs to other weights: copy the right one.",
        "hf-files-damaged": "Files of a model are missing or damaged: download it again.",
        "hf-link-outside-folder": (
            "A file of the model is a link to elsewhere: name that place if you trust it."
        ),
        "hf-model-not-found": "There is no such folder, and no such model on the hub: check the name.",
        "hf-not-safetensors": "The weights are not safetensors: convert them.",
        "hf-quantisation-not-supported": (
            "The weights are stored in a format that mkd does not read: use the original checkpoint."
        ),
        "hf-tensor-prefix": "The tensors have other names: save the model again as the message says.",
        "hf-tensor-unexpected": (
            "The weights are not those that config.json describes: check one against the other."
        ),
        "hf-weights-missing": "The folder is not a whole model: name one with config.json and weights.",
        "inputs-unreadable": "Files of models or data cannot be read: check them.",
        "model-config-not-valid": (
            "config.json cannot be read, lacks a value, or has a wrong one: download it again."
        ),
        "optimizer-state-differs": (
            "The optimizer's state does not fit this run: give the flags of its run, or start anew."
        ),
        "parity-beyond-tolerance": "Two models do not compute the same: check that both sides are one model.",
        "run-differs": (
            "The checkpoint was saved with other data or settings: restore them, or accept the change."
        ),
        "save-disk-full": (
            "A checkpoint does not fit the disk, the quota or a limit: make room, and restart with --load."
        ),
        "save-failed": "A checkpoint or export could not be written: remove the cause, and start again.",
        "save-folder-taken": "The output folder holds what must stay: choose another one.",
        "save-in-use": "Another run saves into the folder: stop it, or choose another --save.",
        "save-not-writable": "The folder cannot be written: choose another one.",
        "teacher-cache-weights-differ": (
            "A stored teacher is of other weights than the teacher given: export it again, or leave that out."
        ),
        "untrusted-files": (
            "A model or checkpoint has code, or names files elsewhere: use it only if you know who made it."
        ),
        "weights-not-finite": (
            "Weights are NaN or infinite: download or convert the model again, or use an earlier checkpoint."
        ),
    },
    EXIT_NON_FINITE: {
        "model-not-finite": "A model's predictions are NaN or infinite: check its weights with `mkd parity`.",
        "step-not-finite": (
            "A loss or a gradient is NaN or infinite: look at data, learning rate and weights."
        ),
    },
    EXIT_PREEMPTED: {
        "preempted": "The run was told to end: start the same command again.",
        "rollout-server-lost": (
            "The rollout server or the writer of records went away: start it again, then the same command."
        ),
    },
    EXIT_CRASH_LOOP: {
        "crash-loop": (
            "The same step failed several times: mend the cause of the first error, then start again."
        )
    },
}
