"""Compare random programs, rewritten with nothing checked, with what eager makes of them.

    python tools/fuzz.py --seeds 0 1000                       # of all kinds
    python tools/fuzz.py --seeds 0 1000 --kind recurrence --jobs 8

Kinds: graphs of views, sums and products; recurrences, unrolled; such loops as Dynamo captures them; loops whose
carries read one another, complex ones and maxima; loops that keep states in variables, lists, dictionaries and objects;
and layers of public code, as they are or changed at random, through the whole compiler, in many modes.
No code is generated: what the compiler's passes make of a program runs operation by operation. A line is printed for
each program that is wrong, with its kind and seed, and at the end how many were run and what was found in them. The
exit status tells whether all were right. `tests/support/programs.py` says what is compared.
"""

from __future__ import annotations

import argparse
import resource
import signal
import sys
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

# Programs that a process runs before another takes its place: PyTorch keeps something of each.
# `max_tasks_per_child` would do that, but waits forever in Python before 3.12.1.
PROGRAMS_A_PROCESS = 800
# What a program may take: seconds of the processor, after which its loops get an error every second, and bytes.
SECONDS, BYTES = 120, 8 << 30
KINDS = ("graph", "recurrence", "captured", "coupled", "kept", "layer", "changed")


def one(kind: str, seed: int) -> tuple[str, int, str, list[str]]:
    """Run one program; returns its kind and seed, what is wrong with it, and what was found in it."""
    warnings.simplefilter("ignore")
    import torch

    from support import programs, random_graphs, random_loops, random_states, trial

    torch.set_num_threads(1)
    r, about = Random(seed), ""
    signal.signal(signal.SIGPROF, _too_long)
    signal.setitimer(signal.ITIMER_PROF, SECONDS, 1)
    try:
        if kind in ("layer", "changed"):
            about, outcome = trial.trial(r, changed=kind == "changed")
        elif kind == "graph":
            program = random_graphs.graph(r)
            about, outcome = program.about, programs.judge(program)
        elif kind == "kept":
            program = random_states.kept(r)
            about, outcome = program.about, programs.judge_captured(program)
        else:
            draw = random_loops.coupled if kind == "coupled" else random_loops.recurrence
            program = draw(r) if kind == "recurrence" else draw(r, captured=True)
            about = program.about
            outcome = programs.judge(program) if kind == "recurrence" else programs.judge_captured(program)
    except Exception as error:  # a compiler that fails is wrong, too
        return kind, seed, f"{type(error).__name__}: {str(error)[:300]} | {about}", []
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    found = [rewrite.rsplit(" as ", 1)[-1].split(":")[0] for rewrite in outcome.rewrites]
    return kind, seed, f"{outcome.failure} | {about}" if outcome.failure else "", found


def _too_long(*_: object) -> None:
    raise TimeoutError(f"more than {SECONDS} seconds of the processor")


def main() -> int:
    """Run all programs of the kinds and seeds that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs=2, metavar=("FIRST", "END"), default=(0, 100))
    parser.add_argument("--kind", choices=KINDS, nargs="+", default=list(KINDS))
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args()
    found: Counter[str] = Counter()
    wrong = count = 0
    work = [(kind, seed) for kind in given.kind for seed in range(*given.seeds)]
    share = PROGRAMS_A_PROCESS * given.jobs
    for batch in (work[i : i + share] for i in range(0, len(work), share)):
        limit = resource.setrlimit, (resource.RLIMIT_AS, (BYTES, BYTES))
        with ProcessPoolExecutor(given.jobs, get_context("spawn"), *limit) as pool:
            for kind, seed, failure, names in pool.map(one, *zip(*batch, strict=True), chunksize=4):
                count += 1
                found.update(names)
                if failure:
                    wrong += 1
                    print(f"{kind} {seed}: {failure}", flush=True)
    print(f"{count} programs, {wrong} wrong; found in them: {dict(found.most_common())}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
