"""Make a shallower student from a teacher: keep evenly spaced decoder layers, and everything else.

The result is a Hugging Face folder of the same family, width and tokenizer, ready for --student-hf.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mkd.config.flags import FlagParser  # noqa: E402
from mkd.errors import UsageError, returns_exit_code  # noqa: E402
from mkd.plan.model_shape import ModelShape  # noqa: E402

LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def picked_layers(num_teacher_layers: int, num_student_layers: int) -> list[int]:
    """Return evenly spaced layer indices, including the first and the last."""
    if not 1 < num_student_layers <= num_teacher_layers:
        raise UsageError(
            f"--num-layers {num_student_layers} cannot be picked from {num_teacher_layers} layers",
            "the first and the last layer are kept, and evenly spaced ones between them",
            f"choose 2 to {num_teacher_layers}",
            code="student-layers-not-pickable",
        )
    step = (num_teacher_layers - 1) / (num_student_layers - 1)
    return [round(i * step) for i in range(num_student_layers)]


def make_student(teacher_dir: Path, out_dir: Path, num_layers: int) -> list[int]:
    """Write the student folder, and return the teacher layers that it consists of."""
    from safetensors import safe_open  # imported here: with torch it takes seconds, and --help must not wait
    from safetensors.torch import save_file

    from mkd.checkpoint.hf.hf_assets import HFAssets

    layers = picked_layers(ModelShape.from_hf_dir(teacher_dir).num_layers, num_layers)
    position = {str(teacher): student for student, teacher in enumerate(layers)}
    tensors = {}  # name -> Tensor
    for file in sorted(teacher_dir.glob("*.safetensors")):
        with safe_open(file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 (not a dict)
                match = LAYER.match(name)
                if match is None:
                    tensors[name] = shard.get_tensor(name)
                elif match[1] in position:
                    tensors[f"model.layers.{position[match[1]]}.{name[match.end() :]}"] = shard.get_tensor(
                        name
                    )
    HFAssets.of(teacher_dir).copy_to(out_dir)
    config = json.loads((teacher_dir / "config.json").read_text(encoding="utf-8"))
    config["num_hidden_layers"] = num_layers
    if config.get("layer_types"):
        config["layer_types"] = [config["layer_types"][i] for i in layers]
    save_file(tensors, out_dir / "model.safetensors", metadata={"format": "pt"})
    (out_dir / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return layers


@returns_exit_code
def main() -> None:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf", type=Path, required=True, help="Hugging Face folder of the teacher")
    parser.add_argument("--num-layers", type=int, required=True, help="decoder layers of the student")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    args = parser.parse_args()
    print(f"kept teacher layers {make_student(args.hf, args.out, args.num_layers)} in {args.out}")


if __name__ == "__main__":
    sys.exit(main())
