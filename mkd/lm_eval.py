"""lm-evaluation-harness on mkd's own model: its command line, with `mkd` as one more model.

    python -m mkd.lm_eval run --model mkd --model_args pretrained=DIR --tasks hellaswag,arc_easy
    python -m mkd.lm_eval run --model mkd --model_args pretrained=STUDENT,load=runs/qwen --tasks piqa

`load` names a checkpoint of a run, so that no export is needed. An export also runs with the harness's own
`--model hf`. Needs `pip install 'lm-eval[hf]'`.
"""

from __future__ import annotations

import sys

from mkd.errors import UsageError, returns_exit_code

INSTALL = "pip install 'lm-eval[hf]'"


@returns_exit_code
def main() -> None:
    """Run the harness's command line with the model `mkd` registered."""
    try:
        from lm_eval.__main__ import cli_evaluate
        from lm_eval.api.registry import register_model
    except ModuleNotFoundError as error:
        what, why = "lm-evaluation-harness is not installed", f"the module {error.name} is missing"
        raise UsageError(what, why, INSTALL, code="package-missing") from error
    from mkd.platform import detect

    detect()  # before Megatron is imported, to silence its warnings
    from mkd.evaluation.harness_model import model_class

    register_model("mkd")(model_class())
    cli_evaluate()


if __name__ == "__main__":
    sys.exit(main())
