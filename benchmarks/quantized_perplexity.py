"""What weights in 8 bits cost in perplexity: a model on the same text in each type of weights.

    python -m benchmarks.quantized_perplexity runs/quickstart --data 'texts/*.txt'

Measures as `genesis eval` does, each sample alone, and ends with exit code 1 where a type's perplexity is more than 1 %
above that of the weights as they are, or the text has fewer than 100,000 tokens.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from genesis_cli.session import evaluate

ALLOWED = 0.01  # rise of the perplexity
LEAST = 100_000  # tokens
KINDS = ("auto", "fp8", "int8")


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """Perplexity and loss in each type, and the rise over the first."""
    rows: dict[str, dict[str, float]] = {}
    tokens = 0
    for kind in KINDS:
        found = evaluate(
            arguments.folder,
            arguments.data,
            seq_len=arguments.seq_len,
            batch_size=8,
            device=arguments.device,
            dtype=kind,
        )
        tokens = int(found["eval/num_tokens"])
        rows[kind] = {"loss": found["eval/loss"], "perplexity": found["eval/perplexity"]}
        rows[kind]["rise"] = rows[kind]["perplexity"] / rows["auto"]["perplexity"] - 1
        print(f"{kind:5} loss {rows[kind]['loss']:.5f}  perplexity {rows[kind]['perplexity']:.4f} ", end=" ")
        print(f"rise {rows[kind]['rise']:+.3%}  {tokens:,} tokens", flush=True)
    return {"model": Path(arguments.folder).name, "device": arguments.device, "tokens": tokens, "types": rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--data", action="append", required=True, help="file, folder or glob; may be repeated")
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="where the JSON result goes")
    arguments = parser.parse_args()
    found = measured(arguments)
    if arguments.out is not None:
        from benchmarks.result_files import write_result

        write_result(arguments.out, found)
    if found["tokens"] < LEAST:
        print(f"{found['tokens']:,} tokens are too few to judge")
    return found["tokens"] < LEAST or any(row["rise"] > ALLOWED for row in found["types"].values())


if __name__ == "__main__":
    sys.exit(main())
