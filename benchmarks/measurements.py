"""Sum and mean of five models' gradients: the data of docs/measurements.md, and with --sweep those of docs/defaults.md.

::

    python benchmarks/measurements.py docs/data/measurements.csv --rounds 9
    python benchmarks/measurements.py docs/data/defaults.csv --rounds 5 --sweep

Each case has a process of its own, so that nothing it leaves in memory affects the next. The file is written again
after each, so that an interrupted run leaves what it has measured.
"""

import argparse
import csv
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from hier_allreduce.bench import Case, all_contenders, devices_here, load_model, measure, ours, report_text
from hier_allreduce.bench.report import HEAD, case_lines, contender_row, failures, title
from hier_allreduce.tuning.candidates import one_choice

MODELS = ("resnet50", "mobilenet_v2", "bert_base", "vgg16", "dlrm_criteo_kaggle")


def measured(name, average, rounds, sweep):
    """Return the report on a model: of peers, or of our strategies that differ from the default in one choice."""
    strategies = [ours(strategy, f"ours:{choice}") for choice, strategy in one_choice().items()]
    contenders = [ours(), *strategies] if sweep else all_contenders()
    return measure(Case(load_model(name), devices_here(), average), contenders, rounds)


def records(name, report):
    """Return a record for each contender that was timed: its case, a note, and the cells of its row."""
    head = ["contender", *(" ".join(lines).strip() for lines in list(zip(*HEAD))[1:])]
    note = " ".join([*case_lines(report), *(f"{failure}." for failure in failures(report))])
    timed = [measured for measured in report.contenders if measured.step_seconds]
    rows = [contender_row(report, measured) for measured in timed]
    return [{"case": title(name, report), "note": note, **dict(zip(head, row))} for row in rows]


def main():
    """Measure all cases and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", metavar="FILE.csv")
    parser.add_argument("--rounds", type=int, default=9, metavar="N")
    parser.add_argument("--sweep", action="store_true", help="our strategies instead of peers")
    args = parser.parse_args()
    rows = []
    for name in MODELS:
        for average in (False, True):
            with ProcessPoolExecutor(1, get_context("spawn")) as process:
                report = process.submit(measured, name, average, args.rounds, args.sweep).result()
            print(report_text(name, report), end="\n\n", flush=True)
            rows += records(name, report)
            with open(args.file, "w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n", restval="")
                writer.writeheader()
                writer.writerows(rows)


if __name__ == "__main__":
    main()
