"""What do fewer KV heads cost in quality, and what do they save?

Three parts, on the sources of Python's documentation as Debian has them, or on the files of `--text`:
1. `models`: one small decoder trained from nothing with the same budget as MHA, GQA and MQA: held-out loss, bytes, ms.
2. `conversion`: SmolLM2 converted from 3 KV heads to 1 by each method, before and while it is trained on: held-out loss.
3. `attention`: what the last word of a sentence attends to, with 3 KV heads and converted to 1.
`python -m benchmarks.quality [--part PART] [--quick] [--save] [--plot] [--json]`; finished runs of the same budget, which
`--save` has kept, are not run again.
"""

import argparse
import json
import sys
from typing import Any

from rich.console import Console

from benchmarks import quality_attention, quality_conversion, quality_models, texts
from benchmarks.quality_study import QUICK, Budget, Study, kept
from benchmarks.timing import machine, save

PARTS = {"models": quality_models, "conversion": quality_conversion, "attention": quality_attention}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=PARTS, action="append", help="which to run; all where none is named")
    parser.add_argument("--text", nargs="+", default=(), metavar="FILE", help="texts in UTF-8 instead of Debian's package")
    parser.add_argument("--quick", action="store_true", help="tiny models and budgets, to see that all of it runs")
    parser.add_argument("--save", action="store_true", help="keep each finished run in benchmarks/results/quality.json")
    parser.add_argument("--plot", action="store_true", help="draw what is kept into benchmarks/results/quality_*.png")
    parser.add_argument("--json", action="store_true", help="print one line of JSON and nothing else")
    options = parser.parse_args()
    if options.quick and (options.save or options.plot):
        parser.error("--quick only shows that all of it runs; leave out --save and --plot")

    console = Console(quiet=options.json, highlight=False)
    result = kept() if options.save or options.plot else {}

    def keep(part: str, found: dict[str, Any]) -> None:
        result[part] = {"machine": machine(), **found}
        if options.save:
            save("quality", result)

    study = Study(texts.read(options.text), QUICK if options.quick else Budget(), result, keep, console)
    for part in options.part or PARTS:
        PARTS[part].show(console, PARTS[part].answer(study))
    if options.plot:
        from benchmarks import quality_plots

        quality_plots.draw(result)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
