"""Names that error codes had before there was one code for each remedy."""

from __future__ import annotations

_FORMER = {  # code -> its former names
    "add-flag": (
        "align-without-teacher ckpt-step-without-load cut-needs-text experts-without-sequence-parallel "
        "fp8-without-bf16 overlap-without-distributed-optimizer recompute-full-incomplete "
        "requeued-without-load rollout-server-url-missing student-size-missing task-missing "
        "teacher-peers-missing train-iters-missing wsd-without-decay-iters"
    ),
    "already-exists": "corpus-exists folder-holds-model out-exists",
    "batch-not-divisible": "microbatches-not-divisible",
    "cached-file-damaged": (
        "array-file-damaged document-not-alignable rollout-record-damaged teacher-corpus-does-not-fit"
    ),
    "chat-marks-not-usable": "chat-mark-not-placed chat-record-without-marks",
    "chat-template-drops-tools": "chat-call-dropped chat-tools-not-rendered",
    "checkpoint-damaged": (
        "checkpoint-incomplete checkpoint-metadata-damaged checkpoint-metadata-missing "
        "checkpoint-not-loadable checkpoint-pickle-unreadable checkpoint-pointer-damaged "
        "checkpoint-pointer-missing checkpoint-pointer-unreadable checkpoint-state-damaged"
    ),
    "checkpoint-missing": "convert-checkpoint-missing model-checkpoint-missing",
    "checkpoint-not-found": "checkpoint-step-ambiguous",
    "checkpoint-of-another-model": "convert-model-unknown export-of-another-model export-stage-missing",
    "choose-another-folder": (
        "cache-folder-holds-model export-hf-is-read launch-scripts-exist save-holds-another-run "
        "student-overwrites-teacher"
    ),
    "continuation-not-scorable": "task-answer-with-special-token",
    "corpus-damaged": "corpus-empty corpus-file-missing image-table-damaged",
    "corpus-of-another-model": (
        "corpus-of-another-image-processor corpus-of-another-tokenizer corpus-of-conversations-for-teacher"
    ),
    "cut-not-supported": (
        "cut-not-expressible experts-cut-not-supported hidden-cut-not-supported "
        "images-cut-not-supported student-not-loadable width-cut-not-supported"
    ),
    "data-file-empty": "audit-data-empty corpus-without-tokens prompts-empty task-file-empty",
    "data-file-kind-unknown": "task-file-kind-unknown",
    "data-file-unreadable": "data-file-not-valid task-file-unreadable",
    "data-not-writable": "corpus-not-writable data-cache-not-writable",
    "data-package-missing": "pillow-missing pyarrow-missing teacher-cache-needs-pyarrow",
    "data-path-missing": "held-out-data-missing prompt-data-path-missing",
    "data-files-unclear": "data-path-is-folder data-path-is-pattern data-path-not-a-file",
    "data-path-not-found": "corpus-files-missing corpus-input-not-found",
    "exclude-each-other": (
        "auto-layout-with-layout average-of-different-tokens key-set-twice pair-losses-exclusive "
        "save-and-load-differ save-missing sinks-with-context-parallel submit-with-ckpt-step "
        "virtual-stages-given-twice warmup-given-twice"
    ),
    "flag-replaced": "sbatch-option-reserved",
    "fp8-not-possible": (
        "fp8-blocks-not-divisible fp8-not-on-this-cuda fp8-not-on-this-gpu "
        "fp8-not-on-this-transformer-engine fp8-widths-not-divisible fp8-with-experts "
        "fp8-with-latent-attention fp8-without-gpu fp8-without-transformer-engine"
    ),
    "gpu-missing": "benchmark-without-gpu memory-history-without-gpu profile-without-gpu",
    "hf-files-damaged": (
        "hf-index-empty hf-index-not-valid hf-scales-not-valid hf-shard-missing hf-shard-unreadable "
        "hf-tensor-missing hf-tensor-not-in-index hf-tensor-not-in-shard"
    ),
    "hf-quantisation-not-supported": "hf-quantisation-unknown hf-tensor-dtype",
    "hf-tensor-unexpected": (
        "hf-head-not-tied hf-parameter-without-source hf-tensor-shape hf-tensor-without-parameter"
    ),
    "hf-weights-missing": "model-config-not-found",
    "image-not-valid": (
        "image-damaged image-file-empty image-format-unknown image-mode-unknown image-too-narrow"
    ),
    "image-outside-root": "image-root-missing",
    "image-placeholders-differ": "image-placeholder-in-text",
    "image-processor-not-valid": "image-processor-not-loadable image-side-not-divisible",
    "image-too-large": "image-file-too-large",
    "image-unreadable": "image-data-uri-not-valid record-image-url",
    "images-not-read": (
        "corpus-with-images images-for-text-model images-without-processor pair-with-images "
        "prompt-with-images task-images-for-text-model task-images-with-examples"
    ),
    "layers-not-divisible": "layers-fewer-than-stages virtual-stage-layers-not-divisible",
    "layout-not-valid": (
        "deepstack-beyond-first-stage layout-layers-differ layout-stage-empty layout-stages-differ "
        "pipeline-rank-without-experts"
    ),
    "length-not-divisible": (
        "fp8-rows-not-divisible seq-length-not-divisible sequence-parallel-not-divisible "
        "xtoken-seq-length-not-divisible"
    ),
    "logger-not-started": "wandb-not-started",
    "longer-than-seq-length": (
        "continuation-too-long conversations-too-long pair-too-long prompt-too-long task-images-too-long"
    ),
    "metrics-empty": "runs-without-common-step",
    "metrics-unreadable": "metrics-record-not-valid",
    "model-config-not-valid": (
        "deepstack-without-block expert-groups-not-valid experts-of-a-token head-groups-not-divisible "
        "layer-types-incomplete model-config-key-missing model-config-not-json model-config-not-object "
        "model-config-value-not-valid rope-lengths-differ rope-sections-not-valid "
        "sliding-window-missing tile-not-divisible tower-not-divisible"
    ),
    "model-feature-not-supported": (
        "activation-not-supported bidirectional-not-supported layer-type-not-supported "
        "rope-not-supported routing-not-supported"
    ),
    "model-missing": (
        "kd-teacher-logits-missing kd-teacher-rows-missing student-missing teacher-missing "
        "teacher-without-model"
    ),
    "model-not-divisible": (
        "benchmark-vocabulary-not-divisible experts-not-divisible ffn-not-divisible heads-not-divisible"
    ),
    "model-not-finite": "evaluation-not-finite teacher-not-finite",
    "model-type-not-supported": "image-family-unknown vision-model-not-supported",
    "names-equal": "report-run-twice task-names-equal teacher-names-equal",
    "not-writable": (
        "folder-not-writable launch-scripts-not-writable out-not-writable picture-not-writable "
        "report-not-writable"
    ),
    "number-of-processes": "convert-layout-not-processes make-student-several-processes",
    "numbers-contradict": (
        "max-new-tokens-too-many min-lr-above-lr pack-too-long profile-steps-empty slurm-time-too-short "
        "warmup-not-below-decay"
    ),
    "optimizer-state-differs": "checkpoint-precision-differs optimizer-kind-differs optimizer-state-missing",
    "out-of-range": (
        "characters-per-sample-below-one divergence-parameter-out-of-range fewshot-negative "
        "image-limit-below-one kd-ratio-out-of-range kd-temperature-out-of-range logits-columns-too-few "
        "max-bad-records-negative parity-counts-below-one profile-ranks-beyond-world "
        "projection-top-k-zero sample-beyond-packs samples-per-shard-below-one "
        "student-larger-than-teacher target-params-too-small teacher-weight-not-positive "
        "teacher-weights-all-zero topk-not-in-vocabulary value-out-of-range workers-negative "
        "xtoken-top-k-below-one"
    ),
    "package-missing": (
        "log-package-missing matplotlib-missing picture-needs-pillow tensorboard-missing "
        "tiktoken-missing wandb-missing"
    ),
    "pair-not-valid": "pair-answer-repeats-prompt pair-without-difference",
    "pairs-and-others": "dpo-without-pairs pairs-with-other-records pairs-without-dpo",
    "parity-beyond-tolerance": "parity-vocabularies-differ",
    "path-not-found": (
        "config-file-not-found config-file-unreadable image-root-not-found projection-not-found "
        "report-not-a-run tokenizer-file-missing"
    ),
    "preempted": "preempted-before-loading preempted-while-building",
    "preferences-exclude": (
        "dpo-with-cross-tokenizer-reference dpo-with-distillation dpo-with-rollouts "
        "dpo-with-several-references dpo-with-stored-reference"
    ),
    "projection-does-not-fit": "projection-not-valid",
    "record-ambiguous": "column-twice record-of-two-forms record-system-twice",
    "record-empty": "pair-answer-empty pair-prompt-empty prompt-empty",
    "record-field-not-text": (
        "record-field-null task-completion-not-text task-prompt-not-text task-question-not-text "
        "task-subject-not-text"
    ),
    "record-images-not-valid": (
        "record-image-missing record-images-not-list record-images-out-of-order record-images-unused "
        "record-images-without-messages record-part-unknown"
    ),
    "record-incomplete": "prompt-missing",
    "record-loss-flag-not-valid": (
        "chat-loss-of-other-role record-loss-flag-not-binary record-loss-flag-of-part "
        "record-loss-flags-differ record-loss-on-other-role record-loss-on-prompt"
    ),
    "record-not-json": "record-not-object record-not-utf8 task-record-not-json task-record-not-object",
    "record-text-damaged": "record-nul record-surrogate",
    "record-value-not-valid": (
        "record-message-not-object record-messages-not-list record-speaker-unknown "
        "record-template-kwargs record-tool-calls-of-other-role record-value-of-wrong-type "
        "task-answer-not-valid task-choices-not-valid"
    ),
    "record-without-known-keys": "task-record-without-known-keys",
    "remove-flag": (
        "accept-change-unknown benchmark-device-taken chat-template-kwargs-reserved "
        "divergence-without-parameter expert-parallel-without-experts "
        "expert-tensor-parallel-not-supported flag-not-needed image-root-of-text-model "
        "setting-without-effect submit-without-signal-handler teacher-weight-of-single "
        "virtual-stages-without-pipeline"
    ),
    "reward-failed": "reward-not-finite reward-process-ended reward-raised rewards-impossible",
    "reward-needs": (
        "reference-divergence reward-at-other-temperature reward-without-group reward-without-rollouts "
        "reward-without-weight staleness-without-ratio"
    ),
    "rollout-server-answer": "rollout-server-probe rollout-server-refuses",
    "rollout-server-not-ready": (
        "rollout-server-models rollout-server-tokenizer rollout-server-too-short "
        "rollout-server-unreachable rollout-server-without-refit"
    ),
    "rollout-server-weights": "rollout-server-refit rollout-server-version",
    "rollouts-exclude": (
        "rollout-architecture rollout-with-context-parallel rollout-with-cross-entropy "
        "rollout-with-images rollout-with-stored-teacher"
    ),
    "save-disk-full": "save-file-too-large save-quota-exceeded",
    "save-failed": "export-failed",
    "save-folder-taken": "convert-save-not-empty export-overwrites-source",
    "save-not-writable": "export-folder-not-writable",
    "split-leaves-nothing": "held-out-documents-missing split-leaves-no-training",
    "step-not-finite": "steps-not-finite",
    "stop-ids-not-valid": "stop-ids-differ stop-ids-invalid stop-ids-missing",
    "stored-teacher-excludes": (
        "stored-teacher-divergence stored-teacher-not-alone stored-teacher-with-xtoken"
    ),
    "teacher-cache-differs": (
        "teacher-cache-image-processor-differs teacher-cache-length-differs teacher-cache-pack-differs "
        "teacher-cache-part-missing teacher-cache-setting-differs teacher-cache-tokenizer-differs "
        "teacher-cache-vocabulary-differs"
    ),
    "teacher-cache-in-the-way": (
        "teacher-cache-description-not-valid teacher-cache-not-described teacher-cache-of-another-run"
    ),
    "teacher-cache-incomplete": "teacher-cache-damaged",
    "teacher-prefetch-not-possible": (
        "prefetch-plan-not-possible rollout-with-teacher-prefetch teacher-prefetch-with-interleaving "
        "teacher-prefetch-without-pipeline teacher-prefetch-without-teacher"
    ),
    "token-beyond-vocabulary": (
        "continuation-beyond-vocabulary corpus-token-beyond-vocabulary prompt-beyond-vocabulary "
        "tokens-do-not-join"
    ),
    "tokenizer-file-not-valid": (
        "model-config-refused tiktoken-encoding-unknown tokenizer-file-not-sentencepiece "
        "tokenizer-file-not-tiktoken"
    ),
    "tokenizer-missing": (
        "tiktoken-class-unknown token-bytes-unknown tokenizer-not-fast tokenizer-not-loadable"
    ),
    "tokenizer-of-another-model": "image-token-differs image-token-missing tokenizer-beyond-vocabulary",
    "tokenizers-differ": "no-common-token no-common-token-in-heads",
    "too-little-data": "measured-text-too-short task-too-few-examples task-without-questions",
    "untrusted-files": "checkpoint-file-outside-folder checkpoint-holds-code hf-shard-outside-folder",
    "value-not-valid": (
        "blend-incomplete blend-weight-not-positive chat-date-invalid chat-template-kwargs-invalid "
        "data-path-empty picture-kind-unknown profile-ranks-not-valid profile-steps-not-valid "
        "projection-stages-empty report-not-html reward-name-not-valid rollout-server-url-invalid "
        "sbatch-option-not-valid sbatch-value-not-valid slurm-time-not-valid split-not-valid "
        "teacher-name-not-valid teacher-prefetch-not-valid train-parts-without-text"
    ),
    "value-unknown": (
        "alignment-mode-unknown benchmark-shape-unknown export-dtype-not-supported "
        "kd-divergence-unknown kd-rule-unknown metrics-key-unknown tokenizer-type-unknown"
    ),
    "world-not-divisible": (
        "expert-parallel-not-divisible teacher-peers-across-machines teacher-peers-not-divisible "
        "teacher-without-peers"
    ),
    "yaml-not-valid": (
        "key-is-list key-not-plain key-twice key-with-tag key-without-value section-not-mapping "
        "teachers-not-list xtoken-without-value yaml-syntax"
    ),
}
NEW_NAMES = {old: code for code, names in _FORMER.items() for old in names.split()}
"""Former name -> the code of today."""
